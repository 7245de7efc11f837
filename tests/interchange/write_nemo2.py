"""Wrote nemo2.tar.xz: a tiny Llama saved by NeMo 2 itself, on a CPU, in the environment of requirements-nemo.txt.

python tests/interchange/write_nemo2.py tests/interchange/nemo2.tar.xz
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 32, 48, 4, 2, 32, 320


def coarse(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values that depend on name and place alone, multiples of 1/64: exact in any type, and small when packed."""
    count = 1
    for extent in shape:
        count *= extent
    index = torch.arange(count, dtype=torch.int64)
    mixed = (index * 2654435761 + sum(map(ord, name)) * 40503) >> 7
    return ((mixed % 61 - 30).float() / 64).reshape(shape)


def _on_cpu() -> None:
    """What NeMo asks of CUDA while it saves."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")


def _hugging_face(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from transformers import LlamaConfig, LlamaForCausalLM

    from nereus.rl.tokenizer import ByteTokenizer

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
    }
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(coarse(name, tuple(parameter.shape)))
    model.save_pretrained(folder)
    ByteTokenizer().export(folder)


def main() -> None:
    _on_cpu()
    from nemo.collections import llm
    from nemo.collections.llm.gpt.model import llama

    config = llm.LlamaConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        kv_channels=HEAD_DIM,
        layernorm_epsilon=1e-5,
        rotary_base=10000,
        seq_length=128,
        make_vocab_size_divisible_by=64,
        share_embeddings_and_output_weights=False,
        fp16=False,
        bf16=False,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
    )
    llama.HFLlamaImporter.config = property(lambda _: config)  # its own asks for kernels that need a GPU
    with tempfile.TemporaryDirectory() as place:
        source, made = Path(place) / "hf", Path(place) / "nemo2"
        _hugging_face(source)
        llm.import_ckpt(llm.LlamaModel(config), source=f"hf://{source}", output_path=made, overwrite=True)
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            archive.add(made, arcname="nemo2")


if __name__ == "__main__":
    main()
