"""Checkpoints of a job on the disk: begun at a step boundary, written by the slots, made durable, found and refused.

A checkpoint is a folder that appears whole: files and manifest are written and fsynced in a draft folder, which is then
renamed; after that `latest` names it and older ones go. What a failure leaves is a draft, which nobody reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.checkpoint import (
    CheckpointFile,
    Manifest,
    Part,
    folder_name,
    manifest_text,
    model_section,
    parts_to_write,
    step_of,
    steps_to_remove,
)
from nereus.errors import CheckpointError
from nereus.layout import Plan
from nereus.resumption import plan_section
from nereus.runtime.job import Job, short
from nereus.runtime.journal import Journal
from nereus.runtime.shards import MANIFEST, SaveStarted, SaveState, manifest_in
from nereus.storage import Shard, holding

LATEST = "latest"
DRAFT, REPLACED, REMOVED = ".draft", ".replaced", ".removed"
READ_BYTES = 8 << 20
READ_THREADS = 8
POLL_SECONDS = 0.02
SPARE_BYTES = 16 << 20  # left on the disk for the journal and what else the run writes meanwhile

# -- folders on the disk -----------------------------------------------------------------------------------------


def new_draft(folder: Path, step: int) -> Path:
    """An empty folder for the checkpoint of `step`, in `folder`; what earlier failures left there is removed. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    clean(folder)
    draft = folder / f".{folder_name(step)}{DRAFT}"
    draft.mkdir()
    return draft


def clean(folder: Path) -> None:
    """Removes what nobody reads: drafts, and what was set aside."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def commit(draft: Path, manifest: Manifest) -> Path:
    """Makes a draft with its files the checkpoint of the manifest's step, durable, and names it in `latest`. OSError."""
    folder = draft.parent
    _write_durably(draft / MANIFEST, manifest_text(manifest))
    sync(draft)
    made = folder / folder_name(manifest.step)
    aside = folder / f".{made.name}{REPLACED}"
    if made.exists():  # a damaged one, whose steps were done again
        made.rename(aside)
    draft.rename(made)
    sync(folder)
    pointer = folder / f".{LATEST}"
    pointer.unlink(missing_ok=True)
    _write_durably(pointer, made.name + "\n")
    pointer.replace(folder / LATEST)
    sync(folder)
    shutil.rmtree(aside, ignore_errors=True)
    return made


def retire(folder: Path, saved_step: int, keep: int) -> tuple[str, ...]:
    """Removes the checkpoints that are not kept after that of `saved_step`; the names of those that went."""
    gone: list[str] = []
    for step in steps_to_remove(saved_steps(folder), saved_step, keep):
        aside = folder / f".{folder_name(step)}{REMOVED}"
        with contextlib.suppress(OSError):  # it stays, and goes another time
            (folder / folder_name(step)).rename(aside)
            gone.append(folder_name(step))
        shutil.rmtree(aside, ignore_errors=True)
    return tuple(gone)


def saved_steps(folder: Path) -> tuple[int, ...]:
    """The steps of which there is a checkpoint in `folder`, good or not, in rising order."""
    if not folder.is_dir():
        return ()
    found = (step_of(path.name) for path in folder.iterdir())
    return tuple(sorted(step for step in found if step is not None))


