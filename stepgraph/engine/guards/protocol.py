"""The guard protocol: what a guard reports, and the one place that asks all guards of a graph.

A graph bakes in addresses, numbers, modules, hooks and host values. One guard watches each kind, and reports a change
with the remedy for it. A `GuardSet` asks all its guards, since several things may change between two calls, and reports
the changes with the heaviest remedy: a lighter one would leave a change unanswered that needs the heavier.

Nearly all calls find nothing changed. For these each guard also states its expectations as entries of one `GuardRow`,
which is checked in C (`FastCheck`). A row compares objects by identity, so it can fail although nothing changed. Then
the guards themselves are asked, and a new row is written if they find nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepgraph.engine.backends.native.row import GuardRow

_MAX_ROWS = 8
"""Rows that may be written in short succession."""
_ROW_PAYS_AFTER = 16
"""Calls after which another row is worth its cost."""


class Remedy(enum.Enum):
    """The answer to a change, from the heaviest to the lightest."""

    START_OVER = "run eagerly, then capture again"
    RECAPTURE = "record again"
    MOVE_OUT = "run the optimizer between graphs, and record again"
    AUDIT = "record again, and compare the operations"


_FROM_HEAVIEST = tuple(Remedy)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that a graph relies on has changed."""

    name: str
    before: str
    """Empty if `now` is the rest of a sentence: `layer.weight` "was replaced"."""
    now: str
    remedy: Remedy = Remedy.AUDIT
    is_users: bool = True
    """True if it belongs to the user's code, False for an installed library."""
    subject: Any = None
    """The optimizer to move out."""

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.now}" if self.before else f"{self.name} {self.now}"


class Guard(Protocol):
    """Compares one part of the program with what a graph was recorded with."""

    def changed(self) -> Sequence[Change]:
        """Return the changes since capture, all with the same remedy. Without changes this takes a few microseconds."""

    def expect(self, row: GuardRow) -> None:
        """Add the entries to a row that hold as long as `changed` is empty."""


class GuardSet:
    """The guards of one graph."""

    def __init__(self, guards: Iterable[Guard]) -> None:
        self.guards = tuple(guards)

    def changed(self) -> Sequence[Change]:
        """Ask all guards. Return the changes with the heaviest remedy."""
        found = [change for guard in self.guards for change in guard.changed()]
        if len(found) < 2:
            return found
        heaviest = min((change.remedy for change in found), key=_FROM_HEAVIEST.index)
        return [change for change in found if change.remedy is heaviest]

    def expect(self, row: GuardRow) -> None:
        """Add the entries of all guards to a row."""
        for guard in self.guards:
            guard.expect(row)


class FastCheck:
    """One row for all guards, written again when it is worth it."""

    __slots__ = ("_calls_at_last", "_left", "holds")

    def __init__(self) -> None:
        self.holds: Callable[[], bool] = bool
        """Checks the row; False is inconclusive."""
        self._left, self._calls_at_last = _MAX_ROWS, -_ROW_PAYS_AFTER

    def write(self, expect: Callable[[GuardRow], None], calls: int) -> None:
        """Write the row, after the guards have found nothing changed. `calls` counts the calls so far.

        Something that changes at each call is not worth a new row each time.
        """
        is_due = calls - self._calls_at_last >= _ROW_PAYS_AFTER
        if is_due or self._left:
            self._left -= not is_due
            self._calls_at_last = calls
            row = GuardRow()
            expect(row)
            self.holds = row.question()

    def drop(self) -> None:
        """Drop the row, which is out of date."""
        self.holds = bool


def told(changes: Iterable[Change]) -> str:
    """Describe changes in one line."""
    return "; ".join(map(str, changes))
