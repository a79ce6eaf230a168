"""Host values that a step reads: noted at capture, compared at replay, never silently frozen.

Python runs only when a step is recorded. A loss weight in a closure, a temperature in a global, a flag on `self` are
read once and are constants from then on. So every number, boolean and string that the step's code can name is noted
when it is captured (closure cells, defaults, the globals its code names, the bound object, and one level into objects,
dicts, lists and dataclasses found there; the functions it calls, too), and so is which tensor, function or object each
name stands for. `watch_find` does the finding.

Reading them again at each replay must cost next to nothing: what it comes down to is a row of identities, which is run
through in C. Only where that row finds something touched is it asked what, and whether it matters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from stepgraph.native.row import GuardRow
from stepgraph.ran import ExecutedCode
from stepgraph.values.watch_find import Finder
from stepgraph.values.watch_followed import Reconsider
from stepgraph.values.watch_parts import Part, Reading
from stepgraph.values.watch_source import Source
from stepgraph.values.watch_telling import Change, Label, told
from stepgraph.values.watch_values import token

__all__ = ["Change", "Watch"]


class Watch:
    """The watched values of one step, as they were when it was made."""

    def __init__(
        self,
        function: Callable[..., Any],
        ignore: Collection[str] = (),
        modules: Mapping[str, torch.nn.Module] | None = None,
        read: Mapping[tuple[str, int], Callable[[], Any]] | None = None,
        eager: Iterable[Any] = (),
        ran: ExecutedCode | None = None,
    ) -> None:
        """`read` are numbers that it was seen to read, `eager` the optimizers that run at each replay.

        `ran` is the code that it was seen to run.
        """
        finder = _search(function, modules or {}, ignore, [id(value) for value in eager], ran or ExecutedCode())
        self._sources = finder.sources
        self._parts: list[Part] = finder.notes.parts
        for (name, _), reader in (read or {}).items():
            if name not in ignore:
                value = reader()
                if isinstance(value, torch.Tensor):
                    finder.notes.place(Label(name), value)
                self._parts.append(Reading(name, functools.partial(_token, reader), functools.partial(_told, reader)))
        self._row = self._new_row()

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def changed(self) -> list[Change]:
        """What is not as it was; empty in next to no time when nothing was touched."""
        if self._row.holds():
            return []
        found = [change for part in self._parts for change in part.changes()]
        if not found:  # another object, and the same to the step: know it the next time
            for part in self._parts:
                part.renew()
            self._row = self._new_row()
        return found

    def expect(self, row: GuardRow) -> None:
        """What `changed` comes down to."""
        for part in self._parts:
            part.expect(row)

    def drawn(self) -> list[Source]:
        """What was drawn from since: iterators and random generators of the step's own."""
        return [s for s in self._sources if s.is_seen and s.was_drawn_from()]

    def unseen(self) -> list[Source]:
        """The iterators that a variable of the step stands for and that do not tell where they are."""
        return [s for s in self._sources if not s.is_seen and s.name.isidentifier()]

    def _new_row(self) -> GuardRow:
        row = GuardRow()
        self.expect(row)
        return row


def _search(
    function: Callable[..., Any],
    modules: Mapping[str, torch.nn.Module],
    ignore: Collection[str],
    eager: Collection[int],
    ran: ExecutedCode,
) -> Finder:
    while True:  # at most twice more
        finder = Finder(ignore, eager, ran)
        with contextlib.suppress(Reconsider):
            finder.find(function, modules)
            return finder


def _token(reader: Callable[[], Any]) -> Any:
    return token(reader())


def _told(reader: Callable[[], Any]) -> str:
    return told(reader())
