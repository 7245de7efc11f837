"""What a job begins with beside its actor: reference and critic, and the model's files for vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nereus.catalogue import hf_config
from nereus.config import Config
from nereus.errors import JournalError
from nereus.interchange.companions import carry_tokenizer, settings_beside
from nereus.model import VALUE_HEAD
from nereus.runtime.changes import NEXT
from nereus.runtime.job import Job
from nereus.slices import cut, movement
from nereus.storage import emu_name, holding


def other_states(job: Job, names: Sequence[str] = ("reference_infer", "critic_train")) -> None:
    """Reference and critic from the actor: the reference is its copy, the critic its backbone with a new head."""
    actor = job.plan.actor_train
    present = holding(job.specs["actor"], actor)
    for stage in (getattr(job.plan, name) for name in names):
        full = holding(job.specs[stage.model], stage)
        job.create(stage, full, NEXT)
        target = {
            slot: tuple(s for s in shards if s.component in ("weight", "master") and s.tensor != VALUE_HEAD)
            for slot, shards in full.items()
        }
        slices = cut(present, target, rename={emu_name(stage): emu_name(actor)})
        job.move(movement(slices, job.config.transfer.bucket_bytes), target, (emu_name(actor),), "", NEXT)
        job.attach([stage], NEXT)
        job.pool.call_all("drop", NEXT)


def export_model(config: Config, folder: Path) -> None:
    """Writes what vLLM reads: a Hugging Face config.json (the weights come by sync), and the tokenizer.

    JournalError where `folder` cannot be written.
    """
    made = hf_config(config.model)
    settings = made | settings_beside(config.model, made)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        carry_tokenizer(config.model.folder, folder)
    except OSError as error:
        raise JournalError(f"{folder}: cannot be written: {error.strerror or error}") from error
