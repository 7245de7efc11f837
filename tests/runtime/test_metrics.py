"""Metrics: one line a step; the real wandb mirrors them in its own file, silently, and never holds the run up."""

import base64
import importlib
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nereus.config import Config, LoggerConfig, RunConfig
from nereus.errors import ConfigError, JournalError
from nereus.runtime import metrics as subject
from nereus.runtime.journal import RunFolder
from nereus.runtime.metrics import check_mirror, logged_in, open_metrics, read_metrics
from tests.runtime.wandb_server import wandb_server

DAMAGE = [('{"a":"x"}', "line 1: a: expected a number, found 'x'"), ('{"a":[1]}', "line 1: a: expected a number")]
BLOCK_BYTES, HEADER_BYTES, CHUNK_HEADER_BYTES = 32768, 7, 7  # of a .wandb file: LevelDB's log format


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def configured(mode: str) -> Config:
    return Config(run=RunConfig(name="mirror", group="workload-1"), logger=LoggerConfig(wandb=mode))


def records(path: Path) -> Iterator[Any]:
    """The protobuf records of a .wandb file."""
    internal: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), HEADER_BYTES, b""
    while at + CHUNK_HEADER_BYTES <= len(data):
        left_bytes = BLOCK_BYTES - at % BLOCK_BYTES
        if left_bytes < CHUNK_HEADER_BYTES:  # the rest of a block is padding
            at += left_bytes
            continue
        size_bytes, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += CHUNK_HEADER_BYTES
        whole += data[at : at + size_bytes]
        at += size_bytes
        if kind in (1, 4):  # the only or the last chunk of a record
            yield internal.Record.FromString(whole)
            whole = b""


def wandb_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name().startswith("wandb")]


def test_the_file_alone(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    metrics = open_metrics(configured("off"), folder, pytest.fail)
    metrics.write(1, {"critic/score/mean": 0.5, "actor/pg_loss": math.nan})
    metrics.write(2, {"critic/score/mean": 1})
    metrics.close()
    first, second = (json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines())
    assert first == {"training/global_step": 1, "critic/score/mean": 0.5, "actor/pg_loss": None}
    assert second == {"training/global_step": 2, "critic/score/mean": 1}
    assert math.isnan(read_metrics(folder.metrics)[0]["actor/pg_loss"])
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize(("line", "words"), DAMAGE)
def test_damage(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(JournalError, match=words):
        read_metrics(tmp_path / "metrics.jsonl")


def test_an_offline_run_holds_the_metrics_and_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(path=tmp_path)
    metrics = open_metrics(configured("auto"), folder, pytest.fail)
    for step in (1, 2, 3):
        metrics.write(step, {"critic/score/mean": step / 4, "timing_s/gen": 0.5})
    metrics.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, config, axes = [], {}, []
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "run":
            run = record.run
            config = {item.key: json.loads(item.value_json) for item in run.config.update}
            assert (run.project, run.run_group) == ("nereus", "workload-1")
        elif kind == "metric":
            axes.append((record.metric.glob_name, record.metric.step_metric))
    assert [row["critic/score/mean"] for row in rows] == [0.25, 0.5, 0.75]
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    assert ("*", "training/global_step") in axes
    assert {key: config[key] for key in ("system", "algo", "num_gpus")} == {
        "system": "nereus",
        "algo": "ppo",
        "num_gpus": 4,
    }
    assert config["run"]["name"] == "mirror"
    assert capfd.readouterr() == ("", "")
    assert wandb_children() == []


def test_a_server_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(subject, "INIT_SECONDS", 1)
    notes: list[str] = []
    metrics = open_metrics(configured("auto"), RunFolder(path=tmp_path), notes.append)
    metrics.write(1, {"critic/score/mean": 0.5})
    metrics.close()
    assert len(notes) == 1
    assert "mirrored offline" in notes[0]
    assert "\n" not in notes[0]
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert capfd.readouterr() == ("", "")


def test_an_online_run_reaches_the_server_and_a_resumed_one_goes_on_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = "1" * 40
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")  # what the configuration says goes before it
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for step in (1, 2):  # the second time as a resumed run does
            metrics = open_metrics(configured("online"), RunFolder(path=tmp_path), pytest.fail)
            metrics.write(step, {"critic/score/mean": step / 4})
            metrics.close()
        first = server.runs[0]
        known = {name: first[name] for name in ("project", "groupName", "jobType", "displayName")}
        assert known == {
            "project": "nereus",
            "groupName": "workload-1",
            "jobType": "nereus",
            "displayName": tmp_path.name,
        }
        settings = {name: entry["value"] for name, entry in json.loads(first["config"]).items()}
        assert (settings["system"], settings["algo"], settings["num_gpus"]) == ("nereus", "ppo", 4)
        assert {run["name"] for run in server.runs} == {first["name"]}, "a resumed run has an id of its own"
        told = [(row["training/global_step"], row["critic/score/mean"]) for row in server.rows]
        assert told == [(1, 0.25), (2, 0.5)]
        assert {base64.b64decode(sent.removeprefix("Basic ")) for sent in server.keys} == {f"api:{key}".encode()}
        assert "config.yaml" in server.files
    assert list(tmp_path.glob("wandb/run-*/run-*.wandb"))
    assert capfd.readouterr() == ("", "")
    assert wandb_children() == []


DISTURBED = """
import os, sys, time
from pathlib import Path
import psutil
from nereus.config import Config, LoggerConfig
from nereus.runtime import metrics as subject
from nereus.runtime.journal import RunFolder

def wandb_children():
    return [child for child in psutil.Process().children() if child.name().startswith("wandb")]

subject.FINISH_SECONDS = 1
notes = []
config = Config(logger=LoggerConfig(wandb="offline"))
metrics = subject.open_metrics(config, RunFolder(path=Path(sys.argv[1])), notes.append)
(child,) = wandb_children()
os.kill(child.pid, int(sys.argv[2]))
time.sleep(0.3)
began = time.monotonic()
for step in (1, 2):
    metrics.write(step, {"critic/score/mean": 0.5})
metrics.close()
assert time.monotonic() - began < 4
assert notes and not wandb_children(), (notes, wandb_children())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_or_frozen_mirror_does_not_hold_the_run(tmp_path: Path, number: signal.Signals) -> None:
    arguments = [sys.executable, "-c", DISTURBED, str(tmp_path), str(int(number))]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_who_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not logged_in()
    with pytest.raises(ConfigError, match=r"logger\.wandb = 'online': expected a login"):
        check_mirror(configured("online"))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n", encoding="utf-8")
    assert logged_in()
    check_mirror(configured("online"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert logged_in()
