"""The picture of a trace: slots over hours, and the mean response length over steps."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from nereus.report.figure import save, style
from nereus.sim.traces import FleetTrace


def draw_trace(trace: FleetTrace, path: Path) -> None:
    """Draws the trace to `path` (.png or .pdf); equal traces give equal bytes."""
    with style():
        panels = 1 if trace.lengths is None else 2
        figure = Figure(figsize=(7, 2.4 * panels), layout="constrained")
        axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
        nodes = trace.nodes
        hours = [at / 3600 for at in (*nodes.at_seconds, nodes.until_seconds)]
        slots = [trace.slots_per_node * count for count in (*nodes.counts, nodes.counts[-1])]
        axes[0].step(hours, slots, where="post", color="tab:blue", linewidth=1.2)
        axes[0].set(title=f"{trace.name}: slots", xlabel="hours", ylabel="slots", ylim=(0, None), xlim=(0, hours[-1]))
        if trace.lengths is not None:
            curve = trace.lengths
            axes[1].plot(curve.at_steps, curve.mean_tokens, color="tab:orange", linewidth=1.2)
            axes[1].set(title=curve.name, xlabel="step", ylabel="mean response tokens", ylim=(0, None))
        save(figure, path.parent, path.stem, (path.suffix.removeprefix("."),))
