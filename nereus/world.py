"""The World protocol, and the loop that the real and the simulated world share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from nereus.controller import Controller
from nereus.events import Command, Event


class World(Protocol):
    """What carries out commands and reports what happened."""

    def events(self) -> Iterator[Event]:
        """Events in the order in which they happened; ends when `Finish` has been carried out."""
        ...

    def submit(self, command: Command) -> None:
        """Carry out a command; what becomes of it is reported as an event."""
        ...


def drive(controller: Controller, world: World) -> None:
    """Feeds the controller what happens and the world what it decides, until the world has no more events."""
    for event in world.events():
        for command in controller.handle(event):
            world.submit(command)
