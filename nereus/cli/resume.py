"""`nereus resume RUN [key=value ...]`: a run goes on, on its live slots or from its newest good checkpoint, under any plan."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nereus.checkpoint import Manifest
from nereus.cli.load import dump_config, load_config
from nereus.config import Config
from nereus.errors import ConfigError, JournalError
from nereus.layout import first_plan
from nereus.resumption import Resumption, agreeing, check_same_job, fitted, remaining, stated_stages
from nereus.runtime.journal import RunFolder, is_being_written, read_journal
from nereus.validate import validate

if TYPE_CHECKING:
    from nereus.cli.attach import Left
    from nereus.runtime.attachment import Attaching


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedRun:
    """What to carry out: the configuration from here on and in whole, the checkpoint, the rollouts to train on.

    Instead of a checkpoint's files `attaching` has live slots; `left` are such as cannot be taken over.
    """

    folder: RunFolder
    config: Config
    whole: Config
    resumption: Resumption
    rollouts: Path | None
    attaching: Attaching | None
    left: Left | None

    @property
    def nothing_left(self) -> bool:
        """Whether the checkpoint is of the last step already; live slots are still to end."""
        return self.attaching is None and self.resumption.manifest.step >= self.config.run.steps

    def told(self) -> list[str]:
        """What is done, line by line, for people."""
        manifest, before = self.resumption.manifest, self.resumption.manifest.plan_text
        lines = [f"refused: {reason}" for reason in self.resumption.refused]
        if self.attaching is not None:
            live, lost = self.attaching.slot_count, len(self.attaching.lost_slots)
            slots = f"{live} live slots" + (f" ({lost} lost)" if lost else "")
            return [
                f"attaching to {slots} of {self.folder.path}, of {manifest.step} steps, plan {first_plan(self.config)}"
            ]
        if self.left is not None:
            lines.append(f"its slots cannot be taken over, a checkpoint is read: {self.left.why}")
        if self.nothing_left:
            done = f"{Path(self.resumption.folder).name} is of the last step, run.steps = {self.config.run.steps}"
            return [*lines, f"nothing is left: {done}; more with run.steps=N"]
        after = str(first_plan(self.config))
        lines.append(
            f"resuming {self.folder.path} from {Path(self.resumption.folder).name}: step {manifest.step + 1} of "
            f"{self.config.run.steps} is next, on {self.config.fleet.slots} slots"
        )
        return [*lines, f"plan {after}" + (f", saved under {before}" if before not in (after, "") else "")]

    def claimed(self) -> None:
        """The run is this process's: slots that are not taken over end, the configuration is written. JournalError."""
        if self.left is not None:
            from nereus.cli.attach import end_slots

            end_slots(self.folder, self.left)
        self.write_config()

    def write_config(self) -> None:
        """Puts the configuration beside the run's first one. JournalError where that fails."""
        draft = self.folder.resumed.with_suffix(".draft")
        try:
            draft.write_text(dump_config(self.whole), encoding="utf-8")
            draft.replace(self.folder.resumed)
        except OSError as error:
            raise JournalError(f"{self.folder.resumed}: cannot be written: {error.strerror}") from error


def add_resume(parser: ArgumentParser) -> None:
    """What `nereus resume` takes."""
    parser.usage = "nereus resume RUN [--rollouts RUN] [key=value ...]"
    parser.add_argument("words", nargs="+", metavar="RUN", help="a run folder, then overrides, such as fleet.slots=2")
    parser.add_argument("--rollouts", metavar="RUN", help="train on the rollouts that this run folder has recorded")


