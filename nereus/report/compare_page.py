"""Compared runs as one page that stands by itself: the table, its notes, and the figure inside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from nereus.report.compare import cells, notes
from nereus.report.compared_run import ComparedRun

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1320px;padding:0 1em;color:#1c1c1c;background:#fff}
h1{font-size:1.5em} img{width:100%;max-width:1100px;height:auto} .wide{overflow-x:auto} .notes{color:#666;font-size:13px}
table{border-collapse:collapse;font-size:13px} th,td{padding:.15em .9em .15em 0;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left;white-space:pre} .simulated{color:#9a3fb0}
"""


def page(runs: Sequence[ComparedRun], figure: Path) -> str:
    """The HTML text; `figure` is the PNG that `draw` wrote."""
    head, marks, *body = cells(runs)
    kinds = ["", *(run.mark for run in runs)]
    parts = [
        '<!doctype html><html lang=en><meta charset=utf-8><link rel=icon href="data:,">',
        f"<title>nereus compare</title><style>{STYLE}</style>",
        f"<h1>{escape(', '.join(run.name for run in runs))}</h1>",
        "<div class=wide><table>",
        _row(head, "th", kinds),
        _row(marks, "td", kinds),
        *(_row(row, "td", kinds) for row in body),
        "</table></div>",
        *(f"<p class=notes>{escape(note)}</p>" for note in notes(runs)),
        f'<img alt="the figure" src="data:image/png;base64,{b64encode(figure.read_bytes()).decode()}">',
    ]
    return "\n".join(parts) + "\n</html>\n"


def _row(row: Sequence[str], tag: str, kinds: Sequence[str]) -> str:
    return "<tr>" + "".join(
        f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for cell, kind in zip(row, kinds, strict=True)
    ) + "</tr>"  # fmt: skip
