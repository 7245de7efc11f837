"""`nereus trace`: what it writes can be made again by the command that it notes, and what it shows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from nereus.cli.main import main
from nereus.sim.traces import read_trace

SHIPPED = Path(__file__).parents[2] / "experiments" / "traces"
PUBLIC = Path("/work/shared/data/traces")


def test_build_show_and_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spot.csv").write_text("0,4\n600,2\n3600,4\n")
    (tmp_path / "lengths.csv").write_text("train_step,mean_response_length\n0,100\n10,300\n")
    out = tmp_path / "made.json"
    words = ["--slots-per-node", "8", "--lengths", str(tmp_path / "lengths.csv"), "--steps", "21"]
    assert main(["trace", "build", str(tmp_path / "spot.csv"), "--out", str(out), *words]) == 0
    made = read_trace(out)
    assert (made.most_slots, made.nodes.counts) == (32, (4, 2, 4))
    assert made.lengths is not None
    assert made.lengths.mean_at(21) == 300
    for suffix in ("png", "pdf"):
        picture = tmp_path / f"a.{suffix}"
        assert main(["trace", "show", str(out), "--picture", str(picture)]) == 0
        assert picture.stat().st_size > 5000
    told = capsys.readouterr().out
    assert "slots   16 to 32" in told
    assert "100 tokens in step 1, 300 in step 21" in told


def test_wrong_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spot.csv").write_text("0,4\n600,2\n")
    source = str(tmp_path / "spot.csv")
    assert main(["trace", "build", source]) == 2
    assert main(["trace", "build", source, "--out", str(tmp_path / "x.json"), "--factor", "0"]) == 2
    assert main(["trace", "show", str(tmp_path / "none.csv")]) == 2
    assert main(["trace", "show", source, "--picture", "a.svg"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert all(line.startswith("error: ") for line in errors)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not on this machine")
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_traces_are_made_by_their_command(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(read_trace(path).origin.command)[1:]
    words[words.index("--out") + 1] = str(tmp_path / path.name)
    monkeypatch.chdir(PUBLIC)
    assert main(words) == 0
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_shipped_traces_say_where_they_come_from() -> None:
    assert len(list(SHIPPED.glob("*.json"))) >= 3
    for path in SHIPPED.glob("*.json"):
        origin = read_trace(path).origin
        assert origin.source
        assert origin.licence
        assert path.stat().st_size < 50_000
