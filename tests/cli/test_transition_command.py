"""`nereus transition` through main(): its numbers against closed forms and brute force, its errors, its text."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.catalogue import spec_of
from nereus.cli.main import main
from nereus.cli.transition import parse_layout
from nereus.layout import Stage, StagePlan
from nereus.model import ModelSpec
from nereus.report.transition_text import seconds_text, size_text, slots_text
from nereus.storage import holding

LAYERS, HIDDEN, FFN, VOCAB, HEADS = 4, 64, 128, 512, 8
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "torch_dtype": "bfloat16",
}
EXPERTS = DENSE | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
CUT = 2 * VOCAB * HIDDEN + LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)  # parameters that TP divides, bfloat16
NORMS = (2 * LAYERS + 1) * HIDDEN  # parameters on every TP rank, float32
WEIGHTS_BYTES = 2 * CUT + 4 * NORMS
LINK, NIC = 450e9, 50e9  # bytes per second of an H100's ports


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE), encoding="utf-8")
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["transition", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def component(found: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [c for c in found["components"] if c["component"] == name]
    return row


@pytest.mark.parametrize(
    ("before", "after", "placement", "moved"),
    [
        ("tp=1", "tp=1,dp=3", "identity", 2 * WEIGHTS_BYTES),  # every new replica
        ("tp=1,dp=3", "tp=1", "identity", 0),  # survivors keep theirs
        ("tp=4@0-3", "tp=8", "identity", 0.875 * 2 * CUT + 4 * 4 * NORMS),  # the first eighth alone is in place
        ("tp=4@0-3", "tp=8", "total_bytes", 0.5 * 2 * CUT + 4 * 4 * NORMS),  # an eighth on each of the four
        ("tp=4,dp=2", "tp=8", "identity", 0.75 * 2 * CUT),  # the first and the last
        ("tp=4,dp=2", "tp=8", "total_bytes", 0),
        ("tp=2@0-1", "tp=1,dp=2@0-1", "cost", 2 * CUT),  # each has half of what is cut
        ("tp=2@0-1", "tp=2@6-7", "cost", 2 * CUT + 2 * 4 * NORMS),  # another world
    ],
)
def test_bytes_of_a_generation_are_the_closed_form(
    before: str, after: str, placement: str, moved: float, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--stage", "generate", "--from", before, "--to", after, "--placement", placement)
    found = answer(capsys, "--model", model, "--fleet", "8xh100", *words)
    assert found["moved_bytes"] == moved
    assert found["kept_bytes"] + found["moved_bytes"] == found["after_bytes"]
    assert found["inter_node_bytes"] == 0
    assert found["least_moved_bytes"] <= moved
    if placement == "total_bytes":
        assert found["least_moved_bytes"] == moved


def test_a_replicated_optimizer_from_tensor_to_pipeline_parallel(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank keeps half of what it needs of a cut tensor, and all norms."""
    words = ("--from", "tp=2", "--to", "pp=2", "--fleet", "2xh100", "--optimizer", "replicated")
    found = answer(capsys, "--model", model, *words)
    assert component(found, "weights")["moved_bytes"] == 2 * CUT / 2
    assert component(found, "masters")["moved_bytes"] == 4 * CUT / 2
    assert component(found, "moments")["moved_bytes"] == 8 * CUT / 2
    assert component(found, "moments")["after_bytes"] == 8 * (CUT + NORMS)
    assert component(found, "masters")["after_bytes"] == 4 * CUT  # a float32 norm is its own master
    assert component(found, "weights")["before_bytes"] == 2 * CUT + 2 * 4 * NORMS
    assert found["stages"][0]["to"]["optimizer"] == "replicated"


