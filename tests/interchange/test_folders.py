"""Hugging Face, DCP, Megatron and NeMo 2 folders: exact round trips, and refusals that name the tensor."""

from __future__ import annotations

import json
import tarfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nereus.boxes import Box, whole
from nereus.catalogue import hf_config
from nereus.cli.export import export
from nereus.cli.imports import import_folder
from nereus.cli.main import main
from nereus.config import Config, ModelConfig
from nereus.errors import CheckpointError, ConfigError
from nereus.interchange import export as writers
from nereus.interchange.dcp import DcpFolder
from nereus.interchange.dcp_model import DcpModel
from nereus.interchange.foreign import open_folder
from nereus.interchange.huggingface import HfModel
from nereus.interchange.megatron import MegatronFolder
from nereus.interchange.megatron_config import config_of, values_of
from nereus.interchange.megatron_names import KeyStyle, Names
from nereus.interchange.native import NereusModel, manifest_in
from nereus.interchange.source import UnreadableFolder, kept, kept_components
from nereus.interchange.start import check_folder, fill, from_folder
from nereus.model import ModelSpec, model_spec
from nereus.rl.tokenizer import ByteTokenizer
from nereus.runtime.digest import MASK, box_digest
from nereus.storage import MOMENTS, Shard, state_dtype
from tests.interchange.write_nemo2 import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, coarse
from tests.strategies import general_configs

TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=32, ffn=48, vocab=259, dtype="bfloat16")
DENSE = {
    "llama": TINY,
    "qwen2": replace(TINY, qkv_bias=True, tie_embeddings=True),
    "qwen3": replace(TINY, qk_norm=True, rope_theta=1e6),
    "scaled": replace(TINY, rope_factor=8.0, dtype="float32"),
}
SPARSE = {
    "mixtral": replace(TINY, experts=4, experts_per_token=2, expert_ffn=48),
    "qwen3-moe": replace(TINY, experts=4, experts_per_token=2, expert_ffn=16, qk_norm=True, dense_layers=(1,)),
}
ALL = DENSE | SPARSE


class Made:
    """The state of a model after 5 steps, made from names: bfloat16 weights are their masters, rounded."""

    optimizer_steps = 5

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.whole = {(c, t.name): self._make(c, t) for t in spec.tensors for c in ("master", *MOMENTS)}

    @staticmethod
    def _make(component: str, tensor: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, component + tensor.name)) % 9973)
        return torch.randn(tensor.shape, generator=generator) * 0.1

    def has(self, component: str, tensor: str) -> bool:
        return component == "weight" or (component, tensor) in self.whole

    def read(self, component: str, tensor: str, box: Box) -> torch.Tensor:
        master = self.whole["master" if component == "weight" else component, tensor]
        dtype = getattr(torch, state_dtype(component, self.spec.tensor(tensor).dtype))
        return master[box.slices((0,) * len(box.start))].to(dtype)


def equal(spec: ModelSpec, found: Any, made: Any, components: Any = None) -> None:
    for tensor in spec.tensors:
        for component in components or kept_components(made, tensor):
            box = whole(tensor.shape)
            a, b = kept(found, tensor, component, box), kept(made, tensor, component, box)
            assert a.dtype == b.dtype, (tensor.name, component)
            assert torch.equal(a, b), (tensor.name, component)


def digests(spec: ModelSpec, state: Any) -> dict[str, dict[str, str]]:
    """Of what a checkpoint keeps, from any cutting into boxes."""
    found: dict[str, dict[str, str]] = {}
    for tensor in spec.tensors:
        for component in kept_components(state, tensor):
            value = 0
            for row in range(tensor.shape[0]):
                rest = tensor.shape[1:]
                box = Box((row, *(0,) * len(rest)), (row + 1, *rest))
                value += box_digest(kept(state, tensor, component, box), box)
            found.setdefault(f"actor.train {component}", {})[tensor.name] = f"{value & MASK:016x}"
    return found


def own_checkpoint(folder: Path, model: ModelConfig) -> tuple[Path, ModelSpec, Made]:
    """A checkpoint of Nereus, made by importing a DCP folder."""
    spec = model_spec("actor", model)
    made, source = Made(spec), folder / "source"
    writers.export_dcp(source, made, spec)
    names = folder / "model.json"
    names.write_text(json.dumps(hf_config(model)))
    run("import", source, folder / "own", "--model", names)
    return folder / "own", spec, made


