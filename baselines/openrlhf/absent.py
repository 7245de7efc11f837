"""Stands in for the packages of OpenRLHF that want a GPU: they can be imported, and nothing of them does anything.

Runs in OpenRLHF's environment, without Nereus; `install` comes before the first import of openrlhf.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGES = ("deepspeed", "flash_attn", "vllm")


class Inert:
    """Whatever is asked of it or done with it, the answer is another one."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Another one."""
        del args, kwargs
        return Inert()


class AbsentModule(ModuleType):
    """Every name in it is an inert class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Inert,), {})


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of PACKAGES and every module in them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The specification of a module of PACKAGES; None for any other."""
        del path, target
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The stand-in."""
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing."""


def install() -> None:
    """From here on PACKAGES can be imported. What looks whether they are there is imported before: for it they are not."""
    import peft  # noqa: F401  # pyright: ignore[reportMissingImports]
    import transformers  # noqa: F401

    sys.meta_path.append(AbsentFinder())
