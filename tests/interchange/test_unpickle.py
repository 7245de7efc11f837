"""A hostile pickle is refused without being run, in every file that is read; an honest one gives plain values."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch._utils as torch_utils
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from nereus.boxes import Box, whole
from nereus.interchange.archive import Archive, SavedTensor
from nereus.interchange.dcp import DcpFolder
from nereus.interchange.foreign import open_folder
from nereus.interchange.megatron import common_of
from nereus.interchange.source import UnreadableFolder
from nereus.interchange.unpickle import Record, RefusedPickle, unpickle

ARCHIVE = Path(__file__).parent / "nemo2.tar.xz"


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class OwnClass:
    pass


def hostile(trace: Path) -> dict[str, Any]:
    """Objects whose pickles would leave `trace` behind, or would run code otherwise."""
    return {
        "os.system": Calls(os.system, f"touch {trace}"),
        "eval": Calls(builtins.eval, f"open({str(trace)!r}, 'w')"),
        "getattr": Calls(builtins.getattr, PurePosixPath, "cwd"),
        "open": Calls(io.open, str(trace), "w"),
        "torch.load": Calls(torch.load, str(trace)),
        "own class": OwnClass(),
        "deep": {"optimizer": [{"param_groups": [{"step": Calls(os.system, f"touch {trace}")}]}]},
    }


KINDS = tuple(hostile(Path("x")))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def honest_folder(folder: Path) -> Path:
    dcp.save(
        {"a": torch.arange(6.0).reshape(2, 3)},
        storage_writer=dcp.FileSystemWriter(folder),
        no_dist=True,
    )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_metadata(tmp_path: Path, trace: Path, kind: str) -> None:
    folder = honest_folder(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(hostile(trace)[kind]))
    with pytest.raises(RefusedPickle, match=r"\.metadata: refused"):
        DcpFolder(folder)
    assert not trace.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_common(tmp_path: Path, trace: Path, kind: str) -> None:
    torch.save(hostile(trace)[kind], tmp_path / "common.pt")
    with pytest.raises(RefusedPickle, match=r"common\.pt: refused"):
        common_of(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_tensor_file(tmp_path: Path, trace: Path, kind: str) -> None:
    folder = honest_folder(tmp_path / "dcp")
    torch.save(hostile(trace)[kind], folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RefusedPickle, match=r"distcp: refused"):
        DcpFolder(folder).read("a", whole((2, 3)))
    assert not trace.exists()


def test_hostile_nemo_folder(tmp_path: Path, trace: Path) -> None:
    """In each file of a real NeMo 2 folder: metadata, common.pt (read for the step) and YAML that names an object."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "nemo2"
    yaml = folder / "context" / "model.yaml"
    kept = yaml.read_text()
    yaml.write_text(f"config: !!python/object/apply:os.system ['touch {trace}']\n")
    with pytest.raises(UnreadableFolder, match=r"model\.yaml: refused"):
        open_folder(folder)
    yaml.write_text(kept)
    (folder / "weights" / ".metadata").write_bytes(pickle.dumps(hostile(trace)["os.system"]))
    with pytest.raises(RefusedPickle, match=r"names posix\.system"):
        open_folder(folder)
    assert not trace.exists()


def test_the_trap_works(trace: Path) -> None:
    """The same pickles do run where nothing refuses them."""
    pickle.loads(pickle.dumps(hostile(trace)["os.system"]))
    assert trace.exists()


def test_hostile_paths_and_places(tmp_path: Path) -> None:
    folder = honest_folder(tmp_path / "dcp")
    whole_metadata = (folder / ".metadata").read_bytes()
    for name, value in (("relative_path", "../secret"), ("relative_path", "/etc/passwd"), ("offset", 1 << 40)):
        metadata = pickle.loads(whole_metadata)
        for info in metadata.storage_data.values():
            setattr(info, name, value)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(RefusedPickle):
            DcpFolder(folder).read("a", whole((2, 3)))


