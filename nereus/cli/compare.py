"""`nereus compare RUN RUN ... [--out FOLDER] [--names a,b]`: runs side by side, from run folders or offline W&B folders."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.errors import ConfigError
from nereus.report.compare import load_run, named, render

DONE = 0


def add_compare(parser: ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or the folder of an offline W&B run")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="where compare.png is written (default: here)")
    parser.add_argument("--names", metavar="a,b", help="what to call the runs, instead of their folders' names")


def compare(arguments: Namespace) -> int:
    """Prints the table, draws the figure and says where it is."""
    names = None if arguments.names is None else [name.strip() for name in arguments.names.split(",")]
    if len(arguments.runs) < 2:
        raise ConfigError("RUN", arguments.runs[0], "expected at least two runs")
    runs = named([load_run(Path(run)) for run in arguments.runs], names)
    print(render(runs), end="")
    from nereus.report.compare_figure import draw  # matplotlib takes half a second

    try:
        path = draw(runs, Path(arguments.out))
    except OSError as error:
        raise ConfigError("--out", arguments.out, f"expected a folder to write to: {error.strerror}") from error
    print(f"\nfigure: {path}")
    return DONE
