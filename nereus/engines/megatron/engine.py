"""A model-stage's part on one slot: Megatron's GPTModel, its DDP and optimizer, and views of its state by shard."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from nereus.config import AlgorithmConfig
from nereus.engines.megatron.alone import alone
from nereus.engines.megatron.architecture import DTYPES, layers_of, mark_tensor_parallel, transformer_config
from nereus.engines.megatron.groups import ModelGroups
from nereus.engines.megatron.heads import ValueHead
from nereus.engines.megatron.shell import Shell
from nereus.engines.world import ProcessWorld
from nereus.errors import StorageMismatch
from nereus.layout import Coordinates, StagePlan
from nereus.model import VOCAB_ALIGN, ModelSpec, is_sparse, round_up
from nereus.storage import (
    Param,
    Region,
    Shard,
    emu_name,
    megatron_params,
    megatron_regions,
    owned_ranges,
    state_dtype,
    vocab_rows,
)


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


class TrainEngine:
    """Builds `stage` of `spec` on this slot over the slots of the stage; state is unfilled until `views` are written.

    With `adam` None there is neither DDP nor optimizer (an inference-only stage). Waits for nobody where `groups`, of the
    stage's slots and layout, are given; else the slots of the stage make them together.
    """

    def __init__(
        self,
        world: ProcessWorld,
        spec: ModelSpec,
        stage: StagePlan,
        slot: int,
        adam: Adam | None,
        groups: ModelGroups | None = None,
    ) -> None:
        self.spec, self.stage, self.adam = spec, stage, adam
        rank = stage.rank_of(slot)
        if rank is None:
            raise ValueError(f"slot {slot} takes no part in {emu_name(stage)}")
        self.at: Coordinates = stage.layout.coordinates(rank)
        self.params: tuple[Param, ...] = megatron_params(spec, stage.layout, self.at)
        self.groups = groups or ModelGroups(world, world.sub(stage.slots), stage.layout)
        self.first_stage, self.last_stage = self.at.pp == 0, self.at.pp == stage.layout.pp - 1
        self.optimizer: Any = None
        self._host: Path | None = None
        self._inners: tuple[Any, ...] = ()
        sparse = any(is_sparse(spec.config, layer) for layer in range(spec.config.layers))
        with self.groups.inside(), alone(experts=sparse and stage.layout.ep > 1):
            self.config = transformer_config(spec, stage)
            self.module: Any = self._build_module()
            self.model: Any = self.module if adam is None else self._build_training(adam)
        self._tensors = dict(self.module.named_parameters())
        self._check_params()
        regions = megatron_regions(spec, stage.layout, self.at, adam is not None)
        self._views = self._make_views(regions)
        self._shell = Shell(self._states(), self._blank(regions), self._inners)

    def _build_module(self) -> GPTModel:
        c = self.spec.config
        module = GPTModel(
            config=self.config,
            transformer_layer_spec=layers_of(self.spec, self.config),
            vocab_size=round_up(c.vocab, VOCAB_ALIGN),
            max_sequence_length=1 << 20,
            pre_process=self.first_stage,
            post_process=self.last_stage,
            share_embeddings_and_output_weights=self.spec.tied,
            position_embedding_type="rope",
            rotary_base=int(c.rope_theta),
            rope_scaling=c.rope_factor != 1,
            rope_scaling_factor=c.rope_factor,
        )
        if self.last_stage and self.spec.head != "language":
            module.output_layer = ValueHead(c.hidden, DTYPES[c.dtype])  # pyright: ignore[reportAttributeAccessIssue]
        if torch.cuda.is_available():
            module.cuda()
        mark_tensor_parallel(module)
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
        self._inners = tuple(chained.chained_optimizers)  # one, and with expert parallelism another for experts
        for inner in self._inners:
            for group in inner.optimizer.param_groups:
                for main in group["params"]:
                    inner.optimizer.state[main] = {
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
        if self.optimizer is None or not self.stage.layout.distributed_optimizer:
            return
        owned = owned_ranges(self.params, self.stage.layout, self.at)
        for name, tensor in self._tensors.items():
            ranges = [inner._get_model_param_range_map(tensor)["param"] for inner in self._inners_of(tensor)]
            found = (ranges[0].start, ranges[0].end) if ranges else None
            if found != owned.get(name):
                raise StorageMismatch(f"{name}: the optimizer owns {found}, nereus.storage says {owned.get(name)}")

    def _inners_of(self, parameter: Tensor) -> list[Any]:
        """Megatron's optimizer that has state of a parameter here: none where other ranks own all of it."""
        if isinstance(self._inners[0], DistributedOptimizer):
            return [inner for inner in self._inners if parameter in inner.model_param_gbuf_map]
        main = getattr(parameter, "main_param", parameter)
        return [inner for inner in self._inners if main in inner.optimizer.state]

    def _main(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer steps for a parameter: its owned flat shard, its float32 master, or itself."""
        inner = self._inners_of(parameter)[0]
        if isinstance(inner, DistributedOptimizer):
            group, order = inner.model_param_group_index_map[parameter]
            return inner.optimizer.param_groups[group]["params"][order]
        return getattr(parameter, "main_param", parameter)

    def _array(self, component: str, param: str) -> Tensor:
        parameter = self._tensors[param]
        if component == "weight":
            return parameter.data.view(-1)
        main = self._main(parameter)
        if component == "master":
            return main.data.view(-1)
        return self._inners_of(parameter)[0].optimizer.state[main][component].view(-1)

    def _states(self) -> list[Tensor]:
        """All that holds state or gradients here."""
        found = [*self._tensors.values(), *self._gradient_buffers()]
        for inner in self._inners:
            for main, state in inner.optimizer.state.items():
                found += [main, state["exp_avg"], state["exp_avg_sq"]]
        return found

    def _blank(self, regions: Iterable[Region]) -> list[Tensor]:
        """The arrays that `views` do not cover wholly: they have padding, which nobody fills."""
        covered: dict[tuple[str, str], int] = defaultdict(int)
        for region in regions:
            covered[region.component, region.param] += region.box.elements
        found: list[Tensor] = []
        for name, parameter in self._tensors.items():
            components = ["weight"]
            if self.optimizer is not None and self._inners_of(parameter):
                own = self._main(parameter).dtype != parameter.dtype
                components += ["exp_avg", "exp_avg_sq", *(["master"] if own else [])]
            arrays = {component: self._array(component, name) for component in components}
            found += [array for component, array in arrays.items() if covered[component, name] < array.numel()]
        return found

    def views(self) -> dict[Shard, Tensor]:
        """The state of this slot by shard: each tensor is a view of the engine's own storage."""
        return dict(self._views)

    def _make_views(self, regions: Iterable[Region]) -> dict[Shard, Tensor]:
        dtypes = {t.name: t.dtype for t in self.spec.tensors}
        found: dict[Shard, Tensor] = {}
        for region in regions:
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
        steps = {int(state["step"].item()) for inner in self._inners for state in inner.optimizer.state.values()}
        return max(steps, default=-1)

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        if self.optimizer is not None:
            for inner in self._inners:
                for state in inner.optimizer.state.values():
                    state["step"] = torch.tensor(float(steps))

    def vocab_range(self) -> tuple[int, int]:
        """(first row, real rows) of the vocabulary on this TP rank."""
        first, end, _ = vocab_rows(self.spec.config.vocab, self.stage.layout.tp, self.at.tp)
        return first, end - first

    @property
    def padded_vocab_rows(self) -> int:
        """Rows of the vocabulary on this TP rank, padding included: the width of its logits."""
        return vocab_rows(self.spec.config.vocab, self.stage.layout.tp, self.at.tp)[2]

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
            buffers = (*self.model.buffers, *self.model.expert_parallel_buffers)
            held["grads"] = sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers)
            for param in self.params:
                parameter = self._tensors[param.name]
                if not self._inners_of(parameter):
                    continue  # another DP rank owns all of it
                main = self._main(parameter)
                copies = 2 if main.data_ptr() == parameter.data_ptr() or main.dtype == parameter.dtype else 3
                held["optimizer"] += copies * main.numel() * 4
        return held

    def _gradient_buffers(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        return [b.grad_data for b in (*self.model.buffers, *self.model.expert_parallel_buffers)]

    def drop_gradients(self) -> None:
        """Gives the gradients' memory back; until `restore_gradients` the engine cannot train."""
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(0)

    def restore_gradients(self) -> bool:
        """Takes dropped gradients' memory again, zeroed; whether any were dropped."""
        dropped = [b for b in self._gradient_buffers() if not b.untyped_storage().nbytes() and b.numel()]
        for buffer in dropped:
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()
        return bool(dropped)

    def offload(self, path: Path) -> int:
        """Moves the weights of an inference-only stage to a file in host memory; the bytes.

        OSError where it cannot be written; the weights have not moved then.
        """
        try:
            with path.open("wb") as file:
                for tensor in self._tensors.values():
                    file.write(tensor.data.cpu().contiguous().view(torch.uint8).numpy().data)
                size_bytes = file.tell()
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._host = path
        self._shell.free()
        return size_bytes

    def bring_back(self) -> int:
        """The weights as they were before `offload`, whose file goes; the bytes, 0 where they are here."""
        if self._host is None:
            return 0
        path, self._host = self._host, None
        self._shell.take()
        with path.open("rb") as file:
            for tensor in self._tensors.values():
                data = torch.empty_like(tensor, device="cpu", requires_grad=False)
                file.readinto(data.view(-1).view(torch.uint8).numpy().data)
                tensor.data.copy_(data)
            size_bytes = file.tell()
        path.unlink()
        return size_bytes

    def rest(self) -> None:
        """Frees all memory of state and gradients; what is left is a shell, which `wake` makes an engine again. Local."""
        self._forget_host()
        self._shell.rest()

    def wake(self, stage: StagePlan) -> None:
        """A shell becomes what a new engine of `stage` would be: state unfilled, padding zero, no steps taken. Local.

        ValueError where the shell is of another stage, other slots or another layout; shares and micro-batch may differ.
        """
        mine = emu_name(self.stage), self.stage.slots, self.stage.layout
        if mine != (emu_name(stage), stage.slots, stage.layout):
            raise ValueError(f"the shell is of {mine}, asked for was {stage}")
        self.stage = stage
        self._shell.wake(self._views.values())
        self.module.train()
        self.optimizer_steps = 0

    def _forget_host(self) -> None:
        if self._host is not None:
            self._host.unlink(missing_ok=True)
            self._host = None

    def release(self, *, collect: bool = True) -> ModelGroups:
        """Drops the model; its groups, which still stand. Local.

        A model is a cycle: its memory goes with the next collection, where `collect` is not asked for; views that are
        kept keep theirs.
        """
        self._forget_host()
        self.model = self.module = self.optimizer = None
        self._inners = ()
        self._tensors, self._views = {}, {}
        self._shell = Shell((), (), ())
        if collect:
            gc.collect()
        return self.groups

    def close(self) -> None:
        """Drops the model and destroys its groups. Local."""
        self.release().close()