def run(*words: object) -> None:
    command, source, target, *options = map(str, words)
    assert main([command, source, "--to", target, *options]) == 0


@pytest.mark.parametrize("name", ["qwen2", "scaled", "mixtral", "qwen3-moe"])
def test_every_format_out_and_in_again(tmp_path: Path, name: str) -> None:
    """Weights, masters, moments and the step, bit by bit; digests are those of the state, however it is cut."""
    own, spec, made = own_checkpoint(tmp_path, ALL[name])
    equal(spec, NereusModel(own, spec), made)
    expected = digests(spec, made)
    assert manifest_in(own).digests == expected
    for kind in ("torch_dist", "nemo2"):
        run("export", own, tmp_path / kind, "--format", kind)
        again = tmp_path / f"{kind}-again"
        run("import", tmp_path / kind, again)
        assert manifest_in(again).digests == expected, kind
        assert manifest_in(again).optimizer_steps == {"actor.train": 5}
    run("export", own, tmp_path / "hf")
    run("import", tmp_path / "hf", tmp_path / "hf-again")
    weights = manifest_in(tmp_path / "hf-again").digests
    assert weights == {"actor.train weight": expected["actor.train weight"]}
    transformers_loads(tmp_path / "hf", spec, made)


def transformers_loads(folder: Path, spec: ModelSpec, made: Made) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for tensor in spec.tensors if not spec.config.experts else ():  # transformers stacks experts
        found = model.state_dict()[tensor.name]
        assert torch.equal(found, kept(made, tensor, "weight", whole(tensor.shape)).to(found.dtype)), tensor.name


def test_shards_and_their_index(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = model_spec("actor", TINY)
    made, folder = Made(spec), tmp_path / "hf"
    folder.mkdir()
    writers.export_hf(folder, made, spec, beside=None, shard_bytes=20_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.numel() * t.element_size() for t in load_file(folder / f).values()) <= 20_000 for f in files)
    equal(spec, HfModel(folder, spec), made, ["weight"])
    found: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found[1]["missing_keys"]


def test_torch_reads_what_is_exported(tmp_path: Path) -> None:
    """torch's own loader gives the same tensors, also for Megatron's keys."""
    own, spec, made = own_checkpoint(tmp_path, TINY)
    for kind in ("dcp", "torch_dist"):
        run("export", own, tmp_path / kind, "--format", kind)
        ours = DcpFolder(tmp_path / kind)
        state = {k: torch.zeros(f.shape, dtype=getattr(torch, f.dtype)) for k, f in ours.tensors().items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / kind), no_dist=True)
        for key, found in ours.tensors().items():
            assert torch.equal(state[key], ours.read(key, whole(found.shape))), key
    embedding, tensor = state["embedding.word_embeddings.weight"], spec.tensors[0]
    assert torch.equal(embedding[:259], made.read("weight", tensor.name, whole(tensor.shape)))
    assert not embedding[259:].any()


