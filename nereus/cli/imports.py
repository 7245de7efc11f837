"""`nereus import`: a foreign checkpoint becomes one of Nereus's own, from which a run can start."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.cli.models import load_model


def add_import(parser: ArgumentParser) -> None:
    """The arguments of `nereus import`."""
    parser.usage = "nereus import FOLDER --to CHECKPOINT [--model NAME|config.json] [--format FORMAT] [--force]"
    parser.add_argument("folder", metavar="FOLDER", help="Hugging Face, Megatron torch_dist, torch DCP or NeMo 2")
    parser.add_argument("--to", metavar="CHECKPOINT", required=True, help="the new checkpoint folder")
    parser.add_argument(
        "--model",
        metavar="NAME|config.json",
        help="what model it is, where the folder does not say: a shipped name or a file",
    )
    parser.add_argument("--format", choices=("auto", "hf", "torch_dist", "dcp", "nemo2"), default="auto")
    parser.add_argument("--force", action="store_true", help="replace CHECKPOINT if it exists")


def import_folder(arguments: Namespace) -> int:
    """Carries the command out: 0. Raises NereusError that names the file, tensor or class."""
    model = None if arguments.model is None else load_model(arguments.model)
    said = None if arguments.format == "auto" else arguments.format
    from nereus.interchange.companions import COMPANIONS, carry
    from nereus.interchange.foreign import open_folder  # seconds
    from nereus.interchange.native import write_checkpoint
    from nereus.interchange.placing import new_folder
    from nereus.runtime.job import short

    source, target = Path(arguments.folder), Path(arguments.to)
    foreign = open_folder(source, model, said)
    with new_folder(target, source=source, force=arguments.force) as draft:
        carried = carry(foreign.beside, draft, ("config.json", *COMPANIONS))
        manifest = write_checkpoint(draft, foreign.state, foreign.spec, source.resolve().name)
    components = sorted({key.split(" ")[1] for key in manifest.digests})
    steps = f" after {foreign.state.optimizer_steps} optimizer steps" if "exp_avg" in components else ""
    size = f"{foreign.spec.parameters:,} parameters, {manifest.size_bytes:,} bytes"
    print(f"{foreign.format} -> {target}: {size}: {', '.join(components)}{steps}")
    for name, digest in short(manifest.digests).items():
        print(f"  digest of {name}: {digest}")
    if foreign.note:
        print(f"  {foreign.note}")
    print(f"  {'with ' + ', '.join(carried) if carried else 'without a tokenizer'}")
    print(f"start a run from it with: nereus train CONFIG model.folder={target}")
    return 0
