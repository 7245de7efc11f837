"""The World protocol, and the loop that the real and the simulated world share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class World(Protocol):
    """What carries out commands and reports what happened."""

    def events(self) -> Iterator[Any]:
        """Events in the order in which they happened; ends when `Finish` has been carried out."""
        ...

    def submit(self, command: Any) -> None:
        """Carry out a command; what becomes of it is reported as an event."""
        ...


class Commander(Protocol):
    """A controller in the words of its world: `nereus.controller.Controller`, or what stands between another and a world."""

    def handle(self, event: Any) -> tuple[Any, ...]:
        """Commands that follow from an event."""
        ...


def drive(controller: Commander, world: World) -> None:
    """Feeds the controller what happens and the world what it decides, until the world has no more events."""
    for event in world.events():
        for command in controller.handle(event):
            world.submit(command)
