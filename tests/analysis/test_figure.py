"""Figures: stable bytes, whatever the user's own settings are."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from nereus.report.figure import draw, mark_sample, save, style


def written(folder: Path, *, sample: bool = False) -> dict[str, bytes]:
    with style():
        figure = Figure(figsize=(3, 2), layout="constrained")
        figure.subplots().plot([1, 2, 3], label="reward")
        if sample:
            mark_sample(figure)
        paths = save(figure, folder, "line", ("png", "pdf", "svg"))
    return {path.name: path.read_bytes() for path in paths}


def test_the_same_bytes_under_other_settings(tmp_path: Path) -> None:
    first = written(tmp_path / "a")
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 5}):
        assert written(tmp_path / "b") == first
        assert mpl.rcParams["font.size"] == 20
    assert set(first) == {"line.png", "line.pdf", "line.svg"}
    assert b"CreationDate" not in first["line.pdf"]
    assert b"dc:date" not in first["line.svg"]


def test_a_sample_is_marked(tmp_path: Path) -> None:
    with_mark, without = written(tmp_path, sample=True), written(tmp_path)
    assert all(with_mark[name] != without[name] for name in without)


def test_a_drawn_figure_is_saved_and_said(tmp_path: Path) -> None:
    with style():
        empty = save(Figure(), tmp_path, "empty")
    told = draw(Figure, tmp_path, "whole", sample=False)
    assert told.splitlines() == [f"figure: {tmp_path / 'whole.png'}", f"figure: {tmp_path / 'whole.pdf'}"]
    assert (tmp_path / "whole.png").read_bytes() == empty[0].read_bytes()
    draw(Figure, tmp_path, "marked", sample=True)
    assert (tmp_path / "marked.png").read_bytes() != empty[0].read_bytes()
