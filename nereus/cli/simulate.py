"""`nereus simulate`: its options; what it does is imported when it is asked for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

COMPARED = ("nereus", "dp-scaling", "dp-scaling-any", "restart", "fixed")
FREE_BASELINES = ("dp-scaling-free", "dp-scaling-any-free")
ABLATIONS = ("nereus-uncalibrated", "nereus-unpriced", "nereus-hasty", "nereus-restart", "nereus-storage")
FREEDOMS = ("nereus-shares", "nereus-micro-batch", "nereus-engines")
POLICIES = ("script", *COMPARED, *FREE_BASELINES, *ABLATIONS, *FREEDOMS)


def add_simulate(parser: ArgumentParser) -> None:
    """The options."""
    parser.usage = (
        "nereus simulate CONFIG [--fleet 16xh100 | --trace FILE --device h100] [--policy NAME ...] [key=value ...], "
        "or nereus simulate RUN"
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG", help="a YAML file, then overrides such as run.steps=50")
    parser.add_argument(
        "--learn-steps", type=int, metavar="N", help="of a real run: coefficients of its first N steps for all"
    )
    parser.add_argument("--fleet", metavar="FLEET", help="a fleet that stays, such as 16xh100 (default: the config's)")
    parser.add_argument("--trace", metavar="FILE", help="a fleet over time, made by `nereus trace build`")
    parser.add_argument("--device", default="h100", metavar="NAME", help="of a trace's slots (default: h100)")
    parser.add_argument("--policy", default="fixed", metavar="NAMES", help=f"one or more of {', '.join(POLICIES)}")
    parser.add_argument("--compare", action="store_true", help="all policies that follow a fleet, side by side")
    parser.add_argument(
        "--mean-tokens", type=float, metavar="N", help="mean response length (default: the trace's curve)"
    )
    parser.add_argument("--notice-seconds", type=float, default=0.0, metavar="S", help="losses are told so long before")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of everything that is random (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="only the table")


def simulate(arguments: Namespace) -> int:
    """Carries the command out; the exit code."""
    from nereus.cli import simulation  # numpy, scipy and simpy

    return simulation.simulate(arguments)
