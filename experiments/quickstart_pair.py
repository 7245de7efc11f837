"""The quickstart with scripted live changes of layout and without, two seeds: what do changes cost and change?

Carried out by `nereus experiment run quickstart_pair`, drawn by analysis/quickstart_pair.py.
"""

from __future__ import annotations

from pathlib import Path

from nereus.cli.load import load_config
from nereus.experiment import Run, run_of, without_changes

NAME = "quickstart_pair"
SEEDS = (1, 2)


def runs() -> tuple[Run, ...]:
    """live and fixed in turn, so that a machine that gets slower or faster does so for both."""
    config = load_config(Path(__file__).with_name("scripted.yaml"), [])
    live = [run_of(config, experiment=NAME, variant="live", seed=seed) for seed in SEEDS]
    return tuple(run for each in live for run in (each, without_changes(each, "fixed")))
