"""`nereus plan`: tables, checks, JSON, exports and refusals of the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nereus.cli.main import main

JOB = ["plan", "--model", "qwen2.5-7b", "--algo", "grpo", "--fleet", "8xh100", "--prompt", "512", "--response", "1024"]
JOB += ["--batch", "128"]
GOOD = "actor_train tp=4 dp=2 recompute=full keep=weights; reference_infer tp=4 dp=2 keep=nothing; actor_generate tp=2 dp=4"
ROOT = Path(__file__).parents[2]


def told(capsys: pytest.CaptureFixture[str], *words: str, job: list[str] | None = None) -> tuple[int, str, str]:
    code = main([*(JOB if job is None else job), *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_best_plan_can_be_checked_from_its_text_and_from_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = told(capsys, "--json", "--top", "2")
    found = json.loads(out)
    assert code == 0
    assert len(found["plans"]) == 2
    best = found["plans"][0]
    critical = sum(phase["seconds"] for phase in best["phases"] if phase["critical"])
    assert best["step_seconds"] == pytest.approx(critical)
    assert best["fits"]
    assert found["plans"][1]["step_seconds"] >= best["step_seconds"] >= found["lower_bound_seconds"] * (1 - 1e-9)
    (tmp_path / "plan.json").write_text(out)
    for given in (best["plan"], str(tmp_path / "plan.json")):
        code, text, _ = told(capsys, "--check", given, "--json")
        assert code == 0
        assert json.loads(text)["step_seconds"] == pytest.approx(best["step_seconds"])


def test_the_table_says_what_people_ask(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "--top", "1")
    assert code == 0
    for words in (
        "tok/s/slot",
        "±",
        "generate",
        "engines of TP",
        "update_actor",
        "GiB of 80.0 GiB",
        "faster than the first",
    ):
        assert words in out


def test_a_plan_that_does_not_fit_is_exit_code_1_with_slot_phase_component_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "actor_train dp=8 micro_batch=16; reference_infer dp=8; actor_generate dp=8"
    code, out, _ = told(capsys, "--check", text)
    assert code == 1
    line = next(line for line in out.splitlines() if line.startswith("does not fit"))
    for word in ("slot 0", "update_actor", "actor_train.activations binds", "85,899,345,920"):
        assert word in line
    assert "DOES NOT FIT" in out


def test_nothing_fits_is_exit_code_1_with_the_closest_plan(capsys: pytest.CaptureFixture[str]) -> None:
    job = [
        "plan",
        "--model",
        "llama-3.1-70b",
        "--fleet",
        "2xa10g",
        "--prompt",
        "64",
        "--response",
        "64",
        "--batch",
        "8",
    ]
    code, out, _ = told(capsys, job=job)
    assert code == 1
    assert "nothing fits; the closest plan" in out
    assert "binds" in out


def test_a_configuration_is_planned_for_its_own_slots(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, job=["plan", str(ROOT / "experiments/quickstart.yaml"), "--json"])
    assert code == 0
    found = json.loads(out)
    first, own = found["plans"][0], found["configured"]
    assert own["fits"]
    assert own["step_seconds"] >= first["step_seconds"]
    assert "actor_train tp=2 pp=2 dp=1" in own["plan"]
    assert max(peak["room_bytes"] for peak in first["peaks"]) == 268435456
    config = [str(ROOT / "experiments/quickstart.yaml"), "fleet.slot_budget_bytes=50000000"]
    code, out, _ = told(capsys, job=["plan", *config])
    assert code == 1
    assert "nothing fits" in out


@pytest.mark.parametrize(
    ("peer", "flags"),
    [
        (
            "verl",
            ["model_engine=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
             "actor_rollout_ref.actor.megatron.optimizer_offload=true", "actor_rollout_ref.rollout.n=8",
             "actor_rollout_ref.ref.megatron.param_offload=true", "algorithm.adv_estimator=grpo",
             "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full",
             "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "data.train_batch_size=128",
             "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.n_gpus_per_node=8"],
        ),
        (
            "nemo-rl",
            ["policy.megatron_cfg.tensor_model_parallel_size=4", "grpo.num_generations_per_prompt=8",
             "policy.train_global_batch_size=256", "policy.generation.vllm_cfg.tensor_parallel_size=2",
             "policy.megatron_cfg.activation_checkpointing=true", "cluster.num_nodes=1"],
        ),
        (
            "openrlhf",
            ["--train.batch_size 256", "--rollout.batch_size 128", "--vllm.num_engines 4", "--ds.zero_stage 3",
             "--algo.advantage.estimator group_norm", "--train.colocate_all", "--ds.enable_sleep"],
        ),
    ],
)  # fmt: skip
def test_a_given_plan_is_written_as_flags(peer: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plan = GOOD
    if peer == "openrlhf":
        plan = "actor_train dp=8 sharding=full recompute=full keep=nothing; "
        plan += "reference_infer dp=8 sharding=full; actor_generate tp=2 dp=4"
    plan = plan.replace("keep=weights", "keep=nothing") if peer == "nemo-rl" else plan
    code, out, err = told(capsys, "--check", plan, "--export", peer)
    assert (code, err) == (0, "")
    written = [line.strip().removesuffix(" \\") for line in out.splitlines()]
    for flag in flags:
        assert flag in written


@pytest.mark.parametrize("peer", ["verl", "openrlhf", "nemo-rl"])
def test_the_fastest_plan_that_a_peer_can_express_is_found(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, "--export", peer)
    assert (code, err) == (0, "")
    assert "128" in out


@pytest.mark.parametrize(
    ("peer", "plan", "key"),
    [
        ("verl", GOOD.replace("tp=4 dp=2 recompute", "tp=2 pp=3 dp=1 recompute"), "plan.actor_train"),
        ("verl", GOOD.replace("reference_infer tp=4 dp=2", "reference_infer tp=2 dp=4"), "plan.reference_infer"),
        ("verl", GOOD.replace("dp=2 recompute", "dp=1 slots=0-3 recompute").replace("tp=2 dp=4", "tp=2 dp=2 slots=4-7")
         .replace("tp=4 dp=2 keep", "tp=4 dp=1 slots=4-7 keep"), "plan.slots"),
        ("openrlhf", GOOD, "plan.actor_train"),
        ("nemo-rl", GOOD, "plan.actor_train.keep"),
    ],
)  # fmt: skip
def test_what_a_peer_cannot_express_is_refused_by_name(
    peer: str, plan: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(capsys, "--check", plan, "--export", peer)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {key} = ")


@pytest.mark.parametrize(
    ("words", "told_of"),
    [
        (["--algo", "ddpg"], "--algo = 'ddpg': expected one of ppo, grpo"),
        (["--fleet", "8xh10"], "unknown device h10; did you mean"),
        (["--batch", "0"], "--batch = 0: expected a whole number, at least 1"),
        (["--critic", "qwen2.5-7b"], "--critic = 'qwen2.5-7b': expected none: GRPO has no critic"),
        (["--export", "trl"], "--export = 'trl': expected one of verl, openrlhf, nemo-rl"),
        (["--mean-response", "9999"], "at most --response = 1024"),
        (["--host-memory", "0"], "--host-memory = 0.0: expected GiB of a node, above 0"),
        (["--check", "no/such/plan"], "--check = 'no/such/plan': expected a plan's text or a readable file"),
        (["--top", "0"], "--top = 0: expected at least 1"),
        (["--model", "lama-3.1-8b"], "did you mean llama-3.1-8b"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], told_of: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, *words)
    assert (code, out) == (2, "")
    assert told_of in err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = told(capsys, job=["plan"])
    assert code == 2
    assert "expected a CONFIG, or --model" in err
    code, _, err = told(capsys, job=["plan", "--model", "qwen2.5-7b", "--fleet", "8xh100", "--prompt", "8"])
    assert code == 2
    assert "--response = None: is missing" in err


def test_neither_torch_nor_scipy_is_loaded() -> None:
    words = [*JOB, "--top", "1"]
    code = f"import sys; from nereus.cli.main import main; main({words!r}); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'scipy', 'ray', 'polars')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]


@pytest.mark.parametrize(("slots", "nodes"), [(16, 8_000), (1024, 30_000)])
def test_8b_ppo_is_planned_in_few_nodes_and_little_memory(slots: int, nodes: int) -> None:
    """What it takes in seconds depends on who shares the machine: `make bench-plan` prints it."""
    words = ["plan", "--model", "llama-3.1-8b", "--algo", "ppo", "--fleet", f"{slots}xh100", "--prompt", "512"]
    words += ["--response", "2048", "--batch", "1024", "--json"]
    code = "import resource, sys; from nereus.cli.main import main; "
    code += f"main({words!r}); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["evaluated_nodes"] <= nodes
    assert float(done.stderr.split()[-1]) <= 1024**3
