"""Between a controller and the simulated world: writes down what it was told, commanded and decided, as the real one does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nereus.control.controller import AdaptiveCommand, AdaptiveController, AdaptiveEvent, Record
from nereus.control.written import written
from nereus.fleet import Fleet
from nereus.sim.edges import Log


@dataclass(kw_only=True)
class Told:
    """Has the face of the controller. `policy` and `inventory` are what a replay makes it anew from."""

    controller: AdaptiveController
    journal: Log
    policy: str
    inventory: Fleet
    _begun: bool = False

    def handle(self, event: AdaptiveEvent) -> tuple[AdaptiveCommand, ...]:
        """The controller's commands without its records."""
        at: dict[str, Any] = {"at_seconds": event.at_seconds}
        if not self._begun:
            self._begun = True
            plan, fleet = written(self.controller.plan), written(self.controller.fleet)
            inventory = written(self.inventory)
            self.journal.append(
                "control_started", policy=self.policy, plan=plan, fleet=fleet, inventory=inventory, **at
            )
        commands = self.controller.handle(event)
        self.journal.append("told", event=written(event), **at)
        orders: list[AdaptiveCommand] = []
        for command in commands:
            if isinstance(command, Record):
                self.journal.append("decision", entry=written(command.entry), **at)
            else:
                self.journal.append("commanded", command=written(command), **at)
                orders.append(command)
        return tuple(orders)
