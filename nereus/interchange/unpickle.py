"""Pickles of foreign checkpoints, read without running anything that they name.

A pickle says which callables the reader shall call. Here every name that is not in the list below is refused, and those
in it never give the real thing: listed classes become inert `Record`s, containers plain ones, types their names. So a
checkpoint can neither run code nor import a module, whatever it holds.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn, Self

from nereus.errors import NereusError

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
CONTAINERS: dict[tuple[str, str], type] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,  # as protocol 2 spells it
}
LISTED: dict[str, frozenset[str]] = {
    # torch DCP: the .metadata file
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.distributed.checkpoint.planner": frozenset(
        ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    "torch.serialization": frozenset(("_get_layout",)),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset(("MCoreMetadata", "MCoreSavePlan")),
    # torch.save: tensors
    "torch._utils": frozenset(("_rebuild_tensor_v2", "_rebuild_parameter")),
    # Megatron's common.pt: arguments, settings, counters
    "argparse": frozenset(("Namespace",)),
    "types": frozenset(("SimpleNamespace",)),
    "pathlib": frozenset(("PosixPath", "PurePosixPath", "Path")),
    "signal": frozenset(("Signals",)),
    "megatron.core.enums": frozenset(("ModelType",)),
    "megatron.core.transformer.enums": frozenset(("AttnBackend", "AttnMaskType", "AttnType", "CudaGraphScope")),
    "megatron.core.optimizer.optimizer_config": frozenset(("OptimizerConfig",)),
    "megatron.core.rerun_state_machine": frozenset(("RerunDiagnostic", "RerunMode", "RerunState")),
    "_codecs": frozenset(("encode",)),  # how protocol 2 spells bytes
    "numpy": frozenset(("dtype", "ndarray")),
    "numpy.core.multiarray": frozenset(("_reconstruct", "scalar")),
    "numpy._core.multiarray": frozenset(("_reconstruct", "scalar")),
    "numpy.dtypes": frozenset(("UInt32DType",)),
}


class RefusedPickle(NereusError):
    """A pickle names something that is not listed, or is damaged; nothing in it was run. Names file and class."""


class Record:
    """An inert stand-in for an object of the listed class `kind`: its attributes, and what it was made from.

    `state` is what it was set to where that is no mapping of attributes.
    """

    kind = ""

    arguments: tuple[object, ...]
    fields: dict[str, Any]
    state: object

    def __new__(cls, *arguments: object) -> Self:  # noqa: D102  # a pickle may leave __init__ out
        made = super().__new__(cls)
        made.arguments, made.fields, made.state = arguments, {}, None
        return made

    def __setstate__(self, state: object) -> None:
        parts: tuple[object, ...] = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.fields.update({str(name): value for name, value in part.items()} if isinstance(part, dict) else {})
        else:
            self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute `name`, or `default`."""
        return self.fields.get(name, default)

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class _Unpickler(pickle.Unpickler):
    """Gives plain values and Records; everything else is refused before it is looked up."""

    def __init__(self, file: BinaryIO, place: str, storage: Callable[[Any], object] | None) -> None:
        super().__init__(file)
        self._place, self._storage = place, storage
        self._kinds: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CONTAINERS:
            return CONTAINERS[module, name]
        if module == "torch" and name in DTYPES:
            return name
        if module == "torch" and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        if name not in LISTED.get(module, ()):
            self._refuse(module, name)
        if (module, name) not in self._kinds:
            self._kinds[module, name] = type(name, (Record,), {"kind": f"{module}.{name}"})
        return self._kinds[module, name]

    def persistent_load(self, pid: Any) -> object:
        if self._storage is None:
            raise RefusedPickle(f"{self._place}: refused: it refers to data outside its pickle, {pid!r}")
        return self._storage(pid)

    def _refuse(self, module: str, name: str) -> NoReturn:
        raise RefusedPickle(
            f"{self._place}: refused: its pickle names {module}.{name}, which is not one of the classes that a "
            "checkpoint needs; nothing in it was run. Do not load this file elsewhere unless you trust where it is from"
        )


def unpickle(data: bytes, place: str, storage: Callable[[Any], object] | None = None) -> Any:
    """The value of a pickle; `place` names its file in errors, `storage` turns persistent ids into values.

    Raises RefusedPickle, before anything is called, when it names a class that is not listed, and when it is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(data), place, storage).load()
    except RefusedPickle:
        raise
    except Exception as error:  # damaged pickles raise whatever they happen to meet
        raise RefusedPickle(f"{place}: refused: its pickle is damaged: {type(error).__name__}: {error}") from error
