"""The explanation of a run as one page that stands by itself: no script, no font, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from nereus.control.written import CLASS
from nereus.report.deciding import deciding_lines
from nereus.report.explain import HEAD, LEGEND, Explained, Explanation, facts, table, turned_out, undecided
from nereus.report.plan_text import bytes_text
from nereus.report.verdict import verdict
from nereus.workload import PHASES

Record = Mapping[str, Any]
WIDTH, HEIGHT, LEFT, TOP = 960, 260, 70, 14
COLOURS = ("#7b6fd0", "#2f7fb8", "#58a55c", "#8fbf5a", "#c9b13c", "#d98b3a", "#c8553d", "#8a8a8a")
MEASURED, EXPECTED, BUDGET, CHANGE = "#2f7fb8", "#1c1c1c", "#c8553d", "#9a3fb0"
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1320px;padding:0 1em;color:#1c1c1c;background:#fff}
h1{font-size:1.5em} h2{font-size:1.15em;margin:1.8em 0 .4em} svg{width:100%;height:auto}
svg text{font:11px system-ui,sans-serif} .key span{display:inline-block;margin-right:1.2em}
.key i{display:inline-block;width:.9em;height:.8em;margin-right:.3em} .key i.line{height:0;border-top:2px solid;vertical-align:.3em}
details{margin:.6em 0;border-left:3px solid #ddd;padding-left:.8em} details.change{border-color:#9a3fb0} summary{cursor:pointer}
dl{display:grid;grid-template-columns:7em 1fr;margin:.6em 0;gap:.1em .8em} dt{color:#666} dd{margin:0} .wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px} th,td{padding:.15em .7em .15em 0;text-align:right;white-space:nowrap}
th:last-child,td:last-child{text-align:left} tr.chosen{font-weight:600} .legend{color:#666;font-size:13px}
"""


def page(explanation: Explanation, records: Sequence[Record]) -> str:
    """The HTML text."""
    told = [r["event"] for r in records if r["kind"] == "told" and r["event"][CLASS] == "StepObserved"]
    steps = list({int(event["step"]): event for event in told}.values())  # of a step done twice the last counts
    predictions = {int(r["step"]): r for r in records if r["kind"] == "prediction"}
    name = escape(explanation.config.run.name)
    parts = [
        '<!doctype html><html lang=en><meta charset=utf-8><link rel=icon href="data:,">',
        f"<title>nereus explain {name}</title><style>{STYLE}</style>",
        f"<h1>{name}: policy {escape(explanation.config.nereus.policy)}, {len(steps)} steps</h1>",
        f"<p>{escape('; '.join(line.strip() for line in deciding_lines(explanation.deciding, explanation.training_seconds)))}</p>",
    ]
    if steps:
        parts += [
            "<h2>Plans</h2>",
            *_plans(explanation, steps),
            "<h2>Seconds of a step by phase, and what was predicted before it</h2>",
            *_steps(steps, predictions),
            "<h2>Peak memory of the fullest slot</h2>",
            *_memory(explanation, steps, predictions),
        ]
    parts += ["<h2>Decisions</h2>", f"<p class=legend>{escape(LEGEND)}</p>"]
    parts += [part for one in explanation.decisions for part in _decision(explanation, one)]
    if not explanation.decisions:
        parts.append(f"<p>{escape(undecided(explanation))}</p>")
    return "\n".join(parts) + "\n</html>\n"


def _decision(explanation: Explanation, one: Explained) -> Iterator[str]:
    """One decision; those that changed the plan are open."""
    kind = " class=change open" if one.taken else ""
    yield f"<details{kind}><summary>before step {one.step}: {escape(verdict(one.entry, explanation.texts))}</summary><dl>"
    for name, text in facts(explanation, one):
        yield f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
    if one.outcome is not None:
        for index, line in enumerate(turned_out(one, one.outcome)):
            yield f"<dt>{'' if index else 'turned out'}</dt><dd>{escape(line)}</dd>"
    yield "</dl>"
    if one.entry["weighed"]:
        yield f"<div class=wide><table><tr>{''.join(f'<th>{escape(word)}</th>' for word in HEAD)}</tr>"
        for chosen, cells in table(explanation, one):
            row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            yield f"<tr{' class=chosen' if chosen else ''}>{row}</tr>"
        yield "</table></div>"
    yield "</details>"


def _axis(first: int, last: int, most: float, label: str) -> Iterator[str]:
    """Steps along the bottom, values along the left."""
    for part in range(5):
        y, value = TOP + HEIGHT * (1 - part / 4), most * part / 4
        text = bytes_text(value) if label == "bytes" else f"{value:.3g} {label}"
        yield f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    stride = max(1, (last - first + 1) // 12)
    for step in range(first, last + 1, stride):
        yield f'<text x="{_x(step + 0.5, first, last):.1f}" y="{TOP + HEIGHT + 14}" text-anchor="middle">{step}</text>'


def _x(step: float, first: int, last: int) -> float:
    return LEFT + (WIDTH - LEFT) * (step - first) / (last - first + 1)


def _svg(height: float, content: Iterator[str] | Sequence[str], title: str) -> Iterator[str]:
    yield f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    yield from content
    yield "</svg>"


def _range(steps: Sequence[Record]) -> tuple[int, int]:
    numbers = [int(each["step"]) for each in steps]
    return min(numbers), max(numbers)


def _changes(steps: Sequence[Record], height: float) -> Iterator[str]:
    """A line before each step that ran under another plan than the one before it."""
    first, last = _range(steps)
    for before, after in pairwise(steps):
        if before["plan_id"] != after["plan_id"]:
            x = _x(int(after["step"]), first, last)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height:.0f}" stroke="{CHANGE}" stroke-dasharray="3 3"/>'


