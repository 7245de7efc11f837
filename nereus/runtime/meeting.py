"""Where the slots of a world find each other: a store in the driver's process, so that it can be closed."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class Meeting:
    """A listening store at `address`, on a `port` that was free.

    Slots that build a group wait here for their peers. When one of them fails or dies `close` ends the wait of the others
    at once; a slot as host could not, because it may be one of those that wait. Groups of gloo need the store no more once
    they are built; NCCL asks it again when a group is first used, so it stays open as long as the world.
    """

    def __init__(self, address: str, timeout_seconds: float) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.address = address
        self._store: dist.TCPStore | None = dist.TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        self.port: int = self._store.port

    def close(self) -> None:
        """Ends every wait here with an error; a second call does nothing."""
        self._store = None  # its last reference
