"""Seeds of requests: functions of ids alone, without collisions."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from nereus.model import seed_of
from nereus.rollout import SampleId, samples_of_step

IDS = st.integers(0, 10**9)


@given(IDS, IDS, IDS, IDS)
def test_seed_is_a_function_of_ids(run: int, step: int, prompt: int, sample: int) -> None:
    seed = SampleId(step=step, prompt=prompt, sample=sample).seed(run)
    assert 0 <= seed < 2**63
    assert seed == SampleId(step=step, prompt=prompt, sample=sample).seed(run)
    others = [(run + 1, step, prompt, sample), (run, step + 1, prompt, sample), (run, step, prompt + 1, sample)]
    for r, a, b, c in [*others, (run, step, prompt, sample + 1)]:
        assert SampleId(step=a, prompt=b, sample=c).seed(r) != seed


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    """A recorded run can be compared with one of a later release: this number never changes."""
    digest = hashlib.sha256(b"rollout\x1f4\x1f1\x1f2\x1f3").hexdigest()
    assert SampleId(step=1, prompt=2, sample=3).seed(4) == int(digest[:16], 16) // 2 == 81701731682037575


def test_a_hundred_thousand_seeds_do_not_collide() -> None:
    seeds = {
        sample.seed(run)
        for run in (1, 2)
        for step in range(1, 51)
        for sample in samples_of_step(step, step * 250, 250, 4)
    }
    assert len(seeds) == 100_000


def test_parts_are_not_run_together() -> None:
    assert seed_of("a", 1, 12) != seed_of("a", 11, 2)
    assert seed_of("ab") != seed_of("a", "b")


def test_samples_of_a_step_are_in_batch_order() -> None:
    samples = samples_of_step(3, 10, 2, 3)
    assert [(s.step, s.prompt, s.sample) for s in samples] == [(3, p, n) for p in (10, 11) for n in (0, 1, 2)]
