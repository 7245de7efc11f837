"""One slot: the process that holds parts of models and runs them. A Ray actor wraps it; it knows nothing of Ray.

All methods run on the process's one thread that may touch torch, Megatron and vLLM. Methods marked *collective* must be
called on every slot of the stage (or world) they name, in the same order.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from nereus.checkpoint import Part, Read
from nereus.config import Config
from nereus.engines.megatron import cpu
from nereus.engines.megatron.engine import TrainEngine, adam_of
from nereus.engines.megatron.steps import forward, train
from nereus.engines.vllm.boot import boot
from nereus.engines.vllm.engine import GenerationEngine
from nereus.engines.world import Census, ProcessWorld, census
from nereus.interchange import start
from nereus.layout import StagePlan, micro_batch_rows
from nereus.lengths import request_tokens
from nereus.model import models_of, seed_of
from nereus.rl.batch import Batch, over_tensors
from nereus.rollout import Completion, Request
from nereus.runtime import digest, fabric, state
from nereus.runtime.control import Control
from nereus.runtime.fabric import Program, Traffic
from nereus.runtime.host_memory import OWNER, kept
from nereus.runtime.job import IDLE_GROUPS, ShellKey
from nereus.runtime.ledger import ActivationMeter, Ledger, resident_bytes, settle
from nereus.runtime.messages import PhaseResult, SlotMemory
from nereus.runtime.objective import Objective
from nereus.runtime.progress import Progress
from nereus.runtime.shards import Reader, SaveStarted, SaveState, Writing, fill
from nereus.runtime.slot_save import SNAPSHOT, offload, save
from nereus.runtime.slot_sync import run_sync
from nereus.runtime.transformation import OLD, Performed, SlotChange, Transformation, room_of
from nereus.storage import MOMENTS, Shard, emu_name
from nereus.transitions.planned import SlotRoom
from nereus.transitions.programs import Task

Ranks = tuple[int, ...]
LOGIT_COPIES = 6  # of [rows, S, local vocabulary] float32: raw, scaled, masked, shifted, exp, log-probabilities


class Slot:
    """See the module. `number` is also the slot's rank in the world of live slots."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)
        cpu.apply()
        boot()
        digest.prepare()
        self.number = number
        self.control = Control(self)
        self.world: ProcessWorld | None = None
        self.generation: GenerationEngine | None = None
        self.live: dict[str, TrainEngine] = {}
        self.shells: dict[ShellKey, TrainEngine] = {}
        self._writing: Writing | SaveState | None = None
        self._changing: Transformation | None = None
        self._retreated: dict[str, int] | None = None
        self.keeping: IO[bytes] | None = None
        settle()
        gc.freeze()  # what was imported stays: collections look at what the job makes
        self._baseline_bytes = resident_bytes()
        self.configure(Config(), ".")

    def configure(self, config: Config, model_folder: str) -> None:
        """Begins a job on this slot: nothing of an earlier one is kept but its world."""
        self.stop_generation()
        if isinstance(self._writing, Writing):
            self._writing.join(self.config.fleet.phase_timeout_seconds)
        self._writing = None
        self._close_engines()
        self.config, self.model_folder = config, Path(model_folder)
        self.specs = models_of(config.model)
        self.store: dict[str, state.Store] = {}
        self.steps: dict[str, int] = {}
        self._sync: tuple[Program, ...] = ()
        self.on_task: Callable[[Task], None] | None = None
        self.ledger = Ledger(slot=self.number, budget_bytes=config.fleet.slot_budget_bytes)
        settle()
        # what an earlier job left in this process: the allocator's and the libraries' own tables
        self.ledger.hold("overhead.process", max(resident_bytes() - self._baseline_bytes, 0))

    def as_new(self) -> None:
        """Nothing that earlier jobs left in this process counts from here on: for slots that outlive their job."""
        self.configure(self.config, str(self.model_folder))
        self._baseline_bytes = resident_bytes()

    def join(self, size: int, address: str, port: int, timeout_seconds: float) -> None:
        """Collective over all slots: forms the world."""
        self._retreated = None
        with self.ledger.measured("overhead.world"):
            self.world = ProcessWorld(
                rank=self.number,
                size=size,
                address=address,
                port=port,
                timeout_seconds=timeout_seconds,
            )

    def _close_engines(self) -> None:
        if self._changing is not None:
            self._changing.abandon()
            self._changing = None
        for name in list(self.live):
            self.live.pop(name).close()
        while self.shells:
            self.shells.popitem()[1].release(collect=False).close()

    def leave(self) -> None:
        """Closes everything that is live and the world; detached state stays."""
        self.stop_generation()
        self._close_engines()
        self.tear()

    def renumber(self, number: int) -> None:
        """Another number, in no world: slots before this one are gone."""
        self.number = self.ledger.slot = number

    def tear(self) -> None:
        """Destroys every group of this process, so that a peer that waits for it is told at once; state stays."""
        self.stop_generation()
        if self.world is not None:
            self.world.close()
            self.world = None

    def retreat(self, committed: bool, label: str) -> dict[str, int]:
        """Takes all engines apart; the state of the version that stands is detached, not copied. Returns its steps.

        Local, so that it may follow the loss of a peer: the world is left, and peers that wait for this slot are told at
        once (models hold groups open, so they go too). Until a world is joined again a second call changes nothing. The
        optimizer steps are by EMU.
        """
        if self._retreated is not None:
            return self._retreated
        changing, self._changing = self._changing, None
        engines = dict(self.live) if changing is None else changing.newest(committed=committed)
        self.store[label] = {}
        self._retreated = {}
        for emu, engine in engines.items():
            engine.bring_back()
            self.store[label].update(engine.views())
            self._retreated[emu] = engine.optimizer_steps
            engine.close()
        engines.clear()
        self.live.clear()
        del changing
        self._close_engines()
        self.tear()
        gc.collect()
        kept = ("overhead.process", "overhead.first_use")
        self.ledger.held = {name: size for name, size in self.ledger.held.items() if name.startswith(kept)}
        self.ledger.hold(f"detached.{label}", state.size_bytes(self.store[label]))
        return self._retreated

    @property
    def joined(self) -> ProcessWorld:
        """The world of the live slots; RuntimeError before `join` and after `leave`."""
        if self.world is None:
            raise RuntimeError(f"slot {self.number} has not joined a world")
        return self.world

    def align(
        self,
        rank_sets: tuple[Ranks, ...],
        group_count: int,
        used: frozenset[Ranks] = frozenset(),
        idle: int = IDLE_GROUPS,
    ) -> int:
        """Collective over all slots, before groups are built: equal names from here on, and a group per rank set.

        Of groups that are not `used` the last `idle` stay.
        """
        self.joined.align_group_count(group_count)
        for ranks in rank_sets:
            self.joined.sub(ranks)
        self.joined.forget_idle({*used, *rank_sets}, idle)
        return self.joined.group_count

    def group_count(self) -> int:
        """The counter behind the names of groups: `align` takes the largest over the slots."""
        return self.joined.group_count

    # -- state ---------------------------------------------------------------------------------------------------

    def create(self, model: str, shards: tuple[Shard, ...], label: str) -> None:
        """Fills detached shards with the state that `model` starts with: the actor's from model.folder if there is one."""
        if model == "actor" and self.config.model.folder:
            limit_bytes = max(self.config.transfer.bucket_bytes // 2, 1)
            with self.ledger.during("staging", limit_bytes):
                made = start.fill(self.specs[model], shards, limit_bytes)
        else:
            made = state.initial(self.specs[model], shards, self.config.run.seed)
        self._keep(label, made)

    def _keep(self, label: str, made: state.Store) -> None:
        self.store.setdefault(label, {}).update(made)
        self.ledger.hold(f"detached.{label}", state.size_bytes(self.store[label]))

    def drop(self, label: str, emu: str = "") -> None:
        """Forgets detached state, of one EMU or all."""
        held = self.store.pop(label, {})
        self.ledger.release(f"detached.{label}")
        if emu and (left := {shard: data for shard, data in held.items() if shard.emu != emu}):
            self._keep(label, left)

    def attach(self, stage: StagePlan, label: str, optimizer_steps: int) -> None:
        """Collective over the stage's slots: builds the engine and fills it from detached state; others do nothing.

        The detached shards that went in are dropped.
        """
        emu = emu_name(stage)
        if stage.rank_of(self.number) is None:
            return
        trained = stage.stage == "train"
        adam = adam_of(self.config.algorithm, stage.model) if trained else None
        with self.ledger.measured(f"overhead.{emu}"):
            engine = TrainEngine(self.joined, self.specs[stage.model], stage, self.number, adam)
            self.ledger.hold_all(emu, engine.resident_bytes())
        held = self.store.get(label, {})
        with torch.no_grad():
            for shard, view in engine.views().items():
                view.copy_(held.pop(shard))
        engine.optimizer_steps = optimizer_steps
        self.steps[emu] = optimizer_steps
        self.live[emu] = engine
        self.ledger.forget_use(emu)
        self.ledger.hold(f"detached.{label}", state.size_bytes(held))

    def move(self, program: Program, emus: tuple[str, ...], source_label: str, target_label: str) -> Traffic:
        """Collective over the world: this slot's part of a movement into detached shards of `target_label`.

        Sources are the live or detached (`source_label`) state of `emus`.
        """
        sources = self._sources(emus, source_label)
        missing = [s for s in program.wanted if s not in self.store.get(target_label, {})]
        added = sum(s.size_bytes for s in missing)
        self.ledger.hold(f"detached.{target_label}", self.ledger.held.get(f"detached.{target_label}", 0) + added)
        self.store.setdefault(target_label, {}).update(state.empty(missing))
        with self.ledger.during("staging", fabric.staging_bytes(program)):
            return fabric.run(program, sources, self.store[target_label], self.control.check)

    def _sources(self, emus: tuple[str, ...], label: str) -> dict[Shard, Tensor]:
        found: dict[Shard, Tensor] = {s: t for s, t in self.store.get(label, {}).items() if s.emu in emus}
        for emu in emus:
            if emu in self.live:
                found.update(self.views(emu))
        return found

    def views(self, emu: str) -> dict[Shard, Tensor]:
        """The live state of an EMU; what waits in host memory comes back first."""
        engine = self.live[emu]
        if engine.bring_back():
            self.ledger.hold_all(emu, engine.resident_bytes())
        return engine.views()

    def offload(self, emu: str, folder: str) -> int:
        """The weights of an inference-only stage wait in host memory until they are next asked for; the bytes."""
        return offload(self, emu, Path(folder))

    def keep(self, folder: Path) -> None:
        """The run's host memory, with `folder` in it, stays while this slot lives, whatever becomes of its driver."""
        if self.keeping is None or self.keeping.name != str(folder.parent / OWNER):
            self.keeping = kept(folder.parent)

    def digests(self, emus: tuple[str, ...], label: str) -> dict[Shard, int]:
        """The digest of every shard that this slot holds of `emus`, live or detached under `label`."""
        return state.digests(self._sources(emus, label))

    def reset_optimizer(self, emu: str) -> None:
        """Forgets moments and step counts of a live EMU: PPO begins with a fresh optimizer after the warm-up."""
        if emu not in self.live:
            return
        engine = self.live[emu]
        with torch.no_grad():
            for shard, view in engine.views().items():
                if shard.component in MOMENTS:
                    view.zero_()
        engine.optimizer_steps = 0
        self.steps[emu] = 0

    def fetch(self, emu: str, component: str = "") -> dict[Shard, Tensor]:
        """Copies of this slot's shards of an EMU, of one component or all (tests, exports); not for movement."""
        held = self._sources((emu,), "").items()
        return {s: t.clone() for s, t in held if component in ("", s.component)}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, path: str, parts: tuple[Part, ...]) -> SaveStarted:
        """Copies `parts` of the live state to host memory and lets a thread write them to the new file `path`.

        Where the budget has no room for the copy the file is written here and now. What comes of it: `save_state`.
        """
        limit_bytes = max(self.config.transfer.bucket_bytes // 2, 1)
        reader = Reader(parts, self._sources(tuple(self.live), ""), limit_bytes)
        on_budget = state.device().type == "cpu"  # else the copy is not in the memory that the budget counts
        self._writing, started = save(Path(path), parts, reader, self.ledger, limit_bytes, counted=on_budget)
        return started

    def save_state(self) -> SaveState:
        """How far the file of the last `save` is; once it is done the copy is forgotten."""
        found = self._writing.state() if isinstance(self._writing, Writing) else self._writing
        if found is None:
            raise RuntimeError(f"slot {self.number} writes no checkpoint")
        if found.done:
            self.ledger.release(SNAPSHOT)
        return found

    def load(self, folder: str, reads: tuple[Read, ...], blank: tuple[Shard, ...], label: str) -> int:
        """Fills new detached shards from a checkpoint's files, `blank` ones with zeros; returns the bytes read."""
        made = state.empty(dict.fromkeys(read.wanted for read in reads))
        made.update({shard: tensor.zero_() for shard, tensor in state.empty(blank).items()})
        self._keep(label, made)
        limit_bytes = max(self.config.transfer.bucket_bytes // 2, 1)
        with self.ledger.during("staging", limit_bytes):
            return fill(Path(folder), reads, made, limit_bytes)

    # -- changes of plan -----------------------------------------------------------------------------------------

    def begin_change(self, change: SlotChange) -> None:
        """Learns this slot's part of a change of plan."""
        if self._changing is not None:
            raise RuntimeError(f"slot {self.number} is in a change already")
        self._changing = Transformation(self, change)

    def perform(self, tasks: tuple[Task, ...], committed: bool, optimizer_steps: dict[str, int]) -> Performed:
        """Carries out tasks of the change; some wait for other slots, so all slots of a stretch are called at once.

        When one fails this slot retreats, to the new version where the change is `committed`.
        """
        if self._changing is None:
            raise RuntimeError(f"slot {self.number} is in no change")
        performed = self._changing.perform(tasks, optimizer_steps)
        if performed.failed is not None:
            self.retreat(committed, OLD)
        return performed

    def before_task(self, task: Task) -> None:
        """Where the slot tells what it comes to, and may be told to end; where tests make it fail."""
        self.control.at(f"{task.kind} {task.emu}")
        if self.on_task is not None:
            self.on_task(task)

    def finish_change(self) -> None:
        """The change is over."""
        if self._changing is not None:
            self._changing.finish()
            self._changing = None

    def abandon_change(self) -> None:
        """The change is undone before anything was dropped: next engines go."""
        if self._changing is not None:
            self._changing.abandon()
            self._changing = None

    def room(self) -> SlotRoom:
        """What a change of plan may count on."""
        return room_of(self.ledger)

    # -- phases --------------------------------------------------------------------------------------------------

    def _seed(self, emu: str) -> str:
        """Random numbers of a phase are a function of (run seed, EMU, optimizer steps): no layout, slot or history."""
        seed = seed_of(self.config.run.seed, "rng", emu, self.steps[emu])
        torch.manual_seed(seed)
        return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]

    def _logit_bytes(self, engine: TrainEngine, share: Batch, micro_batch: int) -> int:
        if not engine.last_stage or engine.spec.head != "language":
            return 0
        rows = micro_batch if engine.stage.layout.ep > 1 else micro_batch_rows(share.rows, micro_batch)
        return LOGIT_COPIES * rows * share.width_tokens * engine.padded_vocab_rows * 4

    def forward(self, emu: str, share: Batch, micro_batch: int, phase: str) -> PhaseResult:
        """Collective over the stage: what the model says about this slot's share of the batch."""
        engine = self.live[emu]
        with self.ledger.first_use(emu, phase), self.ledger.in_phase(phase):
            if engine.bring_back():
                self.ledger.hold_all(emu, engine.resident_bytes())
            rng = self._seed(emu)
            self.ledger.touch("logits", self._logit_bytes(engine, share, micro_batch))
            share = over_tensors(share, lambda tensor: tensor.to(state.device()))
            with self.control.before_each(engine.module):
                outputs = forward(engine, share, micro_batch=micro_batch, temperature=self.config.rollout.temperature)
        found = None if outputs is None else {name: tensor.cpu() for name, tensor in outputs.items()}
        return PhaseResult(outputs=found, metrics={}, grad_norm=0.0, rng=rng)

    def train(self, emu: str, share: Batch, micro_batch: int, objective: Objective, lr: float) -> PhaseResult:
        """Collective over the stage: one optimizer step on this slot's share of a mini-batch."""
        engine = self.live[emu]
        meter = ActivationMeter(engine.module.parameters())
        phase = f"update_{emu.split('.', maxsplit=1)[0]}"
        with self.ledger.first_use(emu, phase), self.ledger.in_phase(phase):
            rng = self._seed(emu)
            share = over_tensors(share, lambda tensor: tensor.to(state.device()))
            with meter.counting(), self.control.before_each(engine.module):
                result = train(
                    engine,
                    share,
                    micro_batch=micro_batch,
                    temperature=self.config.rollout.temperature,
                    loss=objective.loss,
                    lr=lr,
                )
            self.ledger.touch("activations", meter.peak_bytes + self._logit_bytes(engine, share, micro_batch))
        self.steps[emu] = engine.optimizer_steps
        return PhaseResult(outputs=None, metrics=result.metrics, grad_norm=result.grad_norm, rng=rng)

    # -- generation ----------------------------------------------------------------------------------------------

    def start_generation(self, stage: StagePlan) -> None:
        """Collective over the generation stage's slots: starts this slot's part of an engine, without weights."""
        if stage.rank_of(self.number) is None:
            return
        data = self.config.data
        self.ledger.forget_use("actor.generate")
        with self.ledger.measured("overhead.actor.generate"):
            self.generation = GenerationEngine(
                world=self.joined,
                group_ranks=stage.slots,
                tp=stage.layout.tp,
                model_folder=self.model_folder,
                max_model_tokens=request_tokens(data),
                max_requests=max(data.prompts_per_step * data.samples_per_prompt, 1),
                kv_cache_bytes=self.config.rollout.kv_cache_bytes,
                dtype=self.config.model.dtype,
            )
            self.ledger.hold_all("actor.generate", self.generation.resident_bytes())

    def stop_generation(self) -> None:
        """Takes this slot's engine part down; local."""
        if self.generation is not None:
            self.generation.close()
            self.generation = None
            self.ledger.release("actor.generate")
            self.ledger.release("overhead.actor.generate")

    def plan_sync(self, programs: tuple[Program, ...]) -> None:
        """Keeps this slot's part of the weight sync, a program per layer."""
        self._sync = programs

    def sync(self, emu: str, poison: bool = False) -> Traffic:  # Ray passes it by place
        """Collective over the world: moves weights from training to generation, a layer at a time.

        Receiving slots offer each layer to vLLM while the next one travels; slots without an engine only send.
        `poison` fills what is not the slot's own with NaN (tests).
        """
        return run_sync(self, self._sync, self._sources((emu,), ""), poison=poison)

    def generate(self, requests: list[Request], kept_in: str, optimizer_steps: int) -> list[Completion]:
        """Collective over the slots of one engine, which are given the same requests; others return nothing.

        How far they come is told in the folder `kept_in`, as sampled from the policy after so many optimizer steps.
        """
        if self.generation is None:
            return []
        progress = Progress(Path(kept_in), self.number, optimizer_steps)
        with self.ledger.first_use("actor.generate", "gen"), self.ledger.in_phase("gen"):
            done = self.generation.generate(requests, self.control.checking(progress.tell))
        progress.end()
        return done

    # -- facts ---------------------------------------------------------------------------------------------------

    def memory(self, settled: bool = True) -> SlotMemory:  # Ray passes it by place
        """The ledger beside the process's resident memory above its baseline.

        Unless `settled`, what Python and the allocator keep for later is in the latter.
        """
        if settled:
            settle()
        return SlotMemory(
            slot=self.number,
            held=dict(self.ledger.held),
            peaks=dict(self.ledger.peaks),
            resident_bytes=resident_bytes() - self._baseline_bytes,
        )

    def free_bytes(self) -> int:
        """What the ledger would still allow."""
        return self.ledger.budget_bytes - self.ledger.total_bytes

    def census(self) -> Census:
        """Groups, descriptors and threads of this process."""
        return census()

    def apply(self, function: Callable[..., object], *arguments: object) -> object:
        """Calls `function(slot, *arguments)` here: what tests and tools want to know of a live slot."""
        return function(self, *arguments)
