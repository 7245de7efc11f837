"""The explanation of a run as one page that stands by itself: no script, no font, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nereus.control.written import CLASS
from nereus.report.explain import Explanation, render, verdict
from nereus.report.plan_text import bytes_text
from nereus.workload import PHASES

Record = Mapping[str, Any]
WIDTH, HEIGHT, LEFT, TOP = 960, 260, 70, 14
COLOURS = ("#7b6fd0", "#2f7fb8", "#58a55c", "#8fbf5a", "#c9b13c", "#d98b3a", "#c8553d", "#8a8a8a")
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1040px;padding:0 1em;color:#1c1c1c;background:#fff}
h1{font-size:1.5em} h2{font-size:1.15em;margin:1.8em 0 .4em} svg{width:100%;height:auto}
pre{background:#f5f5f3;padding:.8em;overflow-x:auto;font-size:12px;line-height:1.35} text{font:11px system-ui,sans-serif}
.key span{display:inline-block;margin-right:1em} .key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
details{margin:.5em 0} summary{cursor:pointer}
"""


def page(explanation: Explanation, records: Sequence[Record]) -> str:
    """The HTML text."""
    steps = [r["event"] for r in records if r["kind"] == "told" and r["event"][CLASS] == "StepObserved"]
    predictions = {int(r["step"]): r for r in records if r["kind"] == "prediction"}
    name = escape(explanation.config.run.name)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>nereus explain {name}</title><style>{STYLE}</style>",
        f"<h1>{name}: policy {escape(explanation.config.nereus.policy)}, {len(steps)} steps</h1>",
    ]
    if steps:
        parts += [
            "<h2>Plans</h2>",
            *_plans(explanation, steps),
            "<h2>Seconds of a step by phase; the line is what was predicted before it</h2>",
            *_steps(steps, predictions),
            "<h2>Peak memory of the fullest slot; the line is what was expected, above it the budget</h2>",
            *_memory(explanation, steps, predictions),
        ]
    parts.append("<h2>Decisions</h2>")
    for one in explanation.decisions:
        text = escape(render(explanation, one.step))
        parts.append(
            f"<details><summary>before step {one.step}: {escape(verdict(explanation, one))}</summary><pre>{text}</pre></details>"
        )
    return "\n".join(parts) + "\n</html>\n"


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
    most = max(float(each["step_seconds"]) for each in steps) * 1.05
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
    known = {step: float(record["step_seconds"][0]) for step, record in predictions.items() if first <= step <= last}
    content.append(_line(known, first, last, most))
    yield from _svg(TOP + HEIGHT + 22, content, "seconds of steps by phase")
    key = "".join(f"<span><i style='background:{c}'></i>{p}</span>" for c, p in zip(COLOURS, PHASES, strict=True))
    yield f"<p class=key>{key}</p>"


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
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="#2f7fb8">'
            f"<title>step {step}: {bytes_text(size)}</title></rect>"
        )
    y = TOP + HEIGHT * (1 - budget / most)
    content.append(
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c8553d" stroke-dasharray="6 4"/>'
    )
    content.append(_line(expected, first, last, most))
    yield from _svg(TOP + HEIGHT + 22, content, "peak memory of the fullest slot")


def _line(values: Mapping[int, float], first: int, last: int, most: float) -> str:
    points = " ".join(
        f"{_x(step + 0.5, first, last):.1f},{TOP + HEIGHT * (1 - min(value, most) / most):.1f}"
        for step, value in sorted(values.items())
    )
    return f'<polyline points="{points}" fill="none" stroke="#1c1c1c" stroke-width="1.6"/>'
