"""Metrics of a run: `metrics.jsonl`, one line a step with verl's flat names, and its mirror in W&B."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import netrc
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from nereus.config import Config
from nereus.errors import ConfigError, JournalError
from nereus.runtime.journal import JsonLines, RunFolder, read_lines

STEP = "training/global_step"
ALGORITHMS = {"gae": "ppo"}  # the name that panels group by, where it is not the estimator's
INIT_SECONDS = 20  # how long the W&B server may take to answer before the run is mirrored offline
UPLOAD_SECONDS = 4  # how long the end of a run waits for uploads
FINISH_SECONDS = 6  # after this a W&B process that does not answer is ended


class Mirror(Protocol):
    """A second place for metrics; it never stops a run."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step; STEP is among them."""

    def finish(self) -> None:
        """End within a few seconds, whatever the other side does."""


class MetricsWriter:
    """The metrics of a run: the file, which is the truth, and a mirror."""

    def __init__(self, path: Path, mirror: Mirror) -> None:
        self._lines = JsonLines(path)
        self._mirror = mirror

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step (steps count from 1). Raises JournalError naming the file, for example on a full disk.

        JSON has no NaN or infinity: they are written as null.
        """
        row = {STEP: step, **metrics}
        self._lines.append({key: value if math.isfinite(value) else None for key, value in row.items()})
        self._mirror.log(row)

    def close(self) -> None:
        """Close the file and finish the mirror, within a few seconds."""
        self._lines.close()
        self._mirror.finish()


def open_metrics(config: Config, folder: RunFolder, note: Callable[[str], None]) -> MetricsWriter:
    """The metrics of the run in `folder`; `note` takes a line when the mirror is not what the config asks for."""
    return MetricsWriter(folder.metrics, _open_mirror(config, folder, note))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of `metrics.jsonl` in order, null as NaN; a torn last line is left out.

    A resumed run does steps again that came after its checkpoint: a row takes the place of those of its step and of
    later ones that stand before it. Raises JournalError with the line number where a value is not a number.
    """
    rows: list[dict[str, float]] = []
    for number, record in enumerate(read_lines(path), start=1):
        row: dict[str, float] = {}
        for key, value in record.items():
            if value is not None and not isinstance(value, int | float):
                raise JournalError(f"{path}: line {number}: {key}: expected a number, found {value!r}")
            row[key] = math.nan if value is None else value
        while rows and STEP in row and rows[-1].get(STEP, -math.inf) >= row[STEP]:
            rows.pop()
        rows.append(row)
    return rows


def check_mirror(config: Config) -> None:
    """Raises ConfigError when W&B is to be online and nobody is logged in: wandb would ask on the terminal."""
    if config.logger.wandb == "online" and not logged_in():
        raise ConfigError("logger.wandb", "online", "expected a login (`wandb login` or WANDB_API_KEY), or use auto")


def logged_in() -> bool:
    """Whether wandb would find a key: WANDB_API_KEY, or an entry for its host in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(Path(os.environ.get("NETRC", "~/.netrc")).expanduser()).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class NoMirror:
    """No second place."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class WandbMirror:
    """A W&B run; when its process is lost, one note is given and the mirror goes quiet."""

    def __init__(self, wandb: Any, run: Any, note: Callable[[str], None]) -> None:
        self._wandb, self._run, self._note = wandb, run, note
        abandoned = importlib.import_module("wandb.sdk.mailbox").HandleAbandonedError  # its process ended meanwhile
        self._failures = (wandb.errors.Error, OSError, abandoned)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step on the axis STEP."""
        if self._run is None:
            return
        try:
            self._run.log(dict(metrics))
        except self._failures as error:
            self._run = None
            self._note(f"W&B shows no more of this run ({error or type(error).__name__}); metrics.jsonl goes on")

    def finish(self) -> None:
        """End the W&B run and its process; what is not uploaded by then stays on disk for `wandb sync`."""
        ending = threading.Thread(target=self._end, daemon=True, name="wandb-finish")
        ending.start()
        ending.join(FINISH_SECONDS)
        if ending.is_alive():
            self._note("W&B did not end in time; its files are in the run folder (`wandb sync` uploads them)")
        for child in psutil.Process().children():  # none, after an orderly end
            if child.name().startswith("wandb"):
                child.kill()
                child.wait(1)
        ending.join(1)

    def _end(self) -> None:
        run, self._run = self._run, None
        try:
            if run is not None:
                run.finish()
            self._wandb.teardown()
        except self._failures as error:
            self._note(f"W&B did not end well ({error or type(error).__name__}); metrics.jsonl is whole")


def _open_mirror(config: Config, folder: RunFolder, note: Callable[[str], None]) -> Mirror:
    mode = config.logger.wandb
    if mode == "off":
        return NoMirror()
    if mode == "auto":
        allowed = os.environ.get("WANDB_MODE", "online") == "online"
        mode = "online" if allowed and logged_in() else "offline"
    os.environ.setdefault(
        "WANDB_ERROR_REPORTING", "false"
    )  # read by wandb's own process; it would call out offline too
    logging.raiseExceptions = False  # wandb's logger on a full disk: the journal tells it once, without tracebacks
    wandb = importlib.import_module("wandb")  # half a second: only when used
    failures = (wandb.errors.Error, OSError)
    try:
        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            run = _init(wandb, mode, config, folder, _earlier_id(folder.path / "wandb"))
        except failures as error:
            if mode == "offline":
                raise
            reason = str(error).partition("\n")[0]
            note(f"W&B is not reachable, this run is mirrored offline ({reason})")
            run = _init(wandb, "offline", config, folder, None)
    except failures as error:
        note(f"W&B does not start, metrics.jsonl has everything ({error})")
        return NoMirror()
    return WandbMirror(wandb, run, note)


def _earlier_id(folder: Path) -> str | None:
    """The id of the W&B run that has its files in `folder`, from before a resumption; None for a new run."""
    found = [re.fullmatch(r"(?:offline-)?run-(\d+_\d+)-(\w+)", path.name) for path in folder.glob("*run-*")]
    named = sorted((match[1], match[2]) for match in found if match)
    return named[0][1] if named else None


def _init(wandb: Any, mode: str, config: Config, folder: RunFolder, earlier_id: str | None) -> Any:
    """A W&B run in `mode`, silent, with its files in the run folder; a resumed run goes on under its earlier id."""
    estimator, model = config.algorithm.adv_estimator, config.model
    keys = {
        "system": "nereus",
        "algo": ALGORITHMS.get(estimator, estimator),
        "model": f"llama-{model.layers}x{model.hidden}",
        "num_gpus": config.fleet.slots,
        "group": config.run.group,
    }
    run = wandb.init(
        mode=mode,
        project=config.logger.project,
        id=earlier_id,
        resume="allow" if earlier_id and mode == "online" else None,  # offline, the equal id joins them at `wandb sync`
        name=folder.path.name,
        group=config.run.group or None,
        job_type="nereus",
        dir=str(folder.path),
        config={**dataclasses.asdict(config), **keys, "model_config": dataclasses.asdict(model)},
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,  # its samples of the machine cost time on the cores that train
            init_timeout=INIT_SECONDS,
            finish_timeout=UPLOAD_SECONDS,
        ),
    )
    run.define_metric("*", step_metric=STEP)
    return run
