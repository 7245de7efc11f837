"""`nereus trace build` makes a small derived trace of public ones, `nereus trace show` says what is in one and draws it."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.errors import ConfigError
from nereus.sim.readers import SECONDS_PER_UNIT, read_availability, read_lengths
from nereus.sim.traces import (
    Availability,
    FleetTrace,
    TraceOrigin,
    coarse,
    paced,
    read_trace,
    scaled,
    window,
    write_trace,
)

SECONDS_PER_HOUR = 3600.0


def add_trace(parser: ArgumentParser) -> None:
    """The options of both."""
    parser.usage = "nereus trace build SOURCE --out FILE [options] | nereus trace show FILE [--picture FILE.png]"
    parser.add_argument("action", choices=("build", "show"), help="make a derived trace, or look at one")
    parser.add_argument("source", metavar="FILE", help="a public availability trace, or (show) a derived one too")
    parser.add_argument("--unit", choices=tuple(SECONDS_PER_UNIT), help="of plain `time,count` rows (default: seconds)")
    parser.add_argument("--picture", metavar="FILE", help="draw it to a .png or .pdf file")
    build = parser.add_argument_group("build")
    build.add_argument("--out", metavar="FILE", help="the derived trace, JSON")
    build.add_argument("--name", help="of the derived trace (default: the name of --out)")
    build.add_argument("--slots-per-node", type=int, default=8, metavar="N", help="an instance is a node of N slots")
    build.add_argument("--factor", type=float, default=1.0, metavar="F", help="nodes for each instance")
    build.add_argument("--least-nodes", type=int, default=1, metavar="N", help="never fewer nodes (default: 1)")
    build.add_argument("--most-nodes", type=int, metavar="N", help="never more nodes")
    build.add_argument("--least-change", type=int, default=1, metavar="N", help="leave out changes of fewer nodes")
    build.add_argument("--from-hours", type=float, default=0.0, metavar="H", help="begin there")
    build.add_argument("--hours", type=float, metavar="H", help="so much of it (default: to the end)")
    build.add_argument("--pace", type=float, default=1.0, metavar="F", help="time between changes times F")
    build.add_argument("--lengths", metavar="FILE[:MODEL]", help="stitch this curve of response lengths to it")
    build.add_argument("--steps", type=int, metavar="N", help="spread the curve over N steps (default: as it is)")
    build.add_argument("--lengths-factor", type=float, default=1.0, metavar="F", help="lengths times F")
    build.add_argument("--origin", default="", metavar="TEXT", help="where the sources are published")
    build.add_argument("--licence", default="", metavar="TEXT", help="of the sources")


def trace(arguments: Namespace) -> int:
    """Carries the command out; the exit code."""
    if arguments.picture and Path(arguments.picture).suffix not in (".png", ".pdf"):
        raise ConfigError("--picture", arguments.picture, "expected a name that ends in .png or .pdf")
    if arguments.action == "build":
        if arguments.out is None:
            raise ConfigError("--out", None, "expected the file to write, such as --out experiments/traces/mine.json")
        made = built(arguments)
        write_trace(Path(arguments.out), made)
        print(f"written to {arguments.out}")
    found = shown(Path(arguments.source), arguments.unit) if arguments.action == "show" else made
    print(trace_text(found), end="")
    if arguments.picture:
        from nereus.cli.trace_picture import draw_trace  # matplotlib takes a second

        draw_trace(found, Path(arguments.picture))
        print(f"drawn to {arguments.picture}")
    return 0


def built(arguments: Namespace) -> FleetTrace:
    """The derived trace that the options ask for, with how it was made."""
    if arguments.slots_per_node < 1:
        raise ConfigError("--slots-per-node", arguments.slots_per_node, "expected at least 1")
    nodes = _nodes(arguments, read_availability(Path(arguments.source), arguments.unit))
    name = arguments.name or Path(arguments.out).stem
    lengths = None
    if arguments.lengths:
        file, _, model = str(arguments.lengths).partition(":")
        lengths = read_lengths(Path(file), model)
        lengths = lengths.over(
            arguments.steps or lengths.at_steps[-1] - lengths.at_steps[0] + 1, arguments.lengths_factor
        )
    origin = TraceOrigin(
        source=arguments.origin or Path(arguments.source).name,
        licence=arguments.licence,
        transformation=_transformation(arguments),
        command=_command(arguments),
    )
    return FleetTrace(name=name, slots_per_node=arguments.slots_per_node, nodes=nodes, lengths=lengths, origin=origin)


def _nodes(arguments: Namespace, found: Availability) -> Availability:
    begin = arguments.from_hours * SECONDS_PER_HOUR
    end = found.until_seconds if arguments.hours is None else begin + arguments.hours * SECONDS_PER_HOUR
    if (begin, end) != (0.0, found.until_seconds):
        found = window(found, begin, end)
    found = scaled(found, arguments.factor, least_count=arguments.least_nodes, most_count=arguments.most_nodes)
    return paced(coarse(found, arguments.least_change), arguments.pace)


def _transformation(arguments: Namespace) -> str:
    parts = [f"an instance is {arguments.factor:g} nodes of {arguments.slots_per_node} slots"]
    if arguments.hours is not None or arguments.from_hours:
        length = "to the end" if arguments.hours is None else f"for {arguments.hours:g} h"
        parts.append(f"from {arguments.from_hours:g} h {length}")
    if arguments.least_change > 1:
        parts.append(f"changes of fewer than {arguments.least_change} nodes left out")
    if arguments.pace != 1.0:
        parts.append(f"time times {arguments.pace:g}")
    if arguments.lengths:
        spread = f" over {arguments.steps} steps" if arguments.steps else ""
        parts.append(f"response lengths of {Path(arguments.lengths).name}{spread}, times {arguments.lengths_factor:g}")
    return "; ".join(parts)


def _command(arguments: Namespace) -> str:
    """The command line that makes the same file again, options with their default left out."""
    parser = ArgumentParser()
    add_trace(parser)
    words = ["nereus", "trace", "build", arguments.source]
    for name, value in sorted(vars(arguments).items()):
        default = parser.get_default(name)
        if name not in ("action", "source", "picture") and value is not None and value != default:
            text = f"{value:g}" if isinstance(value, float) else Path(value).name if name == "out" else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)


def shown(path: Path, unit: str | None) -> FleetTrace:
    """A derived trace, or a public availability as nodes of one slot."""
    if path.suffix == ".json" and '"slots_per_node"' in _start(path):
        return read_trace(path)
    return FleetTrace(name=path.stem, slots_per_node=1, nodes=read_availability(path, unit))


def _start(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")[:4096]
    except OSError as error:
        raise ConfigError("trace", str(path), f"a readable file: {error.strerror}") from error


def trace_text(found: FleetTrace) -> str:
    """What people want to know of a trace."""
    nodes, size = found.nodes, found.slots_per_node
    hours = nodes.until_seconds / SECONDS_PER_HOUR
    changes = nodes.gains_count + nodes.losses_count
    lines = [
        f"{found.name}: {hours:.2f} h, nodes of {size} slot{'s' if size > 1 else ''}",
        f"  slots   {size * min(nodes.counts)} to {size * max(nodes.counts)}, mean {size * nodes.mean_count:.1f}",
        f"  changes {changes} ({nodes.gains_count} up, {nodes.losses_count} down), {changes / hours if hours else 0:.2f} an hour",
    ]
    if found.lengths is not None:
        curve = found.lengths
        lines.append(
            f"  lengths {curve.name}: {curve.mean_tokens[0]:.0f} tokens in step {curve.at_steps[0]}, "
            f"{curve.mean_tokens[-1]:.0f} in step {curve.at_steps[-1]}, "
            f"{min(curve.mean_tokens):.0f} to {max(curve.mean_tokens):.0f}"
        )
    origin = found.origin
    facts = {"source": origin.source, "licence": origin.licence, "made by": origin.transformation}
    facts["command"] = origin.command
    return "\n".join([*lines, *(f"  {key:<7} {value}" for key, value in facts.items() if value)]) + "\n"