def _write_durably(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk. OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- finding a good one ------------------------------------------------------------------------------------------


def verified(path: Path) -> Manifest:
    """The manifest of the checkpoint in `path`, after every byte of every file was read and is what was written.

    CheckpointError names the file that is missing, torn, truncated or changed.
    """
    manifest = manifest_in(path)
    with ThreadPoolExecutor(READ_THREADS) as pool:  # hashing and reading leave the interpreter lock
        for problem in pool.map(lambda file: _problem(path / file.name, file), manifest.files):
            if problem:
                raise CheckpointError(problem)
    return manifest


def _problem(path: Path, file: CheckpointFile) -> str:
    """What is wrong with a file, "" when nothing is."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            return f"{path}: has {size_bytes:,} bytes, {file.size_bytes:,} were written"
        seen = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while piece := stream.read(READ_BYTES):
                seen.update(piece)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return "" if seen.hexdigest() == file.sha256 else f"{path}: its bytes differ from what was written (SHA-256)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A good checkpoint; `refused` says what is wrong with each newer one, the newest first."""

    path: Path
    manifest: Manifest
    refused: tuple[str, ...]


def newest_good(folder: Path) -> Found:
    """The newest checkpoint in `folder` that is whole. CheckpointError says why there is none."""
    refused: list[str] = []
    for step in reversed(saved_steps(folder)):
        path = folder / folder_name(step)
        try:
            return Found(path=path, manifest=verified(path), refused=tuple(refused))
        except CheckpointError as error:
            refused.append(str(error))
    reasons = "".join(f"\n  {reason}" for reason in refused)
    raise CheckpointError(f"{folder}: no checkpoint to go on from{':' if refused else ''}{reasons}")


# -- saving ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Pending:
    """A save in progress: what the slots said when it began, and the manifest but for the files."""

    draft: Path
    manifest: Manifest
    started: Mapping[int, SaveStarted]
    begun_seconds: float
    snapshot_seconds: float
    waited_seconds: float = 0.0


@dataclass(kw_only=True)
class Checkpoints:
    """The saves of a running job, one at a time. A save that fails costs the run nothing but a line that says so."""

    job: Job
    folder: Path
    journal: Journal
    note: Callable[[str], None]
    saved_step: int | None = None
    _pending: _Pending | None = None
    _failing: bool = False
    _divided: tuple[Plan, Mapping[int, tuple[Part, ...]]] | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after `step`."""
        settings = self.job.config.checkpoint
        return settings.keep_count > 0 and settings.every_steps > 0 and step % settings.every_steps == 0

    def after_step(self, step: int) -> float:
        """At the boundary after `step`: finishes what is written, begins what is due; the seconds that it took."""
        started = time.monotonic()
        if self._pending is not None and not self._finish_if_written() and self.due(step):
            self.settle()
        if self.due(step):
            self._begin(step)
        return time.monotonic() - started

    def at_end(self, step: int) -> None:
        """Saves the state after `step` unless that is saved, and waits until it is durable."""
        self.settle()
        if self.job.config.checkpoint.keep_count > 0 and step != self.saved_step:
            self._begin(step)
            self.settle()

    def abandon(self) -> None:
        """Forgets a save in progress, whose slots are not all there any more."""
        if self._pending is not None:
            self._fail(self._pending.manifest.step, self._pending.draft, "slots were lost")

    def settle(self) -> None:
        """Waits until the save in progress is durable or has failed."""
        started = time.monotonic()
        limit_seconds = self.job.config.fleet.phase_timeout_seconds
        while (pending := self._pending) is not None and not self._finish_if_written():
            pending.waited_seconds = time.monotonic() - started
            if pending.waited_seconds > limit_seconds:
                self._fail(pending.manifest.step, pending.draft, f"slots did not end writing in {limit_seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def _begin(self, step: int) -> None:
        started = time.monotonic()
        parts = self._parts_of_plan()
        size_bytes = sum(part.stored.size_bytes for mine in parts.values() for part in mine)
        try:
            draft = new_draft(self.folder, step)
            self._check_room(size_bytes)
        except OSError as error:
            self._fail(step, None, f"{self.folder}: {error.strerror or error}")
            return
        self.journal.append("checkpoint_started", step=step, slots=sorted(parts), size_bytes=size_bytes)
        given = {slot: (str(draft / _file_name(slot)), mine) for slot, mine in parts.items()}
        begun: dict[int, SaveStarted] = self.job.pool.call("save", given)
        self._pending = _Pending(
            draft=draft,
            manifest=_manifest(self.job, step),
            started=begun,
            begun_seconds=started,
            snapshot_seconds=time.monotonic() - started,
        )
        self._finish_if_written()

    def _parts_of_plan(self) -> Mapping[int, tuple[Part, ...]]:
        """What each slot writes under the present plan; worked out once a plan."""
        if self._divided is None or self._divided[0] != self.job.plan:
            held: dict[int, list[Shard]] = {slot: [] for slot in self.job.pool.numbers}
            for _, stage in self.job.plan.stages():
                if stage.stage != "generate":
                    for slot, shards in holding(self.job.specs[stage.model], stage).items():
                        held[slot] += shards
            self._divided = self.job.plan, parts_to_write(held)
        return self._divided[1]

    def _check_room(self, size_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self.folder).free
        if size_bytes + SPARE_BYTES > free_bytes:
            raise OSError(f"needs {size_bytes:,} bytes, {free_bytes:,} are free on its disk")

    def _finish_if_written(self) -> bool:
        """Whether no save is in progress any more: the one that was is durable, or has failed."""
        pending = self._pending
        if pending is None:
            return True
        states: dict[int, SaveState] = self.job.pool.call("save_state", dict.fromkeys(pending.started, ()))
        if not all(state.done for state in states.values()):
            return False
        self._pending = None
        errors = [f"slot {slot}: {state.error}" for slot, state in sorted(states.items()) if state.error]
        if errors:
            self._fail(pending.manifest.step, pending.draft, "; ".join(errors))
            return True
        self._commit(pending, states)
        return True

    def _commit(self, pending: _Pending, states: Mapping[int, SaveState]) -> None:
        started = time.monotonic()
        files = tuple(
            CheckpointFile(
                name=_file_name(slot),
                size_bytes=state.size_bytes,
                sha256=state.sha256,
                boxes=pending.started[slot].boxes,
            )
            for slot, state in sorted(states.items())
        )
        manifest = replace(pending.manifest, files=files)
        try:
            made = commit(pending.draft, manifest)
        except OSError as error:
            self._fail(manifest.step, pending.draft, f"{pending.draft}: {error.strerror or error}")
            return
        removed = retire(self.folder, manifest.step, self.job.config.checkpoint.keep_count)
        self.saved_step, self._failing = manifest.step, False
        now = time.monotonic()
        self.journal.append(
            "checkpoint_saved",
            sync=True,
            step=manifest.step,
            folder=made.name,
            size_bytes=manifest.size_bytes,
            seconds={
                "snapshot": pending.snapshot_seconds,
                "write": max((state.seconds for state in states.values()), default=0.0),
                "waited": pending.waited_seconds,
                "commit": now - started,
                "until_durable": now - pending.begun_seconds,
            },
            foreground={slot: begun.reason for slot, begun in pending.started.items() if begun.reason},
            digests=short(manifest.digests),
            state_version=manifest.state_version,
            removed=removed,
        )

    def _fail(self, step: int, draft: Path | None, reason: str) -> None:
        """Journals the failure, tells the first of a row, removes the draft."""
        self._pending = None
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        self.journal.append("checkpoint_failed", step=step, reason=reason)
        if not self._failing:
            self.note(f"checkpoint of step {step} failed, the run goes on: {reason}")
        self._failing = True


def _file_name(slot: int) -> str:
    return f"slot-{slot:03d}.safetensors"


def _manifest(job: Job, step: int) -> Manifest:
    """The manifest of the job as it is now, without files."""
    config = job.config
    return Manifest(
        run_id=config.run.name,
        step=step,
        state_version=job.state_version,
        model=model_section(config.model),
        plan=plan_section(job.plan),
        plan_text=str(job.plan),
        seed=config.run.seed,
        data_position=job.data_position,
        kl_coef=config.algorithm.kl_coef,
        optimizer_steps=dict(job.optimizer_steps),
        files=(),
    )
