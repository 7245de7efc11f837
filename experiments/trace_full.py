"""experiments/trace.py with ten seeds in place of three: `make experiments-full`, about forty minutes on two cores.

`NEREUS_EXPERIMENT=trace_full analysis/trace.py` draws it.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from nereus.experiment import Run

NAME = "trace_full"
SEEDS = tuple(range(1, 11))


def runs() -> tuple[Run, ...]:
    """Those of experiments/trace.py, in a folder of their own."""
    made: tuple[Run, ...] = runpy.run_path(str(Path(__file__).with_name("trace.py")))["runs"](SEEDS, NAME)
    return made
