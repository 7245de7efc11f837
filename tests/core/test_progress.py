"""What slots tell of their requests is read back, or left out where it is torn or of another policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.rollout import Completion, Request
from nereus.runtime import progress
from nereus.runtime.progress import Progress, completions

DONE = Completion(request_id="3/1/0", tokens=(5, 6, 7), logprobs=(-0.5, -0.25, -1.0), finished="stop")
BEGUN = Completion(request_id="3/1/1", tokens=(8,), logprobs=(-2.0,), finished="running")
NONE_YET = Completion(request_id="3/2/0", tokens=(), logprobs=(), finished="running")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.0)


@pytest.mark.usefixtures("eager")
def test_round_trip_and_the_longest_of_each_request(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "progress"
    first, second = Progress(folder, 0, 4), Progress(folder, 1, 4)
    first.tell(lambda: [DONE, BEGUN, NONE_YET])
    longer = Completion(request_id="3/1/1", tokens=(8, 9), logprobs=(-2.0, -3.0), finished="length")
    second.tell(lambda: [longer])
    assert completions(folder, 4) == {"3/1/0": DONE, "3/1/1": longer, "3/2/0": NONE_YET}
    assert completions(folder, 5) == {}, "of another policy"
    torn = folder / "slot-000.npz"
    torn.write_bytes(torn.read_bytes()[:-40])
    assert completions(folder, 4) == {"3/1/1": longer}
    first.end()
    assert folder.is_dir(), "the other slot's file is there"
    second.end()
    assert not folder.parent.exists()
    second.end()


@pytest.mark.usefixtures("eager")
def test_without_room_generation_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    Progress(tmp_path / "file" / "progress", 0, 4).tell(lambda: [DONE])
    assert completions(tmp_path / "file" / "progress", 4) == {}


def test_nothing_is_asked_before_it_is_time(tmp_path: Path) -> None:
    Progress(tmp_path, 0, 4).tell(lambda: pytest.fail("asked"))


def test_the_rest_of_a_request_has_another_seed() -> None:
    request = Request(
        request_id="3/1/1", prompt_tokens=(1, 2), seed=11, temperature=1.0, max_response_tokens=4, stop_token=0
    )
    rest = request.after(BEGUN)
    assert (rest.so_far_tokens, rest.so_far_logprobs, rest.max_response_tokens) == ((8,), (-2.0,), 4)
    assert rest.seed not in (request.seed, request.after(DONE).seed)
    assert 0 <= rest.seed < 2**63