def test_tensor_that_reaches_outside_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save(torch.arange(4.0), path)
    archive = Archive(path)
    saved: Any = archive.content
    wrongs: list[dict[str, Any]] = [{"shape": (5,)}, {"offset": 1}, {"stride": (2,)}, {"offset": -1}]
    for wrong in wrongs:
        fields: dict[str, Any] = {n: getattr(saved, n) for n in ("storage", "offset", "shape", "stride")} | wrong
        with pytest.raises(RefusedPickle, match="outside its storage"):
            archive.read(SavedTensor(**fields), Box((0,), (1,)))


def test_legacy_and_compressed_archives_are_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(2), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as made:
        torch.save(torch.zeros(200), tmp_path / "plain.pt")
        with zipfile.ZipFile(tmp_path / "plain.pt") as plain:
            for name in plain.namelist():
                made.writestr(name, plain.read(name))
    with pytest.raises(RefusedPickle, match=r"no archive of torch\.save"):
        Archive(tmp_path / "legacy.pt")
    packed = Archive(tmp_path / "packed.pt")
    with pytest.raises(RefusedPickle, match="not there in full"):
        packed.read(packed.content, whole((200,)))


def test_honest_values(tmp_path: Path) -> None:
    """What Megatron-LM keeps in common.pt comes out as plain values, Records and tensors."""
    said = {
        "args": argparse.Namespace(num_layers=2, save=PurePosixPath("/x")),
        "iteration": 7,
        "order": OrderedDict(a=1),
        "step": torch.tensor(3.0),
        "list": [(1, 2.5, None, True, "x", {4})],
    }
    torch.save(said, tmp_path / "common.pt")
    archive = Archive(tmp_path / "common.pt")
    found = archive.content
    assert isinstance(found["args"], Record)
    assert found["args"].fields["num_layers"] == 2
    assert (found["iteration"], found["order"], found["list"]) == (7, {"a": 1}, said["list"])
    assert archive.read(found["step"], Box((), ())).item() == 3.0


def test_record_keeps_its_methods() -> None:
    """Attributes that a pickle sets cannot take the place of what a Record does."""
    made = unpickle(pickle.dumps(argparse.Namespace(get="x", fields="y", kind="z")), "p")
    assert (made.get("get"), made.get("fields"), made.kind) == ("x", "y", "argparse.Namespace")


@given(st.data())
def test_boxes_of_saved_tensors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any box of a tensor of any type, also one that is a view, is what torch says."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]))
    tensor = torch.arange(2 * torch.Size(shape).numel()).reshape(2, *shape).to(dtype)[1]
    if data.draw(st.booleans()) and len(shape) > 1:
        tensor = tensor.transpose(0, 1)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in tensor.shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, tensor.shape, strict=True))
    path = tmp_path_factory.mktemp("t") / "t.pt"
    path.write_bytes(b"before")
    with path.open("ab") as file:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        file.write(buffer.getvalue() + b"behind")
    archive = Archive(path, 6, len(buffer.getvalue()))
    box = Box(start, stop)
    assert torch.equal(archive.read(archive.content, box), tensor[box.slices((0,) * len(start))])


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    """Bytes that are no pickle never raise anything else."""
    with contextlib.suppress(RefusedPickle):
        unpickle(noise, "noise")


def rebuilt(*arguments: Any) -> Any:
    """A tensor as a pickle describes it, with other arguments."""
    return Calls(torch_utils._rebuild_tensor_v2, *arguments)


class Stored:
    """Pickles as the storage "0" of 4 float32."""


