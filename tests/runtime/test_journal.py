"""The journal: whole lines in sequence, a torn tail is tolerated and cut, everything else is told by line."""

import json
import resource
import signal
from pathlib import Path

import pytest

from nereus.errors import JournalError
from nereus.runtime.journal import Journal, JsonLines, RunFolder, read_journal, read_lines

FULL = Path("/dev/full")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_events_come_back_in_sequence(path: Path) -> None:
    journal = Journal(path)
    assert journal.append("run_started", at_seconds=1.5, slots=(0, 1)) == 1
    assert journal.append("step_done", sync=True, step=1, digests={"w": 2**64 - 1}) == 2
    first, second = read_journal(path)  # flushed, though not closed
    assert first == {"seq": 1, "at_seconds": 1.5, "kind": "run_started", "slots": [0, 1]}
    assert second["digests"] == {"w": 2**64 - 1}
    assert isinstance(second["at_seconds"], float)
    journal.close()
    journal.close()


def test_a_torn_tail_is_left_out_and_cut_at_every_byte(path: Path) -> None:
    with_two = Journal(path)
    with_two.append("a", at_seconds=0.0, text="é\n")
    first_bytes = path.stat().st_size
    with_two.append("b", at_seconds=0.0)
    with_two.close()
    content = path.read_bytes()
    for cut_bytes in range(first_bytes, len(content)):
        path.write_bytes(content[:cut_bytes])
        assert [event["kind"] for event in read_journal(path)] == ["a"]
        journal = Journal(path)
        assert journal.append("c") == 2
        journal.close()
        assert [(event["seq"], event["kind"]) for event in read_journal(path)] == [(1, "a"), (2, "c")]


def test_an_only_line_torn(path: Path) -> None:
    path.write_bytes(b'{"seq":1,"ki')
    assert read_journal(path) == []
    assert Journal(path).append("a") == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"seq":1,"kind":"a"}', '{"seq":2,', '{"seq":3,"kind":"a"}'], "line 2: expected a JSON object"),
        (['{"seq":1,"kind":"a"}', "3"], "line 2: expected a JSON object, found int"),
        (['{"seq":1,"kind":"a"}', ""], "line 2: expected a JSON object"),
        (['{"seq":1,"kind":"a"}', '{"seq":3,"kind":"a"}'], "line 2: expected seq 2, found 3"),
        (['{"seq":1}'], "line 1: expected a kind, found None"),
    ],
)
def test_damage_is_told_with_its_line(path: Path, lines: list[str], words: str) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(JournalError, match=words) as caught:
        read_journal(path)
    assert str(path) in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="No such file"):
        read_journal(tmp_path / "nothing.jsonl")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "nowhere" / "events.jsonl")


def test_what_json_cannot_hold(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(JournalError, match="JSON cannot hold it"):
        journal.append("a", value=object())
    with pytest.raises(JournalError, match="'seq'"):
        journal.append("a", seq=3)
    assert journal.append("b") == 1


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_device_is_named() -> None:
    journal = Journal(FULL)
    with pytest.raises(JournalError, match="/dev/full: line 1 cannot be written: No space left on device"):
        journal.append("a")


def test_a_failed_write_leaves_whole_lines(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"text": "x" * 50})
    before_bytes = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before_bytes + 20, hard))  # a line of 60 is written in part, then fails
    try:
        with pytest.raises(JournalError, match="File too large"):
            lines.append({"text": "y" * 50})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.stat().st_size == before_bytes
    lines.append({"text": "z"})
    assert [record["text"] for record in read_lines(path)] == ["x" * 50, "z"]


def test_numbers_that_are_not_finite_survive(path: Path) -> None:
    Journal(path).append("step_done", metrics={"loss": float("inf")})
    assert read_journal(path)[0]["metrics"] == {"loss": float("inf")}


def test_run_folder(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    assert not folder.is_run()
    folder.config.write_text("", encoding="utf-8")
    Journal(folder.events).append("run_started")
    assert folder.is_run()
    assert json.loads(folder.events.read_text(encoding="utf-8"))["kind"] == "run_started"
    assert {folder.logs.name, folder.rollouts.name, folder.model.name} == {"logs", "rollouts", "model"}
