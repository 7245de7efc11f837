"""The error tree: every message says what, where, what was expected and what to do next.

NereusError
  ConfigError       a key of the configuration is wrong; nothing has started
  InfeasiblePlan    a plan cannot hold its models in the slots it names
  PlanOutgrown      the present plan cannot hold the rows of a step
  SlotOutOfMemory   a slot's ledger refused an entry beyond its budget
  TransferFailed    bytes on the wire are not the plan's, or a peer did not answer
  StorageMismatch   an engine's real storage is not what nereus.storage says
  DigestMismatch    state after a movement is not the state before it
  InvalidEvent      the controller was told something that cannot be true now
  JournalError      a run folder cannot be read or written
  CheckpointError   a checkpoint cannot be written, read or trusted; names the file
  SlotFailed        a slot process raised or died; carries its traceback
  Infeasible        memory allows no order of a transition (transitions.order)
  InvalidGraph      a transition graph may not run (transitions.holders)
  UnreadableFolder  a foreign checkpoint cannot be read (interchange.source)
  RefusedPickle     a pickle in one names what is not on the list (interchange.unpickle)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NereusError(Exception):
    """The root of all errors that Nereus raises on purpose."""


class ConfigError(NereusError):
    """A wrong key of the configuration: names the key, the value and what would be right."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(f"{key} = {value!r}: {expected}")
        self.key, self.value, self.expected = key, value, expected

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.expected)


class InfeasiblePlan(ConfigError):
    """A plan cannot hold its models in the slots it names."""


class PlanOutgrown(NereusError):
    """The rows of step `step` are so wide that `slot` needs more than its budget for them; no phase has begun on them."""

    def __init__(self, step: int, plan_text: str, width_tokens: int, slot: int, needs: str, budget_bytes: int) -> None:
        super().__init__(
            f"step {step} has rows of {width_tokens} tokens, which the plan {plan_text} cannot hold: slot {slot} needs "
            f"{needs}, its budget fleet.slot_budget_bytes is {budget_bytes:,}; resume with a plan of more shards or a "
            "smaller micro_batch, or with nereus.policy=nereus"
        )
        self.step, self.width_tokens = step, width_tokens
        self.args_kept = (step, plan_text, width_tokens, slot, needs, budget_bytes)

    def __reduce__(self) -> tuple[type[PlanOutgrown], tuple[int, str, int, int, str, int]]:
        return type(self), self.args_kept


class SlotOutOfMemory(NereusError):
    """A slot's ledger refused an entry: `needed_bytes` for `component` in `phase`, `free_bytes` left of the budget."""

    def __init__(self, slot: int, phase: str, component: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"slot {slot} in phase {phase}: {component} needs {needed_bytes:,} bytes, {free_bytes:,} are left of its "
            "budget; raise fleet.slot_budget_bytes or choose a layout with more shards"
        )
        self.args_kept = (slot, phase, component, needed_bytes, free_bytes)

    def __reduce__(self) -> tuple[type[SlotOutOfMemory], tuple[int, str, str, int, int]]:
        return type(self), self.args_kept


class TransferFailed(NereusError):
    """Bytes on the wire are not the plan's, or a peer did not answer in time."""


class StorageMismatch(NereusError):
    """An engine's real storage is not what `nereus.storage` says: another version of the engine, or a fault there."""


class DigestMismatch(NereusError):
    """State after a movement is not the state before it."""


class InvalidEvent(NereusError):
    """The controller was told something that cannot be true in its present state."""


class JournalError(NereusError):
    """A run folder cannot be read or written."""


class CheckpointError(NereusError):
    """A checkpoint cannot be written, read or trusted: names the folder and the file, and what is wrong with it."""


class SlotFailed(NereusError):
    """A slot process raised or died; the message carries the slot and its traceback.

    `lost` are the slots whose processes are known to be dead.
    """

    def __init__(self, message: str, lost: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.lost = lost

    def __reduce__(self) -> tuple[type[SlotFailed], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.lost)


def near(name: str, known: Iterable[str]) -> str:
    """What an error says about a name that is none of `known`: the nearest ones, or all when nothing is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