def tensor_file(path: Path, *arguments: Any) -> Path:
    """An archive as torch.save makes it, whose one tensor has these arguments after its storage."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    pickler.persistent_id = lambda value: ("storage", torch.FloatStorage, "0", "cpu", 4) if value is Stored else None  # type: ignore[method-assign]
    pickler.dump(rebuilt(Stored, *arguments))
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x/data.pkl", buffer.getvalue())
        made.writestr("x/data/0", torch.arange(4.0).numpy().tobytes())
    return path


def test_tensors_of_wrong_arguments_are_refused(tmp_path: Path) -> None:
    honest = Archive(tensor_file(tmp_path / "t.pt", 1, (3,), (1,), False, OrderedDict()))
    assert honest.read(honest.content, whole((3,))).tolist() == [1, 2, 3]
    wrongs: list[tuple[Any, ...]] = [
        (), ("a", (3,), (1,)), (float("inf"), (3,), (1,)), (0, 3, 1), (0, (3,), (1, 1)), (0, (-3,), (1,)), (0, ("3",), (1,)),
    ]  # fmt: skip
    for wrong in wrongs:
        archive = Archive(tensor_file(tmp_path / "t.pt", *wrong))
        with pytest.raises(RefusedPickle, match=r"t\.pt: refused: "):
            archive.content  # noqa: B018  # reading it is what is tested
    torch.save({"args": Calls(torch_utils._rebuild_parameter)}, tmp_path / "p.pt")
    with pytest.raises(RefusedPickle, match=r"p\.pt: refused: a value in its pickle is damaged: IndexError"):
        Archive(tmp_path / "p.pt").content  # noqa: B018


def test_values_too_deep_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "deep.pt", "w") as made:
        made.writestr("x/data.pkl", b"(" * 5000 + b"t" * 5000 + b".")
    with pytest.raises(RefusedPickle, match=r"deep\.pt: refused: a value in its pickle is damaged: RecursionError"):
        Archive(tmp_path / "deep.pt").content  # noqa: B018


def test_an_unreadable_archive_is_told_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(torch.zeros(4), tmp_path / "t.pt")
    archive = Archive(tmp_path / "t.pt")
    saved = archive.content
    (tmp_path / "t.pt").unlink()
    with pytest.raises(UnreadableFolder, match=r"t\.pt: cannot be read: No such file"):
        Archive(tmp_path / "t.pt")
    with pytest.raises(UnreadableFolder, match=r"t\.pt: cannot be read: No such file"):
        archive.read(saved, whole((4,)))
    (tmp_path / "t.pt").mkdir()
    with pytest.raises(UnreadableFolder, match=r"t\.pt: cannot be read: Is a directory"):
        Archive(tmp_path / "t.pt")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_flipped_bytes_of_an_archive_are_refused_or_harmless(tmp_path: Path, compression: int) -> None:
    """Nothing but our own errors comes out, wherever a byte is changed or the file ends."""
    path = tmp_path / "t.pt"
    torch.save({"step": torch.tensor(3.0), "list": [1, "x"]}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", compression) as made:
        for name in plain.namelist():
            made.writestr(name, plain.read(name))
    data = path.read_bytes()
    for at in range(len(data)):
        for changed in (
            data[:at],
            data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :],
            data[:at] + b"\1" + data[at + 1 :],
        ):
            path.write_bytes(changed)
            with contextlib.suppress(RefusedPickle, UnreadableFolder):
                archive = Archive(path)
                step = archive.content.get("step") if isinstance(archive.content, dict) else None
                if isinstance(step, SavedTensor):
                    archive.read(step, whole(step.shape))


def test_steps_that_are_none(tmp_path: Path) -> None:
    from nereus.interchange.megatron import optimizer_steps

    def said(step: Any) -> Any:
        torch.save({"optimizer": {"param_groups": [{"step": step}]}}, tmp_path / "common.pt")
        return common_of(tmp_path)

    assert optimizer_steps(tmp_path, said(torch.tensor(7.0))) == 7
    assert optimizer_steps(tmp_path, said(7)) == 7
    for wrong in (torch.zeros(2), torch.tensor(float("nan")), float("inf"), "7"):
        with pytest.raises(UnreadableFolder, match=r"common\.pt: optimizer step .*expected a whole number"):
            optimizer_steps(tmp_path, said(wrong))


def test_flipped_bytes_are_told_by_file(tmp_path: Path) -> None:
    folder = honest_folder(tmp_path / "dcp")
    data = bytearray((folder / ".metadata").read_bytes())
    for at in range(0, len(data), 7):
        torn = data[:at]
        (folder / ".metadata").write_bytes(torn)
        with pytest.raises(RefusedPickle, match=json.dumps(str(folder))[1:-1]):
            DcpFolder(folder)
