"""What Slurm answers is read right, and what it cannot give is named, without a Slurm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.cli.slurm import (
    Partition,
    Request,
    Standing,
    elements_of,
    limit_seconds_of,
    read_partitions,
    read_standings,
    seconds_of,
    unfit,
)
from nereus.errors import ConfigError, NereusError

SINFO = "main*|2|gpu:8|infinite\nshort|2|gpu:8|30:00\nmixed|3|gpu:a100:4(S:0-1),gpu:h100:8|1-00:00:00\nmixed|1|(null)|1-00:00:00\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_times_as_slurm_writes_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == limit_seconds_of(text) == seconds


@given(st.integers(0, 9), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_is_the_sum_of_its_parts(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = 86400 * days + 3600 * hours + 60 * minutes + seconds
    assert seconds_of(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == total
    assert days or seconds_of(f"{hours}:{minutes}:{seconds}") == total


@pytest.mark.parametrize("text", ["soon", "1:", "-1", "1:2:3:4", "1-", "2h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--time = .*expected minutes"):
        limit_seconds_of(text)


@pytest.mark.parametrize("text", ["", "UNLIMITED", "infinite", "0"])
def test_no_limit(text: str) -> None:
    assert limit_seconds_of(text) is None


def test_partitions_are_read_with_their_nodes_gpus_and_limits() -> None:
    main, short, mixed = read_partitions(SINFO + "a line of something else\n")
    assert (main.nodes, main.gpu_count, str(main)) == (2, 8, "main (2 nodes with gpu:8)")
    assert str(short) == "short (2 nodes with gpu:8, at most 30:00)"
    assert (mixed.nodes, mixed.gpu_count) == (4, 8)
    assert [each.allows(1801.0) for each in (main, short, mixed)] == [True, False, True]
    assert [each.allows(None) for each in (main, short, mixed)] == [True, True, True]


@pytest.mark.parametrize(
    ("request_", "key", "said"),
    [
        (Request(nodes=1, slots_per_node=1, partition="fast"), "--partition", "no such partition. There is main (2"),
        (Request(nodes=3, slots_per_node=1, partition="main"), "--nodes", "more nodes than a partition has"),
        (Request(nodes=3, slots_per_node=1), "--nodes", "more nodes than a partition has"),  # of the default
        (Request(nodes=1, slots_per_node=1, gpu_count=9), "--gpus-per-node", "more GPUs than a node has"),
        (
            Request(nodes=1, slots_per_node=1, partition="short", time_limit="1:00:00", limit_seconds=3600.0),
            "--time",
            "longer than a partition allows. There is main (2 nodes with gpu:8), short (2 nodes with gpu:8, at most 30:00)",
        ),
    ],
)
def test_what_a_cluster_lacks_is_named_before_anything_is_submitted(request_: Request, key: str, said: str) -> None:
    error = unfit(request_, read_partitions(SINFO))
    assert isinstance(error, ConfigError)
    assert error.key == key
    assert said in str(error)


def test_what_fits_is_no_error_but_a_reason_of_slurms_is() -> None:
    fits = Request(nodes=2, slots_per_node=4, gpu_count=8, limit_seconds=3600.0)
    assert unfit(fits, read_partitions(SINFO)) is None
    assert unfit(fits, []) is None
    assert unfit(replace(fits, nodes=4), read_partitions(SINFO.replace("*", ""))) is None  # without a default: any
    error = unfit(fits, read_partitions(SINFO), "Slurm refused it: Invalid qos")
    assert isinstance(error, NereusError)
    assert "Invalid qos. There is main" in str(error)
    assert str(unfit(fits, [], "Slurm refused it: x")) == "Slurm refused it: x"


def test_standings_of_jobs_and_of_elements_told_as_one() -> None:
    squeue = "7_0|COMPLETED|None|n1\n7_[1-2,5%2]|PENDING|Resources|\n8|RUNNING|None|n[1-2]\n9|CANCELLED by 0|None|None assigned\n\n"
    found = read_standings(squeue)
    assert set(found) == {"7_0", "7_1", "7_2", "7_5", "8", "9"}
    assert (str(found["7_5"]), found["7_5"].ended) == ("PENDING (Resources)", False)
    assert (str(found["8"]), found["8"].ended) == ("RUNNING on n[1-2]", False)
    assert (found["9"].state, found["9"].ended, found["7_0"].ended) == ("CANCELLED", True, True)
    assert read_standings("slurm_load_jobs error: Invalid job id specified") == {}


@given(st.lists(st.integers(0, 99).flatmap(lambda a: st.tuples(st.just(a), st.integers(a, a + 9))), min_size=1))
def test_every_element_of_a_range_is_named(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)
    assert elements_of(f"12_[{text}%4]") == [f"12_{i}" for a, b in ranges for i in range(a, b + 1)]
    assert elements_of("12_3") == ["12_3"]


def test_an_ended_job_tells_no_node() -> None:
    assert str(Standing(state="COMPLETED", nodes_text="n1")) == "COMPLETED"
    assert Partition(name="p", nodes=1, resources=("(null)",)).gpu_count == 0
