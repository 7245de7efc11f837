"""How fast each slot computes beside the others of its job, and what that makes of work that is shared out. Pure.

A check has every slot repeat the same small piece at the same time. A slot's speed is the piece's median seconds over its
own, learnt as a logarithm with a variance (a scalar Kalman filter); a check that contradicts it begins the variance anew.
Plans reckon with a slot only where two checks agree, or one and the late step that it follows, and it is surely slow: two
deviations below `SLOW_SPEED`. Once it is, it counts as such
until it is believed to be above `USUAL_SPEED`; in between nothing changes its mind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median

from nereus.layout import StagePlan, equal_shares

SLOW_SPEED, USUAL_SPEED = 0.85, 0.92
CHECK_NOISE_SHARE = 0.2
"""Deviation of the logarithm of one check's speed: other processes on the machine disturb it."""
DRIFT_SHARE = 0.05
UNKNOWN_SHARE = 1.0
AGREEING_CHECKS = 2
"""What disturbs a slot for the fifth of a second of one check is seldom there in the next one."""
SURPRISE = 2.0
"""Deviations from which a check says that the slot is another than it was."""
TOLD_SHARE = 0.15
"""A slow slot's speed is told anew when it has moved by more."""
FIRST_GAP_STEPS, MOST_GAP_STEPS = 4, 16
"""Steps between two checks while a slot is slow: after one that said something new, and at most, doubling in between."""
LATE_DEVIATIONS, LATE_SHARE = 2.0, 0.1
"""A step is late that takes so many deviations, and such a share, more than was expected."""

Slow = tuple[tuple[int, float], ...]
"""(slot, speed) of slots that are surely slower than the usual slot, whose speed is 1; ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What is believed of one slot: the logarithm of its speed, its variance, and the speed that plans reckon with."""

    log_ratio: float = 0.0
    variance_ratio: float = UNKNOWN_SHARE**2
    told_ratio: float = 1.0
    agreeing_count: int = 0
    """Checks since one contradicted what was believed: only a second one says what plans reckon with."""

    @property
    def doubtful(self) -> bool:
        """Whether one more check would tell if it is slow, or has recovered."""
        contradicted = self.agreeing_count == 1 and abs(self.log_ratio - log(self.told_ratio)) > -log(SLOW_SPEED)
        likely = self.log_ratio + self.variance_ratio**0.5 < log(SLOW_SPEED)
        return contradicted or (self.told_ratio == 1.0 and likely)

    def observe(self, measured: float, *, late: bool = False) -> Speed:
        """After a check that found this speed; a late step before it has said already that some slot is slow."""
        noise, prior = CHECK_NOISE_SHARE**2, self.variance_ratio + DRIFT_SHARE**2
        surprise = log(measured) - self.log_ratio
        agreeing = self.agreeing_count + 1
        if abs(surprise) > SURPRISE * (prior + noise) ** 0.5:
            prior, agreeing = UNKNOWN_SHARE**2, 1 + (late and surprise < 0)
        gain = prior / (prior + noise)
        mean, variance = self.log_ratio + gain * surprise, (1 - gain) * prior
        told = self.told_ratio if agreeing < AGREEING_CHECKS else _told(self.told_ratio, mean, variance)
        return Speed(log_ratio=mean, variance_ratio=variance, told_ratio=told, agreeing_count=agreeing)


