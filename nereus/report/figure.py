"""Figures whose bytes are stable: the same data gives the same files, on any day, whatever the user's matplotlibrc says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
    "svg.hashsalt": "nereus",
}
UNDATED = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None},
}


@contextmanager
def style() -> Iterator[None]:
    """What is drawn and saved within looks the same everywhere."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def mark_sample(figure: Figure) -> None:
    """Writes SAMPLE DATA across `figure`."""
    figure.text(
        0.5, 0.5, "SAMPLE DATA", color="tab:red", alpha=0.22, fontsize=64, fontweight="bold", rotation=20,
        ha="center", va="center", zorder=10, in_layout=False,
    )  # fmt: skip


def save(figure: Figure, folder: Path, name: str, kinds: tuple[str, ...] = ("png", "pdf")) -> list[Path]:
    """Writes `figure` to `folder` once for each kind (png, pdf, svg) and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in kinds]
    for kind, path in zip(kinds, paths, strict=True):
        figure.savefig(path, format=kind, metadata=UNDATED[kind])
    return paths


def draw(drawn: Callable[[], Figure], folder: Path, name: str, *, sample: bool) -> str:
    """Draws and saves an analysis' figure, marked if it is of a sample; the lines that say where it is."""
    with style():
        figure = drawn()
        if sample:
            mark_sample(figure)
        paths = save(figure, folder, name)
    return "\n".join(f"figure: {path}" for path in paths)
