"""`nereus export`: the model of a run's checkpoint for others."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.checkpoint import Manifest, folder_name
from nereus.errors import ConfigError
from nereus.runtime.journal import RunFolder

FORMATS = ("hf", "torch_dist", "dcp", "nemo2")
EMUS = {"actor": "actor.train", "reference": "reference.infer"}


def add_export(parser: ArgumentParser) -> None:
    """The arguments of `nereus export`."""
    parser.usage = "nereus export RUN|CHECKPOINT --to FOLDER [--format FORMAT] [--step N] [--of MODEL] [--force]"
    parser.add_argument("source", metavar="RUN|CHECKPOINT", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="the new folder")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="hf: for transformers and vLLM (default)")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after step N (default: the newest)")
    parser.add_argument("--of", choices=tuple(EMUS), default="actor", help="which model (default: the actor)")
    parser.add_argument("--force", action="store_true", help="replace FOLDER if it exists")


def export(arguments: Namespace) -> int:
    """Carries the command out: 0. Raises NereusError; every file of the checkpoint is verified first."""
    from nereus.interchange import export as writers  # seconds
    from nereus.interchange.foreign import beside_of
    from nereus.interchange.native import NereusModel
    from nereus.interchange.placing import new_folder
    from nereus.interchange.start import model_of
    from nereus.model import model_spec

    checkpoint, manifest = _checkpoint(Path(arguments.source), arguments.step)
    spec = model_spec(arguments.of, model_of(manifest))
    state = NereusModel(checkpoint, spec, EMUS[arguments.of], manifest)
    beside = beside_of(checkpoint)
    with new_folder(Path(arguments.to), source=checkpoint, force=arguments.force) as draft:
        if arguments.format == "hf":
            writers.export_hf(draft, state, spec, beside=beside)
        elif arguments.format == "dcp":
            writers.export_dcp(draft, state, spec, beside=beside)
        elif arguments.format == "torch_dist":
            writers.export_torch_dist(draft, state, spec, beside=beside)
        else:
            writers.export_nemo2(draft, state, spec, beside=beside)
    size = f"{spec.parameters:,} parameters of {spec.config.dtype}"
    print(f"{checkpoint} (after step {manifest.step}) -> {arguments.to}: {arguments.of}, {size}, {arguments.format}")
    return 0


def _checkpoint(source: Path, step: int | None) -> tuple[Path, Manifest]:
    """The checkpoint `source`, or a run's newest good one or that of `step`, verified. ConfigError where there is none."""
    from nereus.interchange.native import is_checkpoint
    from nereus.runtime.checkpoints import newest_good, saved_steps, verified

    if is_checkpoint(source):
        if step is not None:
            raise ConfigError("--step", step, f"expected none: {source} is one checkpoint")
        return source, verified(source)
    folder = RunFolder(path=source).checkpoints
    steps = saved_steps(folder)
    if not steps:
        raise ConfigError("RUN|CHECKPOINT", str(source), "expected a run with checkpoints, or a checkpoint")
    if step is None:
        found = newest_good(folder)
        for reason in found.refused:
            print(f"not used: {reason}")
        return found.path, found.manifest
    if step not in steps:
        raise ConfigError("--step", step, f"expected one of {', '.join(map(str, steps))}")
    return folder / folder_name(step), verified(folder / folder_name(step))
