"""`nereus resume` before any process starts: what it finds, what it refuses, under which configuration it would go on."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from nereus.boxes import whole
from nereus.checkpoint import CheckpointFile, Manifest, StoredBox, model_section
from nereus.cli.folder import create_run_folder
from nereus.cli.main import DONE, main
from nereus.cli.resume import ResumedRun, resumed_run
from nereus.config import ChangeConfig, Config, LoggerConfig, PlanChange, PlanConfig, RunConfig, StageConfig
from nereus.errors import NereusError
from nereus.layout import changed_plan, first_plan
from nereus.resumption import plan_section
from nereus.runtime.checkpoints import commit, new_draft
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.shards import write_file

S = StageConfig
CHANGE = PlanChange(actor_train=S(pp=2, dp=2))
CONFIG = Config(
    run=RunConfig(name="demo", steps=8),
    plan=PlanConfig(actor_train=S(tp=2, pp=2, micro_batch=4), actor_generate=S(tp=2, dp=2), critic_train=S(dp=4)),
    changes=(ChangeConfig(step=3, plan=CHANGE), ChangeConfig(step=7, plan=PlanChange(critic_train=S(tp=2)))),
    logger=LoggerConfig(wandb="off"),
)


def save(folder: Path, step: int, config: Config) -> Path:
    """A checkpoint with one tensor and the plan that holds after `step` steps."""
    plan = first_plan(config)
    for change in config.changes:
        plan = changed_plan(plan, change.plan, config) if change.step <= step else plan
    draft = new_draft(folder, step)
    name = "slot-000.safetensors"
    stored = StoredBox(
        emu="actor.train", component="weight", tensor="a", box=whole((8,)), dtype="float32", digest="0" * 16
    )
    size_bytes, sha256 = write_file(draft / name, (stored,), [np.arange(32, dtype=np.uint8)])
    manifest = Manifest(
        run_id="demo", step=step, state_version=step // 3, model=model_section(config.model), plan=plan_section(plan),
        plan_text=str(plan), seed=config.run.seed, data_position=16 * step, kl_coef=0.25,
        optimizer_steps={"actor.train": 2 * step},
        files=(CheckpointFile(name=name, size_bytes=size_bytes, sha256=sha256, boxes=(stored,)),),
    )  # fmt: skip
    return commit(draft, manifest)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that ended after step 6, with checkpoints of steps 2, 4 and 6."""
    folder = create_run_folder(CONFIG, tmp_path)
    journal = Journal(folder.events)
    journal.append("run_started", config={}, rollouts=None)
    for step in range(1, 7):
        if step == 3:
            journal.append("transition_started", transition="t1", step=3)
            journal.append("commit", transition="t1", state_version=1)
            journal.append("transition_done", transition="t1", step=3, state_version=1)
        journal.append("step_done", step=step)
    journal.close()
    for step in (2, 4, 6):
        save(folder.checkpoints, step, CONFIG)
    return folder


def found(run: RunFolder, *overrides: str, rollouts: str | None = None) -> ResumedRun:
    return resumed_run(Namespace(words=[str(run.path), *overrides], rollouts=rollouts))


def test_the_plan_is_that_of_the_checkpoint(run: RunFolder) -> None:
    made = found(run)
    assert made.resumption.manifest.step == 6
    assert first_plan(made.config) == changed_plan(first_plan(CONFIG), CHANGE, CONFIG)
    assert [change.step for change in made.config.changes] == [7], "what is behind is not done again"
    assert [change.step for change in made.whole.changes] == [3, 7], "an older checkpoint may need it"
    assert made.config.algorithm.kl_coef == 0.25
    assert (made.resumption.state_version, made.resumption.transition_count, made.resumption.applied_count) == (1, 1, 1)
    assert "step 7 of 8 is next, on 4 slots" in "\n".join(made.told())


def test_an_older_checkpoint_has_its_own_plan(run: RunFolder) -> None:
    for step in (4, 6):
        path = run.checkpoints / f"step-00000{step}" / "slot-000.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    made = found(run)
    assert made.resumption.manifest.step == 2
    assert first_plan(made.config) == first_plan(CONFIG)
    assert [change.step for change in made.config.changes] == [3, 7]
    assert made.resumption.applied_count == 0
    told = made.told()
    assert "step-000006/slot-000.safetensors: has" in told[0]
    assert "step-000004/slot-000.safetensors: has" in told[1]
    assert "from step-000002: step 3 of 8 is next" in told[2]


