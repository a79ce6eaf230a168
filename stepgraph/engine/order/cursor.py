"""A `Cursor` knows whose turn it is in a fixed order, and refuses any other call before it overwrites anything.

Graphs that share memory by their order are right in that order only, so each replay takes its turn first. After the
last turn a new round begins. A new round also begins after one that was given up: nothing of it is under way, and the
first turn is taken. A refused call changes nothing: the turn that was expected can still be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from stepgraph.core.errors import CaptureError
from stepgraph.engine.order.validate import point_at


@dataclass(frozen=True, slots=True)
class Turn:
    """One call in an order."""

    key: Hashable
    """Calls are compared by it. Several turns may have the same key."""
    name: str
    """The call in messages, without an article."""
    entry: int | None
    """The index of the entry that the call belongs to; None if there is none."""
    any_order: bool = False
    """Whether the neighbours of the same entry that have this flag too may come in any order."""
    repeats: bool = False
    """Whether the call may come again in the same round."""


class Cursor:
    """The position in an order.

    `fix` is the last line of the error. `order` are the numbers that the error shows. `is_under_way` says whether
    something of the round may still be needed; without it only `begin` gives a round up.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        fix: str,
        order: Sequence[float] = (),
        is_under_way: Callable[[], bool] = lambda: True,
    ) -> None:
        self._turns, self._fix, self._order = list(turns), fix, order
        self._is_under_way = is_under_way
        self._next = 0
        """The index of the next turn; after the last one the number of turns, until the next round begins."""
        self._passed_over: set[Hashable] = set()

    @property
    def is_at_start(self) -> bool:
        """Whether a round begins."""
        return self._next in (0, len(self._turns))

    @property
    def num_entries(self) -> int:
        return len(self._order) or len({turn.entry for turn in self._turns} - {None})

    def begin(self) -> None:
        """Begin a round, whether or not the last one came to its end."""
        self._next = 0
        self._passed_over.clear()

    def take(self, key: Hashable) -> int:
        """Take the turn of a call, and return its index; raise if it is another call's turn."""
        index = 0 if self._next == len(self._turns) else self._next
        if self._turns[index].key != key:
            repeated = self._repeated(key)
            if repeated is not None:
                return repeated
            if not self._bring_forward(key, index):
                if self._turns[0].key != key or self._is_under_way():
                    raise self._refused(key, self._turns[index])
                self.begin()  # the last round was given up
                index = 0
        self._next = index + 1
        if self._passed_over:
            self._go_past()
        return index

    def pass_over(self, key: Hashable) -> None:
        """A call will not come in this round."""
        self._passed_over.add(key)
        self._go_past()

    def _go_past(self) -> None:
        while self._next < len(self._turns) and self._turns[self._next].key in self._passed_over:
            self._next += 1
        if self._next == len(self._turns):
            self._passed_over.clear()

    def _repeated(self, key: Hashable) -> int | None:
        for index, turn in enumerate(self._turns[: self._next]):
            if turn.repeats and turn.key == key:
                return index
        return None

    def _bring_forward(self, key: Hashable, index: int) -> bool:
        """Exchange the turn at `index` for a later one, where their order is free, in this round and in later ones."""
        expected = self._turns[index]
        for later in range(index + 1, len(self._turns)):
            turn = self._turns[later]
            if not (expected.any_order and turn.any_order and turn.entry == expected.entry):
                return False
            if turn.key == key:
                self._turns[index], self._turns[later] = turn, expected
                return True
        return False

    def _refused(self, key: Hashable, expected: Turn) -> CaptureError:
        names = (turn.name for turn in self._turns if turn.key == key)
        received = next(names, f"{key}, which the order does not have")
        wanted, entry = expected.name, expected.entry
        if entry is not None:
            wanted = f"entry {entry} of {self.num_entries}: {wanted}"
        shown = (f"expected  {wanted}",) if entry is None or not self._order else point_at(self._order, entry, wanted)
        return CaptureError(
            f"the {received} is out of order",
            rule="replay-order",
            details=[*shown, f"received  {received}"],
            why="the graphs share memory by the order in which they were captured.",
            fix=self._fix,
        )
