"""What a run shows while it runs: rich on a terminal, plain lines elsewhere, nothing when asked."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

PARTS = ("quiesce", "detach", "move", "verify", "commit", "attach", "engine", "sync")  # of a transition, in order
STAGE_SEPARATOR = " · "  # of a plan's text: `train TP2·PP2·DP1 · gen 2xTP2`
REPEAT_SECONDS = 5.0  # plain lines of one counting phase are at least this far apart


class Display(Protocol):
    """Where the runtime tells what it does; every call returns at once."""

    def phase(self, text: str) -> None:
        """What is done now, such as `starting 4 slots` or `warm-up 40/150 loss 1.23`."""

    def step(self, metrics: Mapping[str, float], layout: str) -> None:
        """One step is done: its metrics (verl's names) and the layout it ran in."""

    def transition(self, record: Mapping[str, object]) -> None:
        """A change of layout is done or failed: the fields of `transition_done` or `transition_failed`."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Give the terminal back; closing twice does nothing."""


class QuietDisplay:
    """Shows nothing."""

    def phase(self, text: str) -> None:
        """Nothing."""

    def step(self, metrics: Mapping[str, float], layout: str) -> None:
        """Nothing."""

    def transition(self, record: Mapping[str, object]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainDisplay:
    """One line for each thing told; a phase that only counts on is shown again after REPEAT_SECONDS."""

    def __init__(self, steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._stream, self._clock = steps, stream, clock
        self._phase, self._shown_at_seconds = "", 0.0

    def phase(self, text: str) -> None:
        """A line, unless the same words with other numbers were shown just now."""
        words, now = re.sub(r"[\d.,]+", "#", text), self._clock()
        if words != self._phase or now - self._shown_at_seconds >= REPEAT_SECONDS:
            self._phase, self._shown_at_seconds = words, now
            self.note(text)

    def step(self, metrics: Mapping[str, float], layout: str) -> None:
        """One line a step."""
        self._phase = ""
        self.note(step_line(metrics, layout, self._steps))

    def transition(self, record: Mapping[str, object]) -> None:
        """One line a transition."""
        self.note(transition_line(record))

    def note(self, text: str) -> None:
        """The line itself."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to give back."""


class RichDisplay:
    """Lines that stay above one live line: what is done now, how far the run is, how long it took."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self._task = self._progress.add_task("starting", total=steps)
        self._progress.start()

    def phase(self, text: str) -> None:
        """The live line's words."""
        self._progress.update(self._task, description=Text(text).markup, refresh=True)

    def step(self, metrics: Mapping[str, float], layout: str) -> None:
        """A line that stays, and the bar moves."""
        self._line(step_line(metrics, layout, self._steps), "")
        done = int(metrics.get("training/global_step", 0))
        words = "finishing" if done >= self._steps else f"step {done + 1}"
        self._progress.update(self._task, completed=done, description=words)

    def transition(self, record: Mapping[str, object]) -> None:
        """A line that stays, in colour."""
        self._line(transition_line(record), "bold red" if "reason" in record else "bold cyan")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._line(text, "yellow")

    def close(self) -> None:
        """Take the live line away."""
        self._progress.stop()

    def _line(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


def open_display(steps: int, stream: TextIO) -> Display:
    """The display for `stream` of a run of `steps` steps: rich when it is a terminal."""
    if stream.isatty():
        return RichDisplay(steps, Console(file=stream))
    return PlainDisplay(steps, stream)


def step_line(metrics: Mapping[str, float], layout: str, steps: int) -> str:
    """One step in one line; what `metrics` lacks is left out."""
    width = len(str(steps))
    words = [f"step {int(metrics.get('training/global_step', 0)):>{width}}/{steps}"]
    seconds, tokens = metrics.get("timing_s/step"), metrics.get("perf/total_num_tokens")
    per_second = tokens / seconds if tokens is not None and seconds else metrics.get("perf/throughput")
    if (reward := metrics.get("critic/score/mean")) is not None:
        words.append(f"reward {reward:6.3f}")
    if (length := metrics.get("response_length/mean")) is not None:
        words.append(f"length {length:5.1f}")
    if per_second is not None:
        words.append(f"{per_second:6,.0f} tok/s")
    if seconds is not None:
        words.append(f"{seconds:5.2f} s")
    return "  ".join([*words, layout]).rstrip()


def transition_line(record: Mapping[str, object]) -> str:
    """One transition in one line: from where to where, the pause by part, the bytes; or why it failed."""
    head = f"change {record.get('transition', '')}".rstrip()
    if "from" in record and "to" in record:
        head += f": {change_text(str(record['from']), str(record['to']))}"
    if "reason" in record:
        return f"{head} failed: {record['reason']}"
    words = []
    pause, seconds = record.get("pause_seconds"), record.get("seconds")
    if isinstance(pause, int | float):
        words.append(f"pause {pause:.2f} s")
    if isinstance(seconds, Mapping):
        words.append(f"({', '.join(f'{part} {seconds[part]:.2f}' for part in in_order(seconds))})")
    moved = record.get("counted_bytes")
    if isinstance(moved, int | float):
        words.append(f"{bytes_text(moved)} moved")
    return f"{head}  {' '.join(words)}".rstrip()


def change_text(before: str, after: str) -> str:
    """What differs between two layouts: `train TP2·PP2·DP1 -> TP1·PP2·DP2, gen 2xTP2 -> 4xTP1`."""
    pairs = list(zip(before.split(STAGE_SEPARATOR), after.split(STAGE_SEPARATOR), strict=False))
    named = all(old.split(" ")[0] == new.split(" ")[0] and " " in old for old, new in pairs)
    if not named or before.count(STAGE_SEPARATOR) != after.count(STAGE_SEPARATOR) or before == after:
        return f"{before} -> {after}"
    return ", ".join(f"{old} -> {new.partition(' ')[2]}" for old, new in pairs if old != new)


def in_order(seconds: Mapping[str, float]) -> list[str]:
    """The parts of a transition's time in the order of their happening; unknown ones last."""
    return [part for part in PARTS if part in seconds] + sorted(set(seconds) - set(PARTS))


def bytes_text(count_bytes: float) -> str:
    """A count of bytes for people: `512 B`, `3.4 MB` (powers of 1000)."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count_bytes >= factor:
            return f"{count_bytes / factor:.1f} {unit}"
    return f"{count_bytes:.0f} B"