def test_growing_data_parallel_halves_what_a_sharded_optimizer_holds(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--from", "dp=1", "--to", "dp=2", "--fleet", "2xh100", "--slots")
    found = answer(capsys, "--model", model, *words)
    assert component(found, "weights")["moved_bytes"] == WEIGHTS_BYTES
    for name, each, count in (("masters", 4, CUT), ("moments", 8, CUT + NORMS)):
        row = component(found, name)
        assert row["before_bytes"] == row["after_bytes"] == each * count
        assert row["moved_bytes"] == pytest.approx(each * count / 2, rel=0.02)  # padding shifts the middle
    moved, (first, second) = found["moved_bytes"], found["slot_bytes"]
    assert (first["sent_bytes"], first["received_bytes"], second["received_bytes"]) == (moved, 0, moved)
    assert found["seconds"] == pytest.approx(moved / LINK)
    assert found["bottleneck"] in ("slot send", "slot receive")


def test_ports_between_nodes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--stage", "generate", "--from", "tp=1@0", "--to", "tp=1,dp=2@7-8", "--fleet", "9xh100")
    found = answer(capsys, "--model", model, *words)
    assert found["inter_node_bytes"] == WEIGHTS_BYTES
    ports = {port["kind"]: port for port in found["ports"]}
    assert ports["network receive"]["slot"] == 8
    assert ports["network receive"]["node"] == 1
    assert ports["network send"]["seconds"] == pytest.approx(WEIGHTS_BYTES / NIC)
    assert ports["slot send"]["load_bytes"] == 2 * WEIGHTS_BYTES
    assert found["bottleneck"].startswith("network")
    assert found["seconds"] == pytest.approx(WEIGHTS_BYTES / NIC)
    assert found["gap_ratio"] == pytest.approx(0, abs=1e-9)


Masks = dict[tuple[str, str], np.ndarray]


def masks(spec: ModelSpec, stage: StagePlan) -> dict[int, Masks]:
    """Which elements of which component each slot holds."""
    found: dict[int, Masks] = {}
    for slot, shards in holding(spec, stage).items():
        own = found.setdefault(slot, {})
        for shard in shards:
            empty = np.zeros(spec.tensor(shard.tensor).shape, dtype=bool)
            mask = own.setdefault((shard.tensor, shard.component), empty)
            mask[tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))] = True
    return found