def test_fewer_slots_and_overrides(run: RunFolder) -> None:
    made = found(run, "fleet.slots=3", "changes=[]", "algorithm.kl_coef=0.5", "plan.critic_train={dp: 2}")
    plan = first_plan(made.config)
    assert (plan.actor_train.layout.pp, plan.actor_train.layout.dp) == (1, 3)
    assert plan.actor_train.micro_batch == 8, "as the change stated it"
    assert plan.critic_train.layout.dp == 2
    assert made.config.algorithm.kl_coef == 0.5
    assert f"saved under {made.resumption.manifest.plan_text}" in made.told()[-1]
    made.write_config()
    again = found(run)
    assert again.config.fleet.slots == 3, "the next resumption starts from this one's configuration"
    assert again.config.changes == ()
    assert "fleet:\n  slots: 4" in run.config.read_text(), "the first stays for `nereus train`"


def test_what_is_refused_is_one_line(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(run.path)
    cases = [
        ([str(tmp_path / "nowhere")], 2, "RUN = "),
        ([name, "model.layers=2"], 2, "model.layers = 2: expected 4: a resumed run keeps its model"),
        ([name, "run.seed=5"], 2, "run.seed = 5: expected 1"),
        ([name, "fleet.slots=1"], 2, "changes[0].plan.critic_train"),
        ([name, "plan.actor_train.tp=3"], 2, "plan.actor_train.tp = 3"),
        ([name, "plan.actor_train.dp=0"], 2, "plan.actor_train.dp = 0"),
        ([name, "plan.critic_train.tp=0"], 2, "plan.critic_train.tp = 0"),
        ([name, "plan.actor_train.tb=3"], 2, "plan.actor_train.tb = 3: is not a key"),
        ([name, "--rollouts", "nowhere"], 2, "--rollouts = 'nowhere'"),
    ]
    for words, code, message in cases:
        assert main(["resume", *words]) == code, words
        shown = capsys.readouterr()
        assert shown.err.startswith("error: "), words
        assert message in shown.err
        assert shown.err.count("\n") == 1
    assert not run.resumed.exists(), "nothing was written"


def test_nothing_left(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(run.path), "run.steps=6", "changes=[]"]) == DONE
    assert (
        "nothing is left: step-000006 is of the last step, run.steps = 6; more with run.steps=N"
        in capsys.readouterr().out
    )


def test_no_good_checkpoint(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for path in run.checkpoints.glob("*/manifest.json"):
        path.write_text("{}")
    assert main(["resume", str(run.path)]) == 1
    shown = capsys.readouterr().err
    assert "no checkpoint to go on from" in shown
    assert shown.count("manifest.json: it is not a manifest") == 3


def test_a_run_that_is_being_written(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(run.events)
    journal.claim()
    assert main(["resume", str(run.path)]) == 2
    assert "a process is writing this run" in capsys.readouterr().err
    journal.close()
    assert found(run).resumption.manifest.step == 6


def test_the_configuration_is_written_by_who_has_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two resumptions at once only the one that holds the journal says under which configuration it goes on."""
    from nereus.runtime import run as runtime

    def no_slots(*_: object, **__: object) -> None:
        raise NereusError("no slot starts here")

    monkeypatch.setattr(runtime, "SlotPool", no_slots)
    held: list[Journal] = []
    check = runtime.check_job

    def check_while_another_begins(*arguments: object) -> None:
        check(*arguments)  # type: ignore[arg-type]
        if not held:
            held.append(Journal(run.events))
            held[0].claim()

    monkeypatch.setattr(runtime, "check_job", check_while_another_begins)
    words = ["resume", str(run.path), "run.steps=9"]
    assert main(words) == 1
    assert "another process is writing this run" in capsys.readouterr().err
    assert not run.resumed.exists()
    held[0].close()
    assert main(words) == 1
    assert "no slot starts here" in capsys.readouterr().err
    assert yaml.safe_load(run.resumed.read_text())["run"]["steps"] == 9


def test_the_rollouts_of_the_run_are_used_again(run: RunFolder, tmp_path: Path) -> None:
    other = create_run_folder(replace(CONFIG, run=RunConfig(name="other")), tmp_path)
    Journal(other.events).close()
    journal = Journal(run.events)
    journal.append("resumed", step=2, rollouts=str(other.path))
    journal.close()
    assert found(run).rollouts == other.path
