"""`nereus compare RUN RUN ... [--out FOLDER] [--names a,b] [--html] [--wandb FOLDER]`: runs side by side, whatever wrote them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.errors import ConfigError
from nereus.report.compared_run import load_runs, named

DONE = 0
PAGE = "compare.html"


def add_compare(parser: ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="a run folder, the folder of an offline W&B run, a log of verl or OpenRLHF, or a folder of such runs",
    )  # fmt: skip
    parser.add_argument("--out", default=".", metavar="FOLDER", help="where compare.png is written (default: here)")
    parser.add_argument("--names", metavar="a,b", help="what to call the runs, instead of their folders' names")
    parser.add_argument("--html", action="store_true", help=f"write {PAGE} beside it: table and figure in one page")
    parser.add_argument("--wandb", metavar="FOLDER", help="write the runs there as offline W&B runs of one group, too")
    parser.add_argument("--group", default="compare", metavar="NAME", help="that group's name (default: compare)")


def compare(arguments: Namespace) -> int:
    """Prints the table, draws the figure and says where it is."""
    names = None if arguments.names is None else [name.strip() for name in arguments.names.split(",")]
    found = [run for word in arguments.runs for run in load_runs(Path(word))]
    if len(found) < 2:
        raise ConfigError("RUN", arguments.runs[0], "expected at least two runs")
    runs = named(found, names)
    from nereus.report.compare import render  # scipy, and below matplotlib, take half a second each

    print(render(runs), end="")
    from nereus.report.compare_figure import draw

    try:
        path = draw(runs, Path(arguments.out))
        print(f"\nfigure: {path}")
        if arguments.html:
            from nereus.report.compare_page import page

            path.with_name(PAGE).write_text(page(runs, path), encoding="utf-8")
            print(f"page: {path.with_name(PAGE)}")
    except OSError as error:
        raise ConfigError("--out", arguments.out, f"expected a folder to write to: {error.strerror}") from error
    if arguments.wandb is not None:
        from nereus.report.wandb_mirror import write_offline

        try:
            for folder in write_offline(runs, Path(arguments.wandb), project="nereus", group=arguments.group):
                print(f"W&B, offline: {folder}")
        except OSError as error:
            raise ConfigError("--wandb", arguments.wandb, f"expected a folder to write to: {error.strerror}") from error
    return DONE