def test_dcp_of_a_module_and_its_optimizer(tmp_path: Path) -> None:
    """What torch itself saves of a transformers model and Adam."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = hf_config(replace(TINY, dtype="float32"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in (1, 2):
        model(torch.tensor([[step, 2, 3]])).logits.square().sum().backward()
        adam.step()
    weights, optimizer = get_state_dict(model, adam)
    dcp.save(
        {"model": weights, "optim": optimizer}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True
    )
    spec = model_spec("actor", replace(TINY, dtype="float32"))
    found = DcpModel(tmp_path / "dcp", spec)
    assert found.optimizer_steps == 2
    for tensor, parameter in ((t, model.get_parameter(t.name)) for t in spec.tensors):
        assert torch.equal(found.read("weight", tensor.name, whole(tensor.shape)), parameter)
        assert torch.equal(
            found.read("exp_avg_sq", tensor.name, whole(tensor.shape)), adam.state[parameter]["exp_avg_sq"]
        )


def nemo2(folder: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "nemo2.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "nemo2"


def test_a_folder_that_nemo_wrote(tmp_path: Path) -> None:
    """nemo-toolkit 2.7.3 saved it (write_nemo2.py): the model is found, every weight is exact, its tokenizer comes along."""
    run("import", nemo2(tmp_path), tmp_path / "own")
    config = open_folder(tmp_path / "own").spec.config
    assert (config.layers, config.hidden, config.ffn, config.heads) == (LAYERS, HIDDEN, FFN, HEADS)
    assert (config.kv_heads, config.head_dim, config.vocab) == (KV_HEADS, HEAD_DIM, ByteTokenizer.vocab_size)
    spec = model_spec("actor", config)
    found = NereusModel(tmp_path / "own", spec)
    for tensor in spec.tensors:
        shape = (VOCAB, *tensor.shape[1:]) if tensor.cut == "vocabulary" else tensor.shape
        expected = coarse(tensor.name, shape)[: tensor.shape[0]]
        if tensor.name.endswith("layernorm.weight"):  # without Transformer Engine NeMo's importer leaves them at 1
            expected = torch.ones(shape)
        assert torch.equal(found.read("weight", tensor.name, whole(tensor.shape)), expected), tensor.name
    assert (tmp_path / "own" / "tokenizer.json").exists()


@settings(max_examples=40)
@given(st.data())
def test_megatron_names_both_ways(data: st.DataObject) -> None:
    """For any model and spelling: places of any box are disjoint, inside their tensor, and lead back to it."""
    spec = model_spec("actor", data.draw(general_configs()))
    style = KeyStyle(
        prefix=data.draw(st.sampled_from(["", "module."])),
        layer_in_key=data.draw(st.booleans()),
        halves_apart=data.draw(st.booleans()),
    )
    names = Names(spec, style)
    tensor = data.draw(st.sampled_from(spec.tensors))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in tensor.shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, tensor.shape, strict=True))
    box, rest = Box(start, stop), [Box(start, stop)]
    for key, where, part in names.boxes(tensor.name, box):
        assert whole(names.shapes[key]).contains(where)
        assert (tensor.name, part, where) in list(names.canonical(key, where))
        assert sum(met.elements for piece in rest if (met := piece.intersect(part))) == part.elements
        rest = [left for piece in rest for left in piece.subtract(part)]
    assert rest == []


@pytest.mark.parametrize("style", [KeyStyle(layer_in_key=True), KeyStyle(prefix="module.", halves_apart=True)])
def test_other_spellings(tmp_path: Path, style: KeyStyle) -> None:
    """Layers in the key and gate and up apart, as megatron-core writes them when asked to."""
    from nereus.interchange.dcp_writer import Written, write_dcp
    from nereus.interchange.export import megatron_tensors

    spec = model_spec("actor", SPARSE["qwen3-moe"])
    made, names = Made(spec), Names(spec, style)
    written: list[Written] = list(megatron_tensors(names, made, "weight"))
    assert any(t.key.endswith("linear_fc1.weight_w") for t in written) == style.halves_apart
    write_dcp(tmp_path / "td", written)
    equal(spec, MegatronFolder(tmp_path / "td", spec), made, ["weight"])


@pytest.mark.parametrize("name", ALL)
def test_megatron_config_both_ways(name: str) -> None:
    config = ALL[name]
    assert config_of(values_of(config), vocab=config.vocab, dtype=config.dtype, place="x") == config


def test_megatron_config_refuses_what_would_compute_otherwise() -> None:
    for key, value in {"normalization": "LayerNorm", "add_bias_linear": True, "multi_latent_attention": True}.items():
        with pytest.raises(UnreadableFolder, match=rf"{key} = .*expected"):
            config_of(values_of(TINY) | {key: value}, vocab=259, dtype="float32", place="x")


# -- refusals ----------------------------------------------------------------------------------------------------


def hf_folder(folder: Path, model: ModelConfig = TINY) -> Path:
    spec, made = model_spec("actor", model), folder / "hf"
    made.mkdir()
    writers.export_hf(made, Made(spec), spec, beside=None)
    return made


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:7].clone()


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)


def _whole(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (_drop, r"model\.layers\.1\.mlp\.up_proj\.weight is missing \(expected \(48, 32\)\)"),
        (_cut, r"model\.norm\.weight has shape \(7,\), expected \(32,\)"),
        (_add, r"model\.layers\.2\.mlp\.up_proj\.weight is not a tensor of this model"),
        (_whole, r"lm_head\.weight has type int32, expected a floating-point type"),
    ],
)
def test_wrong_tensors_are_told(tmp_path: Path, how: Any, told: str) -> None:
    folder = hf_folder(tmp_path)
    check_folder(replace(TINY, folder=str(folder)))
    change(folder, how)
    with pytest.raises(ConfigError, match=told):
        check_folder(replace(TINY, folder=str(folder)))


def test_damaged_folders_are_told_by_file(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UnreadableFolder, match=r"model\.safetensors: expected a whole safetensors file"):
        open_folder(folder)
    weights.unlink()
    with pytest.raises(UnreadableFolder, match="expected a Hugging Face folder"):
        open_folder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(UnreadableFolder, match="names of files in the folder itself"):
        open_folder(folder)


def test_other_architecture_is_told(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        open_folder(folder)


def test_model_of_a_folder_in_a_configuration(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path))
    found = from_folder(Config(model=ModelConfig(folder=folder)), {"model": {"folder": folder}})
    assert found.model == replace(TINY, folder=folder)
    assert found.warmup.steps == 0
    stated = {"model": {"folder": folder, "layers": 3}}
    with pytest.raises(ConfigError, match=r"model\.layers = 3: expected 2, as model\.folder"):
        from_folder(Config(model=ModelConfig(folder=folder, layers=3)), stated)
    with pytest.raises(ConfigError, match=r"model\.folder = 'nowhere'"):
        from_folder(Config(model=ModelConfig(folder="nowhere")), {"model": {"folder": "nowhere"}})


def test_fill_reads_only_boxes(tmp_path: Path) -> None:
    """A slot's shards from a checkpoint with optimizer state, and from a Hugging Face folder without."""
    own, _, made = own_checkpoint(tmp_path, TINY)
    run("export", own, tmp_path / "hf")
    name = "model.layers.1.mlp.down_proj.weight"
    boxes = {"weight": Box((3, 5), (30, 40)), "master": Box((31, 0), (32, 48)), "exp_avg": Box((0, 47), (32, 48))}
    shards = [
        Shard(emu="actor.train", component=c, tensor=name, box=b, dtype=state_dtype(c, "bfloat16"))
        for c, b in boxes.items()
    ]
    full = fill(model_spec("actor", replace(TINY, folder=str(own))), shards, 64)
    for shard, data in full.items():
        assert torch.equal(data, made.read(shard.component, name, shard.box))
    bare = fill(model_spec("actor", replace(TINY, folder=str(tmp_path / "hf"))), shards, 64)
    weight = made.read("weight", name, boxes["master"])
    assert torch.equal(bare[shards[0]], full[shards[0]])
    assert torch.equal(bare[shards[1]], weight.float())
    assert not bare[shards[2]].any()