@pytest.mark.parametrize(
    ("hf", "before", "after", "optimizer"),
    [
        (DENSE, "tp=4,dp=2", "tp=2,pp=2,dp=2", "zero1"),
        (DENSE, "tp=2,pp=2,dp=2,order=tp-cp-ep-pp-dp", "pp=2,pipeline=1/3,dp=3", "zero1"),
        (EXPERTS, "tp=2,dp=4,ep=4,etp=1", "tp=2,pp=2,dp=2,ep=2,etp=1", "zero1"),
        (EXPERTS, "tp=2,dp=2,ep=2", "tp=1,dp=4,ep=2", "replicated"),
    ],
)
def test_kept_bytes_by_slot_are_those_of_brute_force(
    hf: dict[str, Any], before: str, after: str, optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    words = ("--from", before, "--to", after, "--optimizer", optimizer, "--fleet", "8xh100", "--slots")
    found = answer(capsys, "--model", str(tmp_path), *words)
    spec, sharded = spec_of(hf, "actor"), optimizer == "zero1"
    plans: list[StagePlan] = []
    for text, told in ((before, "from"), (after, "to")):
        layout = parse_layout(text, "--x", spec.config, "train", sharded=sharded).layout
        slots = tuple(found["stages"][0][told]["slots"])
        stage: Stage = "train"
        shares = (1,) * layout.dp
        plans.append(StagePlan(model="actor", stage=stage, layout=layout, slots=slots, shares=shares, micro_batch=1))
    old, new = (masks(spec, plan) for plan in plans)
    for row in found["slot_bytes"]:
        needed, present = new.get(row["slot"], {}), old.get(row["slot"], {})
        size = {key: 2 if key[1] == "weight" and spec.tensor(key[0]).dtype == "bfloat16" else 4 for key in needed}
        kept = sum(size[k] * int((mask & present[k]).sum()) for k, mask in needed.items() if k in present)
        assert row["kept_bytes"] == kept
        assert row["after_bytes"] == sum(size[k] * int(mask.sum()) for k, mask in needed.items())
        assert row["received_bytes"] == row["after_bytes"] - kept
    assert found["moved_bytes"] == sum(row["sent_bytes"] for row in found["slot_bytes"])


def test_a_weight_sync(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", model, "--fleet", "4xh100", "--sync", "--from", "tp=2,dp=2")
    same = answer(capsys, *words, "--to", "tp=2,dp=2")
    assert (same["kind"], same["moved_bytes"], same["kept_bytes"]) == ("sync", 0, 2 * 2 * CUT + 4 * 4 * NORMS)
    found = answer(capsys, *words, "--to", "tp=1,dp=4")
    assert found["moved_bytes"] == 4 * 2 * CUT / 2
    assert [c["component"] for c in found["components"]] == ["weights"]
    assert found["before_bytes"] == 2 * 2 * CUT + 4 * 4 * NORMS
    assert main(["transition", *words, "--to", "tp=1,dp=4", "--steps", "1000"]) == 0
    shown = capsys.readouterr().out
    assert f"{seconds_text(1000 * found['seconds'])} over 1,000 steps" in shown
    assert "a lower bound of the sync" in shown


def test_a_standing_generation_is_synced_before_and_after(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", model, "--fleet", "4xh100", "--from", "tp=4", "--generate", "tp=1,dp=4")
    found = answer(capsys, *words, "--to", "tp=2,dp=2")
    assert found["sync"]["before_bytes"] == 4 * 2 * CUT * 3 / 4
    assert found["sync"]["after_bytes"] == 4 * 2 * CUT / 2
    assert found["sync"]["generate"]["slots"] == [0, 1, 2, 3]
    assert answer(capsys, "--model", model, "--fleet", "4xh100", "--from", "tp=4", "--to", "tp=4")["sync"] is None


def test_two_models_add_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", model, "--fleet", "2xh100", "--from", "dp=1", "--to", "dp=2", "--placement", "identity")
    both = answer(capsys, *words, "--models", "actor,critic")
    alone = [answer(capsys, *words, "--models", name) for name in ("actor", "critic")]
    assert both["moved_bytes"] == sum(one["moved_bytes"] for one in alone)
    assert both["components"] == [c for one in alone for c in one["components"]]
    head, value = 2 * VOCAB * HIDDEN, 2 * HIDDEN  # the critic has a value head in the place of the language head
    weights = [next(c for c in one["components"] if c["component"] == "weights")["moved_bytes"] for one in alone]
    assert weights[0] - weights[1] == head - value


def test_the_keys_of_the_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--model", model, "--fleet", "2xh100", "--from", "dp=1", "--to", "dp=2")
    keys = (
        "kind model fleet stages components before_bytes after_bytes kept_bytes moved_bytes inter_node_bytes "
        "least_moved_bytes moved_gap_ratio ports bottleneck seconds least_seconds gap_ratio direct_least_send_bytes "
        "relay_hops placement sync"
    )
    assert " ".join(found) == keys
    assert set(found["components"][0]) >= {"emu", "component", "kept_bytes", "moved_bytes", "inter_node_bytes"}
    assert found["model"]["parameters"] == CUT + NORMS
    assert found["fleet"] == {"text": "2xh100", "slots": 2, "nodes": 1}
    assert found["stages"][0]["from"]["pipeline"] == [LAYERS]


def test_an_8b_on_16_slots_is_answered_in_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["transition", "--model", "llama-3.1-8b", "--fleet", "16xh100"]
    words += ["--from", "tp=8,pp=1,dp=2", "--to", "tp=2,pp=2,dp=4", "--slots"]
    start = time.process_time()
    assert main(words) == 0
    assert time.process_time() - start < 3  # 1 s with the imports, on an idle core
    shown = capsys.readouterr().out
    for text in ("TP8·PP1·DP2 zero1 on slots 0-15", "<- bottleneck", "gap 0.0%", "a lower bound of the pause"):
        assert text in shown
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    slots = [line for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert [line.split()[0] for line in slots] == [str(slot) for slot in range(16)]
    assert len({len(line) for line in slots}) == 1


def test_what_does_not_move_or_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["transition", "--model", "llama-3.1-70b", "--optimizer", "replicated", "--fleet", "8xh100"]
    assert main([*words, "--from", "dp=8", "--to", "tp=8"]) == 0
    shown = capsys.readouterr().out
    assert "moved   nothing: every byte is in place" in shown
    assert "8 slots cannot hold that" in shown
    assert "bottleneck" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"--model": "llama-3.1-9b"}, "model = 'llama-3.1-9b': no such model, file or folder; did you mean llama-3.1-8b"),
        ({"--model": "~no such user/x"}, "model = '~no such user/x': expected a Hugging Face config.json"),
        ({"--model": "x" * 300}, "model = '" + "x" * 300 + "': "),
        ({"--fleet": "1000000000xh100"}, "--fleet = '1000000000xh100': expected counts and devices"),
        ({"--to": "tp=2,pipeline=/"}, "--to = 'tp=2,pipeline=/': pipeline = : expected a whole number"),
        ({"--to": "tp=1,pipeline=15//17"}, "--to = 'tp=1,pipeline=15//17': pipeline = : expected a whole number"),
        ({"--fleet": "16xh10"}, "--fleet = '16xh10': unknown device h10; did you mean h100"),
        ({"--fleet": "many"}, "--fleet = 'many': expected counts and devices, such as 16xh100"),
        ({"--from": "tp=3"}, "--from = 'tp=3': tp = 3: expected a divisor of heads = 32: 1, 2, 4, 8 would do"),
        ({"--to": "tp=1,pipeline=10/10"}, "--to = 'tp=1,pipeline=10/10': pipeline = [10, 10]: expected 2 entries"),
        ({"--to": "pp=64"}, "--to = 'pp=64': pp = 64: expected at most layers = 32"),
        ({"--to": "ep=2,dp=2"}, "--to = 'ep=2,dp=2': ep = 2: expected 1: the model has no experts"),
        ({"--to": "tp=8,dp=4"}, "--to = 'tp=8,dp=4': takes 32 slots, 16 are in the fleet 16xh100; there is room for dp = 2 at most"),
        ({"--from": "tp=8,dp=2@0-7"}, "--from = 'tp=8,dp=2@0-7': takes 16 slots, 8 are named after @; there is room for dp = 1 at most"),
        ({"--from": "tp=4@0-7"}, "--from = 'tp=4@0-7': expected 4 slots after @, one for each rank; got 8"),
        ({"--from": "tp=8@9-16"}, "--from = 'tp=8@9-16': slot 16 is not in the fleet 16xh100, which has 0 to 15"),
        ({"--from": "tp=2@3,3"}, "--from = 'tp=2@3,3': slot 3 is named twice"),
        ({"--from": "tp=2@4-3"}, "--from = 'tp=2@4-3': expected slots after @, such as 0-7,12, in the place of '4-3'"),
        ({"--from": "TP8·PP1"}, "--from = 'TP8·PP1': expected key=value, such as tp=2,pp=2,dp=4, in the place of"),
        ({"--from": "tp=8,ddp=2"}, "--from = 'tp=8,ddp=2': unknown key ddp; did you mean dp?"),
        ({"--from": "tp=8,tp=4"}, "--from = 'tp=8,tp=4': tp is said twice"),
        ({"--from": "tp=0"}, "--from = 'tp=0': tp = 0: expected a whole number, at least 1"),
        ({"--to": "order=dp-tp"}, "--to = 'order=dp-tp': order = dp-tp: expected one of tp-cp-ep-dp-pp"),
        ({"--models": "actor,critc"}, "--models = 'actor,critc': unknown model 'critc'; did you mean critic?"),
        ({"--models": "critic", "--stage": "generate"}, "--models = 'critic': expected actor"),
        ({"--stage": "generate", "--to": "pp=2"}, "--to = 'pp=2': pp = 2: expected 1: vLLM generates here"),
        ({"--generate": "tp=2", "--stage": "generate"}, "--generate = 'tp=2': expected only where"),
        ({"--steps": "0"}, "--steps = 0: expected at least 1"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_one_line_and_2(
    words: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"--model": "llama-3.1-8b", "--from": "tp=8,dp=2", "--to": "tp=2,dp=8", "--fleet": "16xh100"} | words
    assert main(["transition", *(word for pair in asked.items() for word in pair)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1


def test_a_wrong_experts_degree_says_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mixtral-8x7b", "--fleet", "8xh100", "--from", "dp=3,ep=3", "--to", "dp=4,ep=4"]
    assert main(["transition", *words]) == 2
    assert "ep = 3: expected a divisor of experts = 8: 1, 2, 4, 8 would do" in capsys.readouterr().err


def test_numbers_for_people() -> None:
    assert [seconds_text(x) for x in (0, 3.28e-7, 0.0167, 0.9999, 1.234, 4321)] == [
        "0 s", "0.328 us", "16.7 ms", "1,000 ms", "1.23 s", "4,321 s",
    ]  # fmt: skip
    assert [size_text(x) for x in (0, 999, 1.5e9, 1.5834e12)] == ["0 B", "999 B", "1.5 GB", "1.58 TB"]
    assert slots_text((3,)) == "slot 3"
    assert slots_text((0, 1, 2, 8, 5, 6)) == "slots 0-2,8,5-6"
    assert slots_text([*range(0, 64, 2), *range(1, 64, 2)]) == "slots 0-63, ranks in another order (--slots)"
    assert slots_text(range(0, 128, 2)) == "64 slots of 0-126 (--slots)"
