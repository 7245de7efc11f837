"""A driver is killed with -9, and another takes the same slots over: in a change before its commit, after it; in a bench anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nereus.cli.load import dump_config
from nereus.config import CheckpointConfig, Config, FleetConfig, ModelConfig, PlanConfig, RunConfig, WarmupConfig
from nereus.engines.vllm.boot import ENVIRONMENT
from nereus.runtime.attachment import read
from nereus.runtime.checkpoints import newest_good
from nereus.runtime.cluster import RAY_ENVIRONMENT
from nereus.runtime.journal import RunFolder, read_journal
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, changes, config, run_job

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 500.0
SLOTS = 2
RAY = Path(sys.executable).parent / "ray"


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster that outlives drivers."""
    folder = tmp_path_factory.mktemp("ray")
    place = Path(f"/tmp/ray-test-{os.getpid()}")  # short: the path of a socket
    free = {"port": 0, "min-worker-port": 0, "max-worker-port": 0, "dashboard-agent-listen-port": 0}
    options = {
        **free,
        "node-ip-address": "127.0.0.1",
        "temp-dir": place,
        "num-cpus": 1,
        "object-store-memory": 100 << 20,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    words += ["--include-dashboard=false", "--disable-usage-stats", "--include-log-monitor=false"]
    words += [f"--resources={json.dumps({'slot': SLOTS})}", "--head", "--block"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment |= {**ENVIRONMENT, **RAY_ENVIRONMENT}
    with (folder / "head.txt").open("wb") as output:
        head = subprocess.Popen([RAY, "start", *words], stdout=output, stderr=output, env=environment)
    named, family = place / "ray_current_cluster", [psutil.Process(head.pid)]
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while not (named.is_file() and named.read_text()):
            assert head.poll() is None, (folder / "head.txt").read_text()
            assert time.monotonic() < deadline, (folder / "head.txt").read_text()
            time.sleep(0.1)
        yield named.read_text()
    finally:
        if head.poll() is None:
            family += family[0].children(recursive=True)
            head.terminate()
        _, alive = psutil.wait_procs(family, 20)
        for process in alive:
            process.kill()
        subprocess.run(["rm", "-rf", str(place)], check=True)


JOB = config(
    run=RunConfig(name="attach", seed=5, steps=4),
    model=ModelConfig(init_std=0.08, layers=2),
    warmup=WarmupConfig(steps=1, samples=8),
    fleet=FleetConfig(slots=SLOTS, reattach_seconds=100.0, phase_timeout_seconds=60.0),
    plan=PlanConfig(
        actor_train=S(dp=2, micro_batch=4),
        actor_generate=S(dp=2),
        critic_train=S(tp=2, micro_batch=4),
        reference_infer=S(pp=2, keep="nothing"),
    ),
    changes=changes((3, {"actor_train": S(tp=2, micro_batch=4), "critic_train": S(pp=2, micro_batch=4)})),
)


def drivers(address: str, *lines: tuple[str, list[str]]) -> str:
    """What drivers print that are struck one after the other."""
    environment = {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.live.dying", json.dumps(lines)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def begun(job: Config, folder: Path, *words: str) -> list[str]:
    """The words that begin the job in `folder`."""
    (folder / "job.yaml").write_text(dump_config(job))
    return ["train", str(folder / "job.yaml"), f"run.folder={folder}", *words]


def resume(folder: Path, *words: str) -> list[str]:
    """The words that go on with it."""
    return ["resume", str(folder / JOB.run.name), *words]


def of(folder: Path, kind: str) -> list[Any]:
    """The events of a kind, in order."""
    return [event for event in read_journal(RunFolder(path=folder).events) if event["kind"] == kind]


def undisturbed(job: Config, pool: SlotPool, folder: Path) -> Path:
    """The job as nothing strikes it, on the slots of other tests."""
    return run_job(pool, replace(job, fleet=FleetConfig()), folder).folder.path


def ended(pids: list[int]) -> bool:
    """Whether these processes are gone, or go now."""
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(left, LIMIT_SECONDS)[1]


def same_state(run: Path, other: Path) -> bool:
    """Whether two runs ended alike, bit by bit."""
    found, expected = (newest_good(each / "checkpoints").manifest for each in (run, other))
    return (found.step, found.digests) == (expected.step, expected.digests)


def test_drivers_die_and_the_slots_go_on(cluster: str, pool: SlotPool, tmp_path: Path) -> None:
    reference = undisturbed(JOB, pool, tmp_path / "undisturbed")
    text = drivers(
        cluster,
        ("step_done 1, perform 1", begun(JOB, tmp_path, "--rollouts", str(reference))),
        ("commit 1", resume(tmp_path)),
        ("", resume(tmp_path)),
    )
    print(text)
    assert text.count("== ended with -9") == 2, text
    assert "== ended with 0" in text, text
    run = tmp_path / "attach"
    back = of(run, "reattached")
    assert [(e["next_step"], e["held"], e["change"], e["committed"]) for e in back] == [
        (2, "whole", "t1", False),  # prepared beside step 2
        (3, "whole", "t2", True),
    ], text
    assert len({tuple(e["pids"]) for e in back}) == 1, "the same processes"
    assert {source for e in back for source in e["sources"].values()} == {"slots"}, "no checkpoint was there to read"
    assert [e["state_version"] for e in back] == [0, 1]
    assert [e["step"] for e in of(run, "step_done")] == [1, 2, 3, 4]
    assert [e["transition"] for e in of(run, "transition_done")] == ["t2"]
    assert same_state(run, reference)
    assert not (run / "slots.json").exists()
    assert ended(back[0]["pids"])


endings = pytest.mark.skipif(
    os.environ.get("NEREUS_BENCH_ATTACH", "0") in ("", "0"), reason="minutes of processes: make bench-faults"
)
SAVED = replace(JOB, checkpoint=CheckpointConfig(every_steps=1, keep_count=9))


@pytest.fixture(scope="module")
def saved(pool: SlotPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job with checkpoints, as nothing strikes it."""
    return undisturbed(SAVED, pool, tmp_path_factory.mktemp("undisturbed"))


@endings
@pytest.mark.parametrize(
    ("strike", "next_step", "held", "source", "steps"),
    [
        ("checkpoint_saved 2, train 2", 3, "torn", "checkpoint", [1, 2, 3, 4]),  # four a step
        ("step_done 2, train 4", 4, "step done", "slots", [1, 2, 4]),
        ("prediction 2", 2, "whole", "slots", [1, 2, 3, 4]),
        ("perform 1", 2, "whole", "slots", [1, 2, 3, 4]),
        ("step_done 2, perform 2", 3, "whole", "slots", [1, 2, 3, 4]),
        ("commit 1, perform 1", 3, "whole", "slots", [1, 2, 3, 4]),
        ("commit 1, finish_change 1", 3, "whole", "slots", [1, 2, 3, 4]),
        ("transition_done 1", 3, "whole", "slots", [1, 2, 3, 4]),
        ("checkpoint_saved 2", 3, "whole", "slots", [1, 2, 3, 4]),
        ("step_done 4", 5, "whole", "slots", [1, 2, 3, 4]),
    ],
)
def test_a_driver_dies_anywhere(
    strike: str, next_step: int, held: str, source: str, steps: list[int], cluster: str, saved: Path, tmp_path: Path
) -> None:
    lines = (strike, begun(SAVED, tmp_path, "--rollouts", str(saved))), ("", resume(tmp_path))
    text, run = drivers(cluster, *lines), tmp_path / "attach"
    (back,) = of(run, "reattached")
    print(strike, "->", back["next_step"], back["held"], back["change"], back["committed"], f"{back['seconds']:.2f} s")
    assert (back["next_step"], back["held"]) == (next_step, held), text
    assert set(back["sources"].values()) == {source}
    assert [e["step"] for e in of(run, "step_done")] == steps
    assert same_state(run, saved)
    assert ended(back["pids"])


@endings
def test_a_slot_dies_with_its_driver(cluster: str, tmp_path: Path) -> None:
    everywhere = S(dp=2, distributed_optimizer=False)
    plan = PlanConfig(actor_train=everywhere, actor_generate=S(dp=2), critic_train=everywhere, reference_infer=S(dp=2))
    drivers(cluster, ("forward 4", begun(replace(JOB, plan=plan, changes=()), tmp_path)))
    found = read(tmp_path / "attach" / "slots.json")
    psutil.Process(found.contacts[0].pid).kill()
    text, run = drivers(cluster, ("", resume(tmp_path))), tmp_path / "attach"
    (back,) = of(run, "reattached")
    assert (back["lost"], back["slots"], back["pids"]) == ([0], 1, [found.contacts[1].pid]), text
    assert set(back["sources"].values()) == {"slots"}
    assert [e["step"] for e in of(run, "step_done")] == [1, 2, 3, 4]


@endings
def test_slots_without_a_driver_end_and_the_checkpoint_is_read(cluster: str, tmp_path: Path) -> None:
    job = replace(SAVED, fleet=replace(SAVED.fleet, reattach_seconds=5.0), changes=())
    drivers(cluster, ("prediction 3", begun(job, tmp_path)))
    found = read(tmp_path / "attach" / "slots.json")
    assert ended([contact.pid for contact in found.contacts.values()])
    text, run = drivers(cluster, ("", resume(tmp_path))), tmp_path / "attach"
    assert "its slots cannot be taken over, a checkpoint is read: none of them answers" in text
    assert not of(run, "reattached")
    assert [e["step"] for e in of(run, "step_done")][-1] == 4