def resumed_run(arguments: Namespace) -> ResumedRun:
    """The run to go on with: its live slots, or a checkpoint, every byte verified. ConfigError or CheckpointError.

    Nothing is written.
    """
    name, *overrides = arguments.words
    folder = RunFolder(path=Path(name))
    if not folder.is_run():
        raise ConfigError("RUN", name, "expected a run folder (one with config.yaml and events.jsonl)")
    if is_being_written(folder.events):
        raise ConfigError("RUN", name, "a process is writing this run: wait for its end, or stop it")
    events = read_journal(folder.events)
    attaching, left = _live(folder, overrides, events)
    if attaching is None:
        start, refused, state = _checkpoint(folder)
    else:
        start, refused, state = "", (), attaching.manifest
    whole = resumed_config(folder, state, overrides, None if attaching is None else attaching.slot_count)
    done = state.step if attaching is None else max(state.step, attaching.stand.changed_step)
    if attaching is not None:
        from nereus.cli.attach import fitting

        whole = fitting(whole, attaching)
    config = remaining(whole, done)
    validate(config)
    check_same_job(config, load_config(folder.config, []), state)
    resumption = Resumption(folder=start, manifest=state, refused=refused, **counted(events, done))
    return ResumedRun(
        folder=folder,
        config=config,
        whole=whole,
        resumption=resumption,
        rollouts=_rollouts(arguments.rollouts, events),
        attaching=attaching,
        left=left,
    )


def _live(
    folder: RunFolder, overrides: Sequence[str], events: Sequence[Mapping[str, object]]
) -> tuple[Attaching | None, Left | None]:
    """Slots that the last driver left, in the first place where they can be taken over."""
    if not folder.slots.exists():
        return None, None
    from nereus.cli.attach import Left, left_slots  # seconds of imports, only when there is something to do

    found = left_slots(folder, load_config(last_config(folder), list(overrides)), events)
    return (None, found) if isinstance(found, Left) else (found, None)


def _checkpoint(folder: RunFolder) -> tuple[str, tuple[str, ...], Manifest]:
    """The newest good checkpoint: its folder, why newer ones are refused, what it holds."""
    from nereus.runtime.checkpoints import newest_good  # torch: a second, only when there is something to do

    found = newest_good(folder.checkpoints)
    return str(found.path), found.refused, found.manifest


def _rollouts(stated: str | None, events: Sequence[Mapping[str, object]]) -> Path | None:
    rollouts = stated if stated is not None else recorded_from(events)
    if rollouts is not None and not RunFolder(path=Path(rollouts)).is_run():
        raise ConfigError("--rollouts", rollouts, "expected a run folder (one with config.yaml and events.jsonl)")
    return None if rollouts is None else Path(rollouts)


def last_config(folder: RunFolder) -> Path:
    """The file of the configuration under which the run last went on."""
    return folder.resumed if folder.resumed.is_file() else folder.config


def resumed_config(
    folder: RunFolder, manifest: Manifest, overrides: Sequence[str], live_slots: int | None = None
) -> Config:
    """The run's last configuration with the plan and KL coefficient of its state, then the overrides.

    A stage of that plan that does not fit on fleet.slots is cut anew. One that an override states takes what is stated,
    and of the saved slots, shares and pipeline what fits to it.
    """
    base = last_config(folder)
    plan = {str(name): section for name, section in manifest.plan.items() if isinstance(section, Mapping)}
    stated: dict[str, object] = {"plan": plan, "algorithm.kl_coef": manifest.kl_coef} if plan else {}
    if live_slots is not None:
        stated["fleet.slots"] = live_slots
    made = load_config(base, list(overrides), stated)
    own, slots = stated_stages(overrides), made.fleet.slots
    fit = {
        name: agreeing(section, getattr(made.plan, name), slots) if name in own else fitted(name, section, slots)
        for name, section in plan.items()
    }
    return load_config(base, list(overrides), {**stated, "plan": fit}) if plan else made


def counted(events: Sequence[Mapping[str, object]], step: int) -> dict[str, int]:
    """What the journal counts: the last committed state version, transitions begun, and those done up to `step`."""
    versions = [event["state_version"] for event in events if event.get("kind") == "commit"]
    begun = [event for event in events if event.get("kind") == "transition_started"]
    done: set[object] = set()
    for event in events:
        at = event.get("step")
        if event.get("kind") == "transition_done" and isinstance(at, int) and at <= step:
            done.add(at)  # one a step; after a resumption the same again
    known = [version for version in versions if isinstance(version, int)]
    return {
        "state_version": max(known, default=0),
        "transition_count": len(begun),
        "applied_count": len(done),
    }


def recorded_from(events: Sequence[Mapping[str, object]]) -> str | None:
    """The run whose rollouts this run trains on, as the journal last says."""
    for event in reversed(events):
        if event.get("kind") in ("run_started", "resumed"):
            rollouts = event.get("rollouts")
            return rollouts if isinstance(rollouts, str) else None
    return None
