"""Ray under the slots: an own one on loopback, or the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import services

from nereus.engines.vllm.boot import ENVIRONMENT
from nereus.errors import SlotFailed

JOIN_POLL_SECONDS = 0.2
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray starts its workers at niceness 15: all else on the host would go before the slots
    "RAY_worker_niceness": "0",
    # large blocks go back to the system when they are freed, so that resident memory says what is held
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    "MALLOC_ARENA_MAX": "2",
}


def start_ray(slots: int, timeout_seconds: float) -> None:
    """Starts Ray on loopback with `slots` slots, or joins the cluster that RAY_ADDRESS names.

    A cluster may still be growing: SlotFailed when after `timeout_seconds` it has fewer than `slots` slots.
    """
    os.environ.update(ENVIRONMENT)
    os.environ.update(RAY_ENVIRONMENT)
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if os.environ.get("RAY_ADDRESS"):
        _join_cluster(quiet, slots, timeout_seconds)
        return
    with _own_session():
        ray.init(
            num_cpus=1,
            resources={"slot": float(slots)},
            include_dashboard=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            **quiet,
        )


def _join_cluster(quiet: Mapping[str, Any], slots: int, timeout_seconds: float) -> None:
    address, deadline = os.environ["RAY_ADDRESS"], time.monotonic() + timeout_seconds
    try:
        ray.init(**quiet)
    except (ConnectionError, RuntimeError) as error:
        raise SlotFailed(f"no Ray cluster answers at RAY_ADDRESS = {address}: {error}") from error
    while len(there := places()) < slots:
        if time.monotonic() > deadline:
            found = ", ".join(f"{node['NodeName']} {node['Resources'].get('slot', 0):.0f}" for node in nodes())
            ray.shutdown()
            raise SlotFailed(
                f"the Ray cluster at {address} has {len(there)} of {slots} slots after {timeout_seconds:.0f} s: {found}"
            )
        time.sleep(JOIN_POLL_SECONDS)


def nodes() -> list[dict[str, Any]]:
    """The live Ray nodes, by name."""
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeName"]))


def places() -> list[str]:
    """The Ray node of each slot: the first node's slots come first, so that neighbours share a node."""
    return [node["NodeID"] for node in nodes() for _ in range(int(node["Resources"].get("slot", 0)))]


@contextmanager
def _own_session() -> Iterator[None]:
    """While inside, Ray starts its processes in a session of their own.

    A signal to the driver's process group (Ctrl-C in a terminal, `timeout`, a batch system) then reaches the driver
    alone, which stops at a safe point. They still end with the driver: Ray sets the parent-death signal.
    """
    popen = services.ConsolePopen  # private: an AttributeError here means that Ray has moved it
    services.ConsolePopen = functools.partial(popen, start_new_session=True)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]
