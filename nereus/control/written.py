"""What the controller was told, commanded and decided, as JSON holds it and back: exact to the bit.

Every record is written with its class under `is`. Numbers keep their type; a float's shortest text reads back equal.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from nereus.control.controller import AdaptiveEvent
from nereus.control.outlook import StepObserved
from nereus.control.records import (
    Candidate,
    FleetChanged,
    MemoryAlarm,
    PreemptionNotice,
    SearchDone,
    StateRestored,
    StepRefused,
)
from nereus.errors import JournalError
from nereus.events import JobReady, StopRequested, TransitionDone, TransitionFailed
from nereus.fleet import Fleet
from nereus.layout import Plan

CLASS = "is"
EVENTS: dict[str, type] = {
    each.__name__: each
    for each in (
        JobReady,
        StepObserved,
        StepRefused,
        TransitionDone,
        TransitionFailed,
        StateRestored,
        FleetChanged,
        PreemptionNotice,
        MemoryAlarm,
        SearchDone,
        StopRequested,
    )
}
"""Events that a journal holds."""
PLAIN = (int, float, str)


def written(value: object) -> Any:
    """The value as JSON holds it: records with their class, tuples as lists, keys as text."""
    if isinstance(value, PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {CLASS: type(value).__name__} | {each.name: written(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): written(each) for key, each in cast("Mapping[object, object]", value).items()}
    if isinstance(value, tuple | list):
        several = cast("tuple[object, ...]", value)
        plain = all(isinstance(each, PLAIN) for each in several)
        return list(several) if plain else [written(each) for each in several]
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[Any]", value))
    return value


def event_of(raw: Mapping[str, Any]) -> AdaptiveEvent:
    """The event of `written`. JournalError says what is wrong with anything else."""
    kind = EVENTS.get(str(raw.get(CLASS)))
    if kind is None:
        raise JournalError(f"an event of the controller has {CLASS} = {raw.get(CLASS)!r}: expected {', '.join(EVENTS)}")
    return cast("AdaptiveEvent", _record(kind, raw))


def plan_of(raw: Mapping[str, Any]) -> Plan:
    """The plan of `written`. JournalError as `event_of`."""
    return cast("Plan", _record(Plan, raw))


def fleet_of(raw: Mapping[str, Any]) -> Fleet:
    """The fleet of `written`. JournalError as `event_of`."""
    return cast("Fleet", _record(Fleet, raw))


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


@cache
def _optional(kind: type) -> frozenset[str]:
    """Fields with a default: a journal of before they were there lacks them."""
    return frozenset(each.name for each in fields(kind) if each.default is not MISSING)


def _record(kind: type, raw: Mapping[str, Any]) -> object:
    try:
        missing = _optional(kind) - raw.keys()
        found = kind(**{name: _value(hint, raw[name]) for name, hint in _hints(kind).items() if name not in missing})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalError(f"a {kind.__name__} of the journal cannot be read: {error!r}") from error
    if isinstance(found, Candidate) and found.plan_id != found.plan.plan_id:
        raise JournalError(f"a candidate of the journal is named {found.plan_id}, its plan {found.plan.plan_id}")
    return found


def _value(hint: Any, raw: Any) -> object:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if raw is None else _value(next(each for each in arguments if each is not type(None)), raw)
    if is_dataclass(hint):
        return _record(cast("type", hint), raw)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_value(arguments[0], each) for each in raw)
        return tuple(_value(one, each) for one, each in zip(arguments, raw, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key = int if arguments[0] is int else str
        return {key(name): _value(arguments[1], each) for name, each in raw.items()}
    return raw
