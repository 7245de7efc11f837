"""What happens to folders when writing fails: a full disk, a kill, a target that is the source; files that cannot be read."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nereus.boxes import Box
from nereus.cli.main import main
from nereus.config import Config, ModelConfig
from nereus.errors import CheckpointError, ConfigError, JournalError
from nereus.interchange import export as writers
from nereus.interchange.archive import Archive
from nereus.interchange.companions import carry
from nereus.interchange.dcp_writer import Written, write_dcp
from nereus.interchange.foreign import open_folder
from nereus.interchange.placing import new_folder
from nereus.interchange.source import UnreadableFolder
from nereus.interchange.start import check_folder
from nereus.model import model_spec
from nereus.rl.tokenizer import ByteTokenizer
from nereus.runtime import checkpoints
from nereus.runtime.outset import export_model
from nereus.runtime.shards import MANIFEST
from tests.interchange.test_folders import TINY, Made, nemo2, own_checkpoint


@contextmanager
def files_up_to(limit_bytes: int) -> Iterator[None]:
    """Longer files fail to be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- a full disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hf", "dcp", "torch_dist", "nemo2"])
def test_a_full_disk_is_one_line(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    own, _, _ = own_checkpoint(tmp_path, TINY)
    before = sorted(path.name for path in tmp_path.iterdir())
    capsys.readouterr()
    for limit_bytes in (0, 4_000, 20_000):  # the first file, the first tensor, a later one
        with files_up_to(limit_bytes):
            code = main(["export", str(own), "--to", str(tmp_path / "out"), "--format", kind])
        shown = capsys.readouterr().err
        assert code == 2
        assert shown == f"error: --to = '{tmp_path / 'out'}': cannot be written: File too large\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_full_disk_for_the_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """common.pt, after the tensors."""
    monkeypatch.setattr(writers, "write_dcp", lambda folder, tensors: None)
    spec = model_spec("actor", TINY)
    for limit_bytes in (0, 300):
        with files_up_to(limit_bytes), pytest.raises(OSError, match="File too large"):
            writers.export_torch_dist(tmp_path, Made(spec), spec)
    writers.export_torch_dist(tmp_path, Made(spec), spec)
    found: Any = Archive(tmp_path / "common.pt").content
    assert found["optimizer"]["optimizer"]["param_groups"] == [{"step": 5}]


@pytest.mark.parametrize(
    ("raised", "expected", "told"),
    [
        (UnreadableFolder("a file is missing"), UnreadableFolder, r"^a file is missing$"),
        (OSError(28, "No space left on device"), OSError, "No space left"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (RuntimeError("[enforce fail] write failed\nframe #0: ...\nframe #1: ..."), OSError, r"^\[enforce fail\] write failed$"),
        (MemoryError(), OSError, r"^MemoryError\(\)$"),
    ],
)  # fmt: skip
def test_what_goes_wrong_inside_torch_comes_out(
    tmp_path: Path, raised: BaseException, expected: type[BaseException], told: str
) -> None:
    def read(_: Box) -> torch.Tensor:
        raise raised

    tensor = Written(key="a", shape=(2,), dtype="float32", chunks=(Box((0,), (2,)),), read=read)
    with pytest.raises(expected, match=told):
        write_dcp(tmp_path / "dcp", [tensor])


def test_a_stop_in_an_export_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    own, _, _ = own_checkpoint(tmp_path, TINY)
    monkeypatch.setattr(writers, "kept", stop)
    assert main(["export", str(own), "--to", str(tmp_path / "out"), "--format", "dcp"]) == 130
    assert not list(tmp_path.glob("*out*"))


# -- new folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder to replace."""
    folder = tmp_path / "old"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("kept")
    return folder


def test_the_source_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, _, _ = own_checkpoint(tmp_path, TINY)
    steps = tmp_path / "run" / "checkpoints"
    steps.mkdir(parents=True)
    own.rename(steps / "step-000000")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before, source = files_in(tmp_path), tmp_path / "source"
    for words in (
        ["export", tmp_path / "run", "--to", tmp_path / "run"],
        ["export", tmp_path / "run", "--to", steps / "step-000000"],
        ["export", steps / "step-000000", "--to", tmp_path / "link"],
        ["export", tmp_path / "link", "--to", steps],
        ["import", source, "--model", tmp_path / "model.json", "--to", source],
        ["import", source, "--model", tmp_path / "model.json", "--to", tmp_path],
    ):
        capsys.readouterr()
        assert main([*map(str, words), "--force"]) == 2, words
        assert "expected a folder that does not hold the source" in capsys.readouterr().err
        assert files_in(tmp_path) == before
    inside = tmp_path / "run" / "hf"
    assert main(["export", str(tmp_path / "run"), "--to", str(inside)]) == 0, "another folder, which may lie in the run"


def test_a_replacement_that_fails_leaves_the_old(tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fails_for_drafts(path: Path, target: Path) -> Path:
        if path.name.endswith(".draft"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_for_drafts)
    with (
        pytest.raises(ConfigError, match="cannot be written: Input/output error"),
        new_folder(old, source=tmp_path / "other", force=True) as draft,
    ):
        (draft / "file").write_text("new")
    assert files_in(tmp_path) == {"old/inner/file": b"kept"}


def test_a_kill_between_the_renames_loses_nothing(tmp_path: Path, old: Path) -> None:
    old.rename(tmp_path / ".old.replaced")
    (tmp_path / ".old.draft").mkdir()
    with pytest.raises(ConfigError, match="it exists"), new_folder(old, source=tmp_path / "other", force=False):
        pass
    assert files_in(old) == {"inner/file": b"kept"}
    old.rename(tmp_path / ".old.replaced")
    with pytest.raises(ZeroDivisionError), new_folder(old, source=tmp_path / "other", force=True):
        raise ZeroDivisionError
    assert files_in(tmp_path) == {"old/inner/file": b"kept"}


def test_a_kill_after_the_renames_is_cleaned_up(tmp_path: Path, old: Path) -> None:
    (tmp_path / ".old.replaced").mkdir()
    (tmp_path / ".old.replaced" / "older").write_text("gone")
    with new_folder(old, source=tmp_path / "other", force=True) as draft:
        (draft / "file").write_text("new")
    assert files_in(tmp_path) == {"old/file": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_file_and_a_link_are_replaced_too(tmp_path: Path, old: Path) -> None:
    (tmp_path / "link").symlink_to(old)
    (tmp_path / "plain").write_text("x")
    for name in ("link", "plain", "link"):
        with new_folder(tmp_path / name, source=tmp_path / "other", force=True) as draft:
            (draft / "file").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old", "plain"]
    assert files_in(old) == {"inner/file": b"kept"}


# -- sources that cannot be read ---------------------------------------------------------------------------------


def test_a_checkpoint_is_verified_before_it_is_used(tmp_path: Path) -> None:
    own, _, _ = own_checkpoint(tmp_path, TINY)
    model = replace(TINY, folder=str(own))
    check_folder(model)
    file = own / "slot-000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot start a run: .*slot-000\.safetensors: its bytes differ"):
        check_folder(model)
    with pytest.raises(CheckpointError, match=r"slot-000\.safetensors: its bytes differ"):
        open_folder(own)
    assert main(["import", str(own), "--to", str(tmp_path / "again")]) == 1
    assert not (tmp_path / "again").exists()
    data[-5] ^= 1
    file.write_bytes(data)
    check_folder(model)
    assert open_folder(own).format == "nereus"


def test_a_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _, _ = own_checkpoint(tmp_path, TINY)
    read: list[Path] = []
    problem = checkpoints._problem
    monkeypatch.setattr(checkpoints, "_problem", lambda path, file: read.append(path) or problem(path, file))
    for _ in range(2):
        check_folder(replace(TINY, folder=str(own)))
    assert read == [own / "slot-000.safetensors"]


def test_a_manifest_is_told_by_its_name(tmp_path: Path) -> None:
    own, _, _ = own_checkpoint(tmp_path, TINY)
    text = (own / MANIFEST).read_bytes()
    for damaged in (text[:400], b"\xff" + text):
        (own / MANIFEST).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"manifest\.json: it"):
            open_folder(own)
        with pytest.raises(ConfigError, match=r"manifest\.json: it"):
            check_folder(replace(TINY, folder=str(own)))


def test_other_keys_are_told_by_folder(tmp_path: Path) -> None:
    tensor = Written(key="a", shape=(2,), dtype="float32", chunks=(Box((0,), (2,)),), read=lambda _: torch.zeros(2))
    write_dcp(tmp_path, [tensor])
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(UnreadableFolder, match=rf"^{tmp_path}: no key ends in .*found a$"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe\x00", b"config: 2020-99-99\n", b"config: {a\n", b"[" * 5000],
    ids=["no text", "no date", "torn", "deep"],
)
def test_a_model_yaml_that_is_none(tmp_path: Path, text: bytes) -> None:
    folder = nemo2(tmp_path)
    (folder / "context" / "model.yaml").write_bytes(text)
    with pytest.raises(UnreadableFolder, match=r"model\.yaml: refused: expected plain YAML"):
        open_folder(folder)


def test_companions_of_the_same_folder(tmp_path: Path) -> None:
    """A run whose model.folder is its own RUN/model."""
    ByteTokenizer().export(tmp_path / "model")
    config = Config(model=ModelConfig(folder=str(tmp_path / "model")))
    tokenizer = (tmp_path / "model" / "tokenizer.json").read_bytes()
    export_model(config, tmp_path / "model")
    first = files_in(tmp_path / "model")
    assert first["tokenizer.json"] == tokenizer
    assert "config.json" in first
    export_model(config, tmp_path / "model")
    assert files_in(tmp_path / "model") == first
    assert carry(tmp_path / "model", tmp_path / "model") == ("tokenizer.json", "tokenizer_config.json")


def test_a_companion_that_cannot_be_read_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as if the new folder were at fault."""
    spec, folder = model_spec("actor", TINY), tmp_path / "hf"
    folder.mkdir()
    writers.export_hf(folder, Made(spec), spec, beside=None)
    ByteTokenizer().export(folder)
    read = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert main(["import", str(folder), "--to", str(tmp_path / "own")]) == 1
    assert capsys.readouterr().err == f"error: {folder / 'tokenizer.json'}: cannot be read: Permission denied\n"


def test_a_model_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(JournalError, match=rf"^{tmp_path / 'model'}: cannot be written: File exists"):
        export_model(Config(), tmp_path / "model")
    with files_up_to(10), pytest.raises(JournalError, match="cannot be written: File too large"):
        export_model(Config(), tmp_path / "other")
