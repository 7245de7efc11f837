"""Processes for tests of what several do together: forked from one that has torch already, which takes seconds to import."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

import torch.multiprocessing as mp

PRELOADED = ["torch", "torch.distributed", "nereus.engines.world", "nereus.runtime.fabric"]


def prepared() -> ForkServerContext:
    """The context whose processes begin with torch; its server lives as long as the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def side_by_side(member: Callable[..., None], *arguments: object, count: int) -> None:
    """Runs `member(rank, *arguments)` in so many processes; an error in one is raised here."""
    prepared()
    mp.start_processes(member, args=arguments, nprocs=count, start_method="forkserver")