def test_export_verifies_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, _, _ = own_checkpoint(tmp_path, TINY)
    run("export", own, tmp_path / "hf")
    assert main(["export", str(own), "--to", str(tmp_path / "hf")]) == 2
    assert "--force" in capsys.readouterr().err
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    file = own / "slot-000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    arguments = Namespace(source=str(own), to=str(tmp_path / "hf"), format="hf", step=None, of="actor", force=True)
    with pytest.raises(CheckpointError, match=r"slot-000\.safetensors"):
        export(arguments)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model.json", "own", "source"]


def test_export_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest good checkpoint, or the one that is asked for; the tokenizer from the run's folder."""
    own, _, _ = own_checkpoint(tmp_path, TINY)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    own.rename(checkpoints / "step-000000")
    (checkpoints / "step-000002").mkdir()
    (checkpoints / "step-000002" / "manifest.json").write_text("{}")
    ByteTokenizer().export(tmp_path / "run" / "model")
    run("export", tmp_path / "run", tmp_path / "hf")
    assert "not used: " in capsys.readouterr().out
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "b"), "--step", "1"]) == 2
    assert "expected one of 0, 2" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "b"), "--of", "reference"]) == 1
    assert "has no weights of reference.infer; it holds actor.train" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "hf"), "--to", str(tmp_path / "b")]) == 2
    assert not (tmp_path / "b").exists()


def test_failed_import_leaves_nothing(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    change(folder, _drop)
    arguments = Namespace(folder=str(folder), to=str(tmp_path / "own"), model=None, format="auto", force=False)
    with pytest.raises(UnreadableFolder):
        import_folder(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
