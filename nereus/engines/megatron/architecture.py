"""What Megatron-core 0.16 is told of a model: its TransformerConfig, its layers, and what it forgets of its weights."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig

from nereus.config import ModelConfig
from nereus.layout import Layout, StagePlan
from nereus.model import ModelSpec, is_sparse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(spec: ModelSpec, stage: StagePlan) -> TransformerConfig:
    """Megatron's configuration of `spec` cut as `stage` says: no fusions, no dropout, state left unfilled."""
    c, layout = spec.config, stage.layout
    bf16 = c.dtype == "bfloat16"
    config = TransformerConfig(
        num_layers=c.layers,
        hidden_size=c.hidden,
        num_attention_heads=c.heads,
        num_query_groups=c.kv_heads,
        kv_channels=c.head_dim,
        ffn_hidden_size=c.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=c.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=c.qkv_bias,
        qk_layernorm=c.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=_pipeline_layout(layout),
        pipeline_dtype=DTYPES[c.dtype],
        params_dtype=DTYPES[c.dtype],
        bf16=bf16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # state is filled by the mover; see mark_tensor_parallel
        gradient_accumulation_fusion=False,
        batch_p2p_comm=torch.cuda.is_available(),  # over gloo batched P2P is silently wrong in some schedules
        batch_p2p_sync=False,
        overlap_p2p_comm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        **(_expert_options(c, layout) if c.experts else {}),
    )
    # the loss is already divided by its global denominator, so nothing is left to scale by token counts
    config.finalize_model_grads_func = lambda model, _tokens=None, **kwargs: finalize_model_grads(model, None, **kwargs)
    return config


def _expert_options(c: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Experts as Mixtral and Qwen3-MoE have them: softmax over the chosen ones, no token dropped, no auxiliary loss."""
    return {
        "num_moe_experts": c.experts,
        "moe_ffn_hidden_size": c.expert_ffn,
        "moe_router_topk": c.experts_per_token,
        "moe_layer_freq": [int(is_sparse(c, layer)) for layer in range(c.layers)],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }


def _pipeline_layout(layout: Layout) -> list[list[str]] | None:
    """Megatron's explicit pipeline layout: the embedding first, `pipeline` decoder layers per rank, the loss last."""
    if layout.pp == 1:
        return None
    ranks = [["decoder"] * count for count in layout.pipeline]
    ranks[0].insert(0, "embedding")
    ranks[-1].append("loss")
    return ranks


def layers_of(spec: ModelSpec, config: TransformerConfig) -> Any:
    """The modules of a decoder layer, or, with experts, of each layer of this pipeline rank (groups must be live)."""
    if spec.config.experts:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=spec.config.qk_norm)


def mark_tensor_parallel(model: GPTModel) -> None:
    """Marks cut weights as cut: without their own initialisation Megatron leaves that out, takes them for duplicates
    and computes too small a gradient norm, silently (facts: engines, 8.1).
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)  # biases are marked by Megatron itself
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(weight, True, 1, 1)
