"""A model-stage's part on one slot: Megatron's GPTModel, its DDP and optimizer, and views of its state by shard."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from nereus.config import AlgorithmConfig
from nereus.engines.megatron.groups import ModelGroups
from nereus.engines.megatron.heads import ValueHead
from nereus.engines.world import ProcessWorld
from nereus.errors import StorageMismatch
from nereus.layout import Coordinates, StagePlan
from nereus.model import ModelSpec
from nereus.storage import (
    VOCAB_ALIGN,
    Param,
    Shard,
    emu_name,
    megatron_params,
    megatron_regions,
    owned_ranges,
    round_up,
    state_dtype,
    vocab_rows,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """The optimizer's settings."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float


def adam_of(algorithm: AlgorithmConfig, model: str) -> Adam:
    """The optimizer settings of the actor or the critic."""
    return Adam(
        lr=algorithm.actor_lr if model == "actor" else algorithm.critic_lr,
        beta1=algorithm.adam_beta1,
        beta2=algorithm.adam_beta2,
        eps=algorithm.adam_eps,
        weight_decay=algorithm.weight_decay,
        clip_grad=algorithm.clip_grad,
    )


def _transformer_config(spec: ModelSpec, stage: StagePlan) -> TransformerConfig:
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
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=_pipeline_layout(stage),
        pipeline_dtype=DTYPES[c.dtype],
        params_dtype=DTYPES[c.dtype],
        bf16=bf16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # state is filled by the mover; see _mark_tensor_parallel
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
    )
    # the loss is already divided by its global denominator, so nothing is left to scale by token counts
    config.finalize_model_grads_func = lambda model, _tokens=None, **kwargs: finalize_model_grads(model, None, **kwargs)
    return config


def _pipeline_layout(stage: StagePlan) -> list[list[str]] | None:
    """Megatron's explicit pipeline layout: the embedding first, `pipeline` decoder layers per rank, the loss last."""
    layers = stage.layout.pipeline
    if stage.layout.pp == 1:
        return None
    ranks = [["decoder"] * count for count in layers]
    ranks[0].insert(0, "embedding")
    ranks[-1].append("loss")
    return ranks


