"""1,000 steps of 8B PPO on up to 1,024 GPUs that come and go: how many transitions, and what share of the run they take.

The fleet is Bamboo's trace of GCP A100 spot instances, scaled (experiments/traces/gcp_a100_1024.json has its provenance);
responses grow as AReaL published. `nereus` decides. Its transitions are shown three ways, for no GPU has run them: their
operations where the real world on CPU has run them, with engines and groups built ahead by standby processes where there is
room, and with everything while the job waits. Losses are told NOTICE_SECONDS before, as a scheduler's grace time or a spot
notice does, or not at all; then the state of the lost slots comes from the last checkpoint. Everything is simulated.

Carried out by `nereus experiment run scale`, drawn by analysis/scale.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nereus.cli.load import load_config
from nereus.experiment import Run, Scene, run_of

NAME = "scale"
TRACES = Path(__file__).with_name("traces")
STEPS = 1000
NOTICE_SECONDS = 300.0


def runs() -> tuple[Run, ...]:
    """The three ways of placing operations, and no notice."""
    base = run_of(load_config(TRACES / "ppo_8b.yaml", [f"run.steps={STEPS}"]), experiment=NAME, variant="", seed=1)
    scene = Scene(
        trace="experiments/traces/gcp_a100_1024.json", device="a100", policy="nereus", notice_seconds=NOTICE_SECONDS
    )
    scenes = {
        "measured": scene,
        "standby": replace(scene, placing="standby"),
        "pause": replace(scene, placing="pause"),
        "unannounced": replace(scene, notice_seconds=0.0),
    }
    return tuple(replace(base, variant=variant, scene=each) for variant, each in scenes.items())