def _told(before: float, mean: float, variance: float) -> float:
    surely_slow = mean + 2 * variance**0.5 < log(SLOW_SPEED)
    still_slow = before < 1.0 and mean < log(USUAL_SPEED)
    if not surely_slow and not still_slow:
        return 1.0
    moved = before == 1.0 or abs(mean - log(before)) > TOLD_SHARE
    return min(exp(mean), USUAL_SPEED) if moved else before


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """The Speed of every slot process by a name of its own, and when the next check is due: a value.

    `checked_step` is the step after which the last one was.
    """

    known: Mapping[str, Speed] = field(default_factory=dict[str, Speed])
    checked_step: int = -FIRST_GAP_STEPS
    gap_steps: int = FIRST_GAP_STEPS

    def observe(self, seconds: Mapping[str, Sequence[float]], step: int, *, late: bool = False) -> Speeds:
        """After a check at `step`: seconds of the piece by slot, round by round; whether the step was late.

        A slot that was away is unknown again.
        """
        rounds = min((len(each) for each in seconds.values()), default=0)
        usual = [median(each[at] for each in seconds.values()) for at in range(rounds)]
        known: dict[str, Speed] = {}
        for name, each in seconds.items():
            before = self.known.get(name, Speed())
            ratios = [usual[at] / each[at] for at in range(rounds)]
            known[name] = before.observe(median(ratios), late=late) if ratios else before
        news = any(speed.told_ratio != self.known.get(name, Speed()).told_ratio for name, speed in known.items())
        gap = FIRST_GAP_STEPS if news else min(2 * self.gap_steps, MOST_GAP_STEPS)
        return replace(self, known=known, checked_step=step, gap_steps=gap)

    def due(self, step: int, *, late: bool) -> bool:
        """Whether a check should follow `step`: it was late, the last check left a doubt, or a slow slot may have recovered."""
        waited = step - self.checked_step
        if any(speed.doubtful for speed in self.known.values()):
            return waited >= 1
        slow = any(speed.told_ratio < 1.0 for speed in self.known.values())
        return (late and waited >= FIRST_GAP_STEPS) or (slow and waited >= self.gap_steps)

    def slow(self, names: Mapping[int, str]) -> Slow:
        """The slow ones of these slots: number -> name of the process."""
        told = {slot: self.known[name].told_ratio for slot, name in sorted(names.items()) if name in self.known}
        return tuple((slot, speed) for slot, speed in told.items() if speed < 1.0)


def news_of(before: Slow, now: Slow) -> str:
    """Which slots became slow or recovered, in words; nothing where the same ones are slow."""
    was, told = dict(before), dict(now)
    slower = [f"slot {slot} computes at {speed:.2f} of the usual speed" for slot, speed in now if slot not in was]
    again = [f"slot {slot} is as fast as the others again" for slot in was if slot not in told]
    return "; ".join(slower + again)


def is_late(measured_seconds: float, mean_seconds: float, deviation_seconds: float) -> bool:
    """Whether a step took so much more than expected that a slot may have become slow."""
    excess = measured_seconds - mean_seconds
    return excess > LATE_DEVIATIONS * deviation_seconds and excess > LATE_SHARE * mean_seconds


# -- shared work ---------------------------------------------------------------------------------------------------------


def replica_speeds(stage: StagePlan, slow: Slow) -> tuple[float, ...]:
    """The speed of every replica: that of its slowest slot, which the others wait for."""
    if not slow:
        return (1.0,) * stage.layout.dp
    speeds = dict(slow)
    return tuple(
        min(speeds.get(slot, 1.0) for slot in stage.replica_slots(replica)) for replica in range(stage.layout.dp)
    )


def shared_by_speed(stage: StagePlan, slow: Slow) -> StagePlan:
    """The stage with samples in proportion to its replicas' speeds; equal shares where all are alike."""
    samples, speeds = sum(stage.shares), replica_speeds(stage, slow)
    if len(set(speeds)) == 1:
        return replace(stage, shares=equal_shares(samples, stage.layout.dp))
    whole = sum(speeds)
    parts = [int(samples * speed / whole) for speed in speeds]
    by_remainder = sorted(range(len(parts)), key=lambda at: (parts[at] - samples * speeds[at] / whole, at))
    for at in by_remainder[: samples - sum(parts)]:
        parts[at] += 1
    return replace(stage, shares=tuple(parts))


def fastest(slots: Sequence[int], count: int, slow: Slow) -> tuple[int, ...]:
    """The `count` fastest of `slots`, the first ones of equals, in their order."""
    speeds = dict(slow)
    chosen = sorted(range(len(slots)), key=lambda at: (-speeds.get(slots[at], 1.0), at))[:count]
    return tuple(slots[at] for at in sorted(chosen))


def finish(works: Sequence[float], speeds: Sequence[float], *, alone: float, crowded: float, together: float) -> float:
    """When the last of several workers that start at once is done, in the unit of `alone`.

    A worker of speed 1 with work 1 takes `alone` while no more than `together` workers' worth runs; above that all slow
    down alike, and so much of the work takes `crowded` x (speeds at work) / `together`.
    """
    left = sorted(zip((work / speed for work, speed in zip(works, speeds, strict=True)), speeds, strict=True))
    busy, done, found = sum(speeds), 0.0, 0.0
    for until, speed in left:
        found += (until - done) * max(alone, crowded * busy / together)
        done, busy = until, busy - speed
    return found