def _mark_tensor_parallel(model: GPTModel) -> None:
    """Marks cut weights as cut: without their own initialisation Megatron leaves that out, takes them for duplicates
    and computes too small a gradient norm, silently (facts: engines, 8.1).
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(weight, True, 1, 1)


class TrainEngine:
    """Builds `stage` of `spec` on this slot over the slots of the stage; state is unfilled until `views` are written.

    With `adam` None there is neither DDP nor optimizer (an inference-only stage). Collective over the stage's slots.
    """

    def __init__(self, world: ProcessWorld, spec: ModelSpec, stage: StagePlan, slot: int, adam: Adam | None) -> None:
        self.spec, self.stage, self.adam = spec, stage, adam
        rank = stage.rank_of(slot)
        if rank is None:
            raise ValueError(f"slot {slot} takes no part in {emu_name(stage)}")
        self.at: Coordinates = stage.layout.coordinates(rank)
        self.params: tuple[Param, ...] = megatron_params(spec, stage.layout, self.at.tp, self.at.pp)
        self.groups = ModelGroups(world, world.sub(stage.slots), stage.layout)
        self.first_stage, self.last_stage = self.at.pp == 0, self.at.pp == stage.layout.pp - 1
        self.optimizer: Any = None
        self._inner: Any = None
        with self.groups.inside():
            self.config = _transformer_config(spec, stage)
            self.module: Any = self._build_module()
            self.model: Any = self.module if adam is None else self._build_training(adam)
        self._tensors = dict(self.module.named_parameters())
        self._check_params()

    def _build_module(self) -> GPTModel:
        c = self.spec.config
        module = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=round_up(c.vocab, VOCAB_ALIGN),
            max_sequence_length=1 << 20,
            pre_process=self.first_stage,
            post_process=self.last_stage,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=int(c.rope_theta),
        )
        if self.last_stage and self.spec.head == "value":
            module.output_layer = ValueHead(c.hidden, DTYPES[c.dtype])  # pyright: ignore[reportAttributeAccessIssue]
        if torch.cuda.is_available():
            module.cuda()
        _mark_tensor_parallel(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()  # padding rows stay zero for ever; everything else is filled by the mover
        if self.adam is None:
            module.requires_grad_(False)
        return module

    def _build_training(self, adam: Adam) -> DistributedDataParallel:
        sharded = self.stage.layout.distributed_optimizer
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=False,
            grad_reduce_in_fp32=True,
            average_in_collective=False,
        )
        model = DistributedDataParallel(self.config, ddp_config, self.module)
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=adam.lr,
            min_lr=0.0,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.beta1,
            adam_beta2=adam.beta2,
            adam_eps=adam.eps,
            clip_grad=adam.clip_grad,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=sharded,
        )
        chained: Any = get_megatron_optimizer(optimizer_config, [model], use_gloo_process_groups=False)
        self.optimizer = chained
        self._inner = chained.chained_optimizers[0] if hasattr(chained, "chained_optimizers") else chained
        for group in self._inner.optimizer.param_groups:
            for main in group["params"]:
                self._inner.optimizer.state[main] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(main, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(main, dtype=torch.float32),
                }
        return model

    def _check_params(self) -> None:
        """The pure arithmetic of `nereus.storage` must be what Megatron really built."""
        real = [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in self._tensors.items()]
        said = [(p.name, p.shape, p.dtype) for p in self.params]
        if real != said:
            raise StorageMismatch(f"Megatron's parameters are not those of nereus.storage:\n{real}\n{said}")
        if self.optimizer is None or not isinstance(self._inner, DistributedOptimizer):
            return
        owned = owned_ranges(self.params, self.stage.layout.dp, self.at.dp)
        for name, tensor in self._tensors.items():
            try:
                real_range = self._inner._get_model_param_range_map(tensor)["param"]
            except KeyError:
                real_range = None
            found = None if real_range is None else (real_range.start, real_range.end)
            if found != owned.get(name):
                raise StorageMismatch(f"{name}: the optimizer owns {found}, nereus.storage says {owned.get(name)}")

    def _main(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer steps for a parameter: its owned flat shard, its float32 master, or itself."""
        if isinstance(self._inner, DistributedOptimizer):
            group, order = self._inner.model_param_group_index_map[parameter]
            return self._inner.optimizer.param_groups[group]["params"][order]
        main = getattr(parameter, "main_param", None)
        return parameter if main is None else main

    def _array(self, component: str, param: str) -> Tensor:
        parameter = self._tensors[param]
        if component == "weight":
            return parameter.data.view(-1)
        main = self._main(parameter)
        return (main.data if component == "master" else self._inner.optimizer.state[main][component]).view(-1)

    def views(self) -> dict[Shard, Tensor]:
        """The state of this slot by shard: each tensor is a view of the engine's own storage."""
        dtypes = {t.name: t.dtype for t in self.spec.tensors}
        found: dict[Shard, Tensor] = {}
        for region in megatron_regions(self.spec, self.stage.layout, self.at, self.adam is not None):
            shard = Shard(
                emu=emu_name(self.stage),
                component=region.component,
                tensor=region.tensor,
                box=region.box,
                dtype=state_dtype(region.component, dtypes[region.tensor]),
            )
            shape = region.box.shape
            strides = (region.stride, 1) if len(shape) == 2 else (1,)
            array = self._array(region.component, region.param)
            found[shard] = torch.as_strided(array, shape, strides, array.storage_offset() + region.offset)
        return found

    @property
    def optimizer_steps(self) -> int:
        """How many optimizer steps the state has seen."""
        if self.optimizer is None:
            return 0
        steps = {int(state["step"].item()) for state in self._inner.optimizer.state.values()}
        return max(steps, default=-1)

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        if self.optimizer is not None:
            for state in self._inner.optimizer.state.values():
                state["step"] = torch.tensor(float(steps))

    def vocab_range(self) -> tuple[int, int]:
        """(first row, real rows) of the vocabulary on this TP rank."""
        first, end, _ = vocab_rows(self.spec.config.vocab, self.stage.layout.tp, self.at.tp)
        return first, end - first

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While inside, Megatron's globals are this model's."""
        with self.groups.inside():
            yield

    def resident_bytes(self) -> dict[str, int]:
        """Bytes that this part holds between phases: weights, gradients, optimizer (masters and moments)."""
        held = {
            "weights": sum(t.numel() * t.element_size() for t in self._tensors.values()),
            "grads": 0,
            "optimizer": 0,
        }
        if self.optimizer is not None:
            buffers = self.model.buffers
            held["grads"] = sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers)
            for param in self.params:
                parameter = self._tensors[param.name]
                try:
                    main = self._main(parameter)
                except KeyError:
                    continue  # another DP rank owns all of it
                copies = 2 if main.data_ptr() == parameter.data_ptr() or main.dtype == parameter.dtype else 3
                held["optimizer"] += copies * main.numel() * 4
        return held

    def close(self) -> None:
        """Drops the model and destroys its groups. Local."""
        self.model = self.module = self.optimizer = self._inner = None
        self._tensors = {}
        gc.collect()
        self.groups.close()
