"""Whether a package has what is touched of it: by its source alone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from scripts.gpu_contract.sources import Found, Sources
from scripts.gpu_contract.touched import Touch


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """What a function or a class takes: names by place, names by keyword alone, whether it takes any others."""

    by_place: tuple[str, ...]
    by_name: tuple[str, ...]
    any_place: bool = False
    any_name: bool = False


def complaint(touch: Touch, sources: Sources) -> str:
    """What is wrong with a touch; nothing when it is there, or lies beyond what can be read."""
    if sources.module(touch.module) is None:
        return f"there is no module {touch.module}"
    if not touch.name:
        return _path_complaint(touch, sources)
    words = touch.name.split(".")
    found: Found | None = sources.find(touch.module, words[0])
    if found is None:
        return "" if _made_on_demand(sources, touch.module, words[0]) else f"{touch.module} has no {words[0]}"
    words = words[1:]
    if touch.called:
        return _call_complaint(touch, sources, found, words)
    members = [*words, *(touch.member.split(".") if touch.member else [])]
    return _member_complaint(sources, found, members)


def _path_complaint(touch: Touch, sources: Sources) -> str:
    """Of `import package` and `package.a.b` then."""
    words = touch.member.split(".") if touch.member else []
    module = touch.module
    if not words:
        return ""
    found = sources.find(module, words[0])
    return f"{module} has no {words[0]}" if found is None else _member_complaint(sources, found, words[1:])


def _made_on_demand(sources: Sources, module: str, name: str) -> bool:
    """Whether the module's own __getattr__ knows the name."""
    found = sources.find(module, "__getattr__")
    if found is None or found.node is None:
        return False
    return any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(found.node))


def _member_complaint(sources: Sources, found: Found, members: list[str]) -> str:
    for position, member in enumerate(members):
        if found.node is None:  # a module
            inner = sources.find(found.module, member)
            if inner is None:
                return f"{found.module} has no {member}"
            found = inner
        elif isinstance(found.node, ast.ClassDef):
            if member not in set(_members(sources, found)) and not _strangers_have(sources, found, member):
                return f"{found.module}.{found.node.name} has no {member}"
            return ""  # what the member is cannot be read
        else:
            return "" if position or not isinstance(found.node, ast.FunctionDef) else f"a function has no {member}"
    return ""


def _strangers_have(sources: Sources, found: Found, member: str) -> bool:
    """Whether a base of another package has the member, or cannot be looked at."""
    return any(_stranger_has(name, member) for name in sources.strangers(found))


@cache
def _stranger_has(name: str, member: str) -> bool:
    module, _, last = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module or "builtins"), last)
    except (ImportError, AttributeError):
        return True
    return hasattr(kind, member)


def _members(sources: Sources, found: Found) -> Iterator[str]:
    """Methods, fields, and attributes that any method sets on self, bases included."""
    for _, node in sources.lineage(found):
        for inner in ast.walk(node):
            match inner:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield name
                case ast.Attribute(value=ast.Name(id="self"), attr=attribute, ctx=ast.Store()):
                    yield attribute
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield name
                case ast.Assign(targets=targets):
                    yield from (target.id for target in targets if isinstance(target, ast.Name))


def _call_complaint(touch: Touch, sources: Sources, found: Found, words: list[str]) -> str:
    bound = isinstance(found.node, ast.ClassDef)
    for word in words:
        if found.node is None:
            inner = sources.find(found.module, word)
        elif isinstance(found.node, ast.ClassDef):
            inner = _method(sources, found, word)
        else:
            return ""
        if inner is None:
            return "" if _strangers_have(sources, found, word) else f"there is no {word} to call"
        bound, found = isinstance(found.node, ast.ClassDef), inner
    takes = _parameters(sources, found, bound=bound and not isinstance(found.node, ast.ClassDef))
    if takes is None:
        return ""
    if touch.positional_count > len(takes.by_place) and not takes.any_place:
        return f"takes {len(takes.by_place)} arguments by place, not {touch.positional_count}"
    known = {*takes.by_place[touch.positional_count :], *takes.by_name}
    unknown = [name for name in touch.keywords if name not in known]
    return f"takes no {', '.join(unknown)}" if unknown and not takes.any_name else ""


def _method(sources: Sources, found: Found, name: str) -> Found | None:
    for module, node in sources.lineage(found):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name == name:
                return Found(module=module, node=inner)
    return None


def _parameters(sources: Sources, found: Found, *, bound: bool) -> Parameters | None:
    match found.node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
            static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
            return _of_function(function, skip=bound and not static)
        case ast.ClassDef():
            if (made := _method(sources, found, "__init__")) is not None and made.node is not None:
                assert isinstance(made.node, ast.FunctionDef)
                return _of_function(made.node, skip=True)
            return _of_fields(sources, found)
    return None


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip: bool) -> Parameters:
    place = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return Parameters(
        by_place=tuple(place[1:] if skip else place),
        by_name=tuple(each.arg for each in node.args.kwonlyargs),
        any_place=node.args.vararg is not None,
        any_name=node.args.kwarg is not None,
    )


def _of_fields(sources: Sources, found: Found) -> Parameters | None:
    """Of a class whose fields are its parameters (dataclass, msgspec.Struct); bases come first."""
    names: dict[str, None] = {}
    for _, node in reversed(list(sources.lineage(found))):
        for inner in node.body:
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                names[inner.target.id] = None
    return Parameters(by_place=tuple(names), by_name=()) if names else None
