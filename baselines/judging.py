"""What the checks of all baselines do: make the environment, have its parser answer, say what came of it.

Exit codes: 0 accepted with our values, or skipped because the package index is out of reach; 1 otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines.environment import Environment, IndexOutOfReach
from nereus.errors import NereusError
from nereus.report.peers.naming import PeerLog

PARSE_SECONDS = 300
MISSING = object()
BASELINES_OWN = ("PYTHON", "VERL", "OPENRLHF", "RAY", "WANDB")
"""Beginnings of variables that are kept from a baseline: its answer shall not depend on who asks."""


def say(text: str) -> None:
    """One line of a check."""
    print(f"baselines-check: {text}", flush=True)  # noqa: T201 - the command prints


def carry_out(name: str, environment: Environment, judge: Callable[[Path], Iterator[str]]) -> int:
    """Makes the environment of the baseline `name`, says what `judge`, given its Python, complains of; the exit code."""
    began = time.monotonic()
    try:
        python = environment.interpreter()
    except IndexOutOfReach as error:
        say(f"{name}: skipped: {error}")
        return 0
    except NereusError as error:
        say(f"{name}: failed: {error}")
        return 1
    size_bytes = environment.size_bytes()
    say(f"{name}'s environment: {size_bytes / 1e6:,.0f} MB in {environment.folder}, {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    complaints = list(judge(python))
    for complaint in complaints:
        say(complaint)
    say(f"{name}: {'FAILED' if complaints else 'ok'}, {time.monotonic() - began:.0f} s")
    return 1 if complaints else 0


def ask(python: Path, script: Path, asked: Mapping[str, Any], answers: Path) -> list[dict[str, Any]]:
    """What `script` in the baseline's environment answers to `asked`, by way of the file `answers`."""
    _run(python, script, answers, json.dumps(asked))
    return json.loads(answers.read_text(encoding="utf-8"))


def logs(
    python: Path, script: Path, folder: Path, read: Callable[[Path], PeerLog], words: Sequence[str] = ()
) -> Iterator[str]:
    """Has the baseline's own logging code write to `folder`; what is wrong with our rows of it, log by log."""
    shutil.rmtree(folder, ignore_errors=True)
    _run(python, script, folder, json.dumps(list(words)))
    for path in sorted(folder.iterdir()):
        log = read(path)
        if log.unknown or not log.rows:
            yield f"{path}: {len(log.rows)} steps, and metrics that are neither placed nor named: {', '.join(log.unknown)}"
            continue
        columns = {column for row in log.rows for column in row}
        say(
            f"{path}: {len(log.rows)} steps in {len(columns)} columns of ours, {len(log.unplaced)} metrics named as unplaced"
        )


def _run(python: Path, script: Path, target: Path, given: str) -> None:
    """Runs `script TARGET` in the baseline's environment. SystemExit with the end of its errors where it fails."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(BASELINES_OWN)}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(python), "-P", str(script), str(target)],
        input=given, capture_output=True, text=True, check=False, env=environment, timeout=PARSE_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"baselines-check: {python} {script.name} fails:\n{done.stderr[-2000:]}")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run's command line: its words, the settings they state, and what the baseline must make of the Run by key."""

    run_id: str
    words: Sequence[str]
    settings: Mapping[str, object]
    wanted: Mapping[str, object]


def judged(
    name: str,
    cases: Sequence[Asked],
    bad: Mapping[str, tuple[Sequence[str], str]],
    answer: Callable[[list[list[str]]], Sequence[Mapping[str, Any]]],
    different: Callable[[Asked, Mapping[str, Any]], Iterator[str]],
) -> Iterator[str]:
    """What is wrong: a command that the baseline refuses, a value that is not ours, a wrong command that it takes.

    `bad`: what is wrong -> (words that go to the end of the first command line and make it so, words of the refusal).
    `different` says which values of the parsed job are not those of a case.
    """
    good = [list(case.words) for case in cases]
    answers = answer([*good, *([*good[0], *more] for more, _ in bad.values())])
    for case, answered in zip(cases, answers, strict=False):
        if answered["refused"]:
            yield f"{case.run_id}: {name} refuses it: {answered['refused']}"
            continue
        wrong = list(different(case, answered["job"]))
        yield from (f"{case.run_id}: {line}" for line in wrong)
        if not wrong:
            taken, ours = len(case.settings), len(case.wanted)
            say(f"{case.run_id}: accepted, {taken} settings taken over, {ours} values are the Run's")
    yield from refusals(name, {what: words for what, (_, words) in bad.items()}, answers[len(good) :])


def unequal(
    name: str,
    wanted: Mapping[str, Any],
    job: Mapping[str, Any],
    same: Callable[[Any, object], bool],
    shown: Callable[[Any], str] = repr,
) -> Iterator[str]:
    """The dotted keys of a parsed job whose value is not the same as the wanted one, which is told as `shown`."""
    for key, value in wanted.items():
        found = look_up(job, key)
        if not same(value, found):
            yield f"{key}: expected {shown(value)}, {name} has {'nothing' if found is MISSING else repr(found)}"


def look_up(job: Mapping[str, Any], key: str) -> object:
    """The value at a dotted key, MISSING where there is none."""
    found: Any = job
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return MISSING
        found = found[part]
    return found


def refusals(name: str, wanted: Mapping[str, str], answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Commands that must be refused, else a check shows nothing: what is wrong with each -> words of the answer."""
    for (what, words), answer in zip(wanted.items(), answers, strict=True):
        if words not in answer["refused"]:
            yield f"{what}: expected a refusal with {words!r}, so this check cannot fail; {name} said {answer['refused']!r}"
        else:
            say(f"{name}: {what} is refused")
