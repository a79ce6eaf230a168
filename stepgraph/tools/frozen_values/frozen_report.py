"""What `stepgraph.frozen` reports: each value, its state, and where it enters. Imports no torch."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["Entry", "FrozenReport", "FrozenValue", "State"]

_SHOWN = 3
"""Most entries of a value in the table."""
_NOTHING = "no values in reach"
_LIMIT = "What the watch does not reach (docs/limits.md) was not moved."
_MAX_ROWS = 5
"""Rows of values that were not moved, and of those without effect."""


class State(enum.Enum):
    """What a graph does with a value."""

    BAKED = "baked"
    """It is in the graph, and nothing notices a change at the next call."""
    UNKNOWN = "unknown"
    """It could not be found out."""
    WATCHED = "watched"
    """It is in the graph, and a change is noticed before the next replay."""
    LIVE = "live"
    """Each replay reads it."""
    TENSOR = "a tensor"
    """It is in the device's memory: each replay reads it."""
    FIXED = "not moved"
    """It cannot be given another value."""
    NO_EFFECT = "no effect"
    """The graph does not depend on it, as far as it was moved."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A place where a value enters the graph."""

    operation: str
    """An operation of torch, or a node of the graph."""
    file: str | None
    line: int | None
    before: str
    now: str

    def __str__(self) -> str:
        at = "" if self.file is None else f" at {_shortened(self.file)}:{self.line}"
        return f"{self.operation}{at}"


@dataclass(frozen=True, slots=True)
class FrozenValue:
    """One value: what it is, what it was moved to, where it enters, and what the graph does with it."""

    name: str
    value: str
    moved_to: str
    state: State
    reason: str
    entries: tuple[Entry, ...] = ()
    nodes: tuple[str, ...] = ()
    """On CUDA: the nodes and parameter bytes that differ."""

    @property
    def is_finding(self) -> bool:
        return self.state in (State.BAKED, State.UNKNOWN)


@dataclass(frozen=True, slots=True)
class FrozenReport:
    """The values that a step's graph depends on. `print(report)` shows a table, `to_dict()` is for machines."""

    step: str
    backend: str
    values: tuple[FrozenValue, ...]
    recordings: int
    """How often the step was recorded."""
    compared: str
    """What was compared: `operations`, or `operations and nodes`."""
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[FrozenValue, ...]:
        """The values that are in the graph and not watched, and those that could not be judged."""
        return tuple(value for value in self.values if value.is_finding)

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        baked = [value.name for value in self.values if value.state is State.BAKED]
        unknown = [value.name for value in self.values if value.state is State.UNKNOWN]
        if baked:
            return f"{self.step}: baked in and not watched: {', '.join(baked)}"
        if unknown:
            return f"{self.step}: not judged: {', '.join(unknown)}"
        counts = [f"{sum(v.state is state for v in self.values)} {state.value}" for state in State]
        found = ", ".join(count for count in counts if not count.startswith("0 "))
        return f"{self.step}: " + (f"no value in reach is baked in unwatched ({found})" if found else _NOTHING)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = [asdict(value) | {"state": value.state.value} for value in self.values]
        fields = {name: getattr(self, name) for name in ("step", "backend", "recordings", "compared", "verdict")}
        return {**fields, "values": values, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FrozenReport:
        """Make a report of what `to_dict` returned, also after it was JSON."""
        read = [
            FrozenValue(
                **{name: value[name] for name in ("name", "value", "moved_to", "reason")},
                state=State(value["state"]),
                entries=tuple(Entry(**entry) for entry in value["entries"]),
                nodes=tuple(value["nodes"]),
            )
            for value in values["values"]
        ]
        fields = {name: values[name] for name in ("step", "backend", "recordings", "compared")}
        return cls(**fields, values=tuple(read), notes=tuple(values["notes"]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.verdict, style="bold")
        table = Table(title=f"{self.step} on {self.backend}", title_justify="left")
        table.add_column("value", overflow="fold", ratio=2)
        table.add_column("state", no_wrap=True)
        table.add_column("where it enters, and what a change does", overflow="fold", ratio=3)
        fixed = [value for value in self.values if value.state is State.FIXED]
        idle = [value for value in self.values if value.state is State.NO_EFFECT]
        left = [*fixed[_MAX_ROWS:], *idle[_MAX_ROWS:]]
        for value in (value for value in self.values if value not in left):
            color = "red" if value.is_finding else "green" if value.state is State.WATCHED else ""
            named = f"{value.name} = {value.value}" if value.value else value.name
            lines = [*_shown_entries(value), value.reason]
            table.add_row(Text(named), Text(value.state.value, style=color), Text("\n".join(lines)))
        if table.row_count:
            yield table
        for what, values in (("Not moved", fixed), ("Without effect", idle)):
            if len(values) > _MAX_ROWS:
                yield Text(f"{what}, too: {', '.join(value.name for value in values[_MAX_ROWS:])}")
        times = "once" if self.recordings == 1 else f"{self.recordings} times"
        yield Text(f"Recorded {times}; {self.compared} were compared. {_LIMIT}")
        for note in self.notes:
            yield Text(note)

    def __str__(self) -> str:
        from stepgraph.engine.call.report import render  # which imports torch

        return render(self)


def _shown_entries(value: FrozenValue) -> list[str]:
    shown = [str(entry) for entry in value.entries[:_SHOWN]]
    left = len(value.entries) - len(shown)
    return [*shown, *([f"and {left} more places"] if left else [])]


def _shortened(file: str) -> str:
    """A path as short as it can be from the current directory."""
    try:
        relative = os.path.relpath(file)
    except ValueError:
        return file
    return relative if len(relative) < len(file) else file
