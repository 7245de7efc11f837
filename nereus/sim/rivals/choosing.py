"""The best of a grid: every Setup that fits is timed on one batch; parts that setups share are timed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from nereus.fleet import Fleet
from nereus.sim.rivals import openrlhf, verl
from nereus.sim.rivals.setups import RlJob, Setup
from nereus.sim.rivals.stepping import PUBLISHED, Handling, SystemTimes
from nereus.sim.truth import Truth
from nereus.sim.workload import StepSamples

CONFIGURATIONS = ("default", "default, apart", "tuned")


class Trial:
    """Seconds of setups on one batch without noise. Keeps the times of cuts and engines that setups have in common."""

    def __init__(
        self, job: RlJob, fleet: Fleet, truth: Truth, samples: StepSamples, handling: Handling = PUBLISHED
    ) -> None:
        self.job, self.fleet, self.truth, self.samples, self.handling = job, fleet, truth, samples, handling
        self.even = np.ones(int(max(fleet.slots)) + 1)
        self.known: dict[tuple[object, ...], Any] = {}

    def seconds(self, setup: Setup) -> float:
        """The step's."""
        times = SystemTimes(self.job, setup, self.fleet, self.truth, self.handling, self.known)
        return times.step(1, self.samples, self.even).seconds


def fastest(setups: Iterable[Setup], trial: Trial) -> Setup | None:
    """The fastest of the setups on the trial's batch, the first of equals; None of none."""
    best, least = None, float("inf")
    for setup in setups:
        seconds = trial.seconds(setup)
        if seconds < least:
            best, least = setup, seconds
    return best


def configured(system: str, configuration: str, job: RlJob, fleet: Fleet, trial: Trial) -> Setup | None:
    """The setup of a system: default or tuned (the best of its grid and of its defaults). None where none fits."""
    if system == "verl":
        plain = [verl.default(job, fleet)]
        every = verl.grid(job, fleet)
    else:
        plain = [openrlhf.default_colocated(job, fleet), openrlhf.default_apart(job, fleet)]
        every = openrlhf.grid(job, fleet)
    named = {setup.name: setup for setup in plain if setup is not None}
    if configuration != "tuned":
        return named.get(configuration)
    found = fastest([*named.values(), *every], trial)
    return None if found is None else found.named("tuned")
