"""A job without a controller: its caller steps and changes it, as benchmarks, checks and tests do."""

from __future__ import annotations

from functools import cached_property

from nereus.config import Config, PlanChange, StageConfig
from nereus.layout import first_plan
from nereus.runtime.changes import ChangeRecord, change_plan
from nereus.runtime.job import Job
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.outset import export_model
from nereus.runtime.phases import Phases, StepRecord, task_of
from nereus.runtime.pool import SlotPool
from nereus.transition import placed_change


class DrivenJob:
    """The job of `config` on the slots of `pool`, which it configures; what it writes goes to `folder`.

    No engine is there yet: `first_state` and `other_states` of the job make them.
    """

    def __init__(self, pool: SlotPool, config: Config, folder: RunFolder) -> None:
        self.pool, self.config, self.folder = pool, config, folder
        export_model(config, folder.model)
        pool.call_all("configure", config, str(folder.model))
        self.job = Job(config=config, pool=pool, plan=first_plan(config))
        self.journal = Journal(folder.events)
        self.steps = 0
        self.urgent = False  # whether changes commit as early as they can

    @cached_property
    def phases(self) -> Phases:
        """The phases of its steps, on the task of `config`."""
        data = self.config.data
        task = task_of(data.task, data.task_options, self.config.run.seed, data.prompt_template, "train")
        return Phases(job=self.job, task=task, folder=self.folder.rollouts)

    def step(self) -> StepRecord:
        """One PPO step; the job has its states and an engine to sample from by then."""
        self.steps += 1
        return self.phases.run(self.steps)

    def change(self, **stages: StageConfig) -> ChangeRecord:
        """A live change of the named stages, ranks placed as a run would place them."""
        record = ChangeRecord(transition=f"t{self.job.state_version + 1}", step=self.steps + 1)
        plan = placed_change(self.config, self.job.plan, PlanChange(**stages))
        change_plan(self.job, plan, record, self.journal, urgent=self.urgent)
        return record