def _key(entries: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """Names with their colours, of areas and of lines."""
    areas = [f"<span><i style='background:{colour}'></i>{name}</span>" for name, colour in entries.items()]
    strokes = [f"<span><i class=line style='color:{colour}'></i>{name}</span>" for name, colour in lines.items()]
    return f"<p class=key>{''.join([*areas, *strokes])}</p>"


def _plans(explanation: Explanation, steps: Sequence[Record]) -> Iterator[str]:
    """One row for every plan, one bar for every spell of steps under it."""
    first, last = _range(steps)
    rows = list(dict.fromkeys(str(each["plan_id"]) for each in steps))
    content: list[str] = []
    for each in steps:
        row, step = rows.index(str(each["plan_id"])), int(each["step"])
        x, width = _x(step, first, last), _x(step + 1, first, last) - _x(step, first, last)
        content.append(
            f'<rect x="{x:.1f}" y="{row * 34 + 18}" width="{width:.1f}" height="12" fill="{COLOURS[row % len(COLOURS)]}"/>'
        )
    for row, plan_id in enumerate(rows):
        text = escape(f"{plan_id}  {explanation.plans.get(plan_id, '')}")
        content.append(f'<text x="{LEFT}" y="{row * 34 + 13}">{text}</text>')
    yield from _svg(34 * len(rows) + 6, content, "plans over the steps")


def _steps(steps: Sequence[Record], predictions: Mapping[int, Record]) -> Iterator[str]:
    first, last = _range(steps)
    known = {step: float(record["step_seconds"][0]) for step, record in predictions.items() if first <= step <= last}
    most = max([*(float(each["step_seconds"]) for each in steps), *known.values()]) * 1.05
    content = list(_axis(first, last, most, "s"))
    for each in steps:
        step, base = int(each["step"]), 0.0
        x, width = _x(step + 0.1, first, last), _x(step + 0.9, first, last) - _x(step + 0.1, first, last)
        for colour, phase in zip(COLOURS, PHASES, strict=True):
            seconds = float(each["phase_seconds"].get(phase, 0.0))
            top, size = TOP + HEIGHT * (1 - (base + seconds) / most), HEIGHT * seconds / most
            tip = f"step {step}, {phase}: {seconds:.3f} s"
            content.append(
                f'<rect x="{x:.1f}" y="{top:.2f}" width="{width:.1f}" height="{size:.2f}" fill="{colour}">'
                f"<title>{tip}</title></rect>"
            )
            base += seconds
    content += [*_changes(steps, TOP + HEIGHT), *_line(known, first, last, most)]
    yield from _svg(TOP + HEIGHT + 22, content, "seconds of steps by phase")
    yield _key(dict(zip(PHASES, COLOURS, strict=True)), {"predicted": EXPECTED, "change of plan": CHANGE})


def _memory(explanation: Explanation, steps: Sequence[Record], predictions: Mapping[int, Record]) -> Iterator[str]:
    first, last = _range(steps)
    budget = float(explanation.config.fleet.slot_budget_bytes)
    peaks = {int(e["step"]): float(max(e["peak_bytes"].values())) for e in steps if e["peak_bytes"]}
    expected = {
        step: max(float(size) for size in record["memory_expected_bytes"].values())
        for step, record in predictions.items()
        if first <= step <= last and record["memory_expected_bytes"]
    }
    most = max([budget, *peaks.values(), *expected.values()]) * 1.05
    content = list(_axis(first, last, most, "bytes"))
    for step, size in peaks.items():
        x, width = _x(step + 0.1, first, last), _x(step + 0.9, first, last) - _x(step + 0.1, first, last)
        y, height = TOP + HEIGHT * (1 - size / most), HEIGHT * size / most
        content.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{MEASURED}">'
            f"<title>step {step}: {bytes_text(size)}</title></rect>"
        )
    y = TOP + HEIGHT * (1 - budget / most)
    content.append(
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{BUDGET}" stroke-dasharray="6 4"/>'
    )
    content += [*_changes(steps, TOP + HEIGHT), *_line(expected, first, last, most)]
    yield from _svg(TOP + HEIGHT + 22, content, "peak memory of the fullest slot")
    lines = {"expected": EXPECTED, "a slot's budget": BUDGET, "change of plan": CHANGE}
    yield _key({"measured": MEASURED}, lines)


def _line(values: Mapping[int, float], first: int, last: int, most: float) -> Iterator[str]:
    if not values:
        return
    points = " ".join(
        f"{_x(step + 0.5, first, last):.1f},{TOP + HEIGHT * (1 - min(value, most) / most):.1f}"
        for step, value in sorted(values.items())
    )
    yield f'<polyline points="{points}" fill="none" stroke="{EXPECTED}" stroke-width="1.6"/>'
    for step, value in values.items():
        x, y = _x(step + 0.5, first, last), TOP + HEIGHT * (1 - min(value, most) / most)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{EXPECTED}"/>'
