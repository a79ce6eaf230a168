"""`Turns` checks each replay against the order in which the graphs were captured.

Graphs that share memory by an order are right in that order only. A call that is not what comes next is refused before
it overwrites anything, with the entry that was expected. The layers of a chunk come one after the other, in a backward
from the last to the first; their weight gradients may come in any order within an entry. After the last entry the order
begins again, and so it does where a round was given up: nothing is under way, and the first forward is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepgraph.errors import CaptureError
from stepgraph.order import Entry, Kind
from stepgraph.order.validate import point_at


@dataclass(frozen=True, slots=True)
class Turn:
    """One layer's part of an entry."""

    place: int
    """The index of the entry in the order."""
    entry: Entry
    layer: int
    sample: int
    name: str

    def __str__(self) -> str:
        return f"the {self.entry}, layer {self.layer} (sample {self.sample}: {self.name})"


class Turns:
    """Where a round stands."""

    def __init__(
        self, order: Sequence[float], turns: Sequence[Turn], is_under_way: Callable[[], bool], *, repeats: bool
    ) -> None:
        self._order, self._turns, self._is_under_way = order, list(turns), is_under_way
        self._repeats = repeats
        """Whether a backward may come again in the same round (retain_graph)."""
        self._next = 0
        self._done: set[tuple[Kind, int]] = set()
        """The backwards of this round, where they may come again."""
        self._passed_over: set[int] = set()
        """Samples whose backward will not come in this round."""

    @property
    def is_at_start(self) -> bool:
        """Whether a round begins."""
        return self._next == 0

    @property
    def expected(self) -> Turn:
        """What comes next."""
        return self._turns[self._next]

    def pass_over(self, sample: int) -> None:
        """A forward whose turn it was runs without its graphs: no backward of theirs will come."""
        self._passed_over.add(sample)

    def take(self, kind: Kind, sample: int) -> None:
        """The turn of a graph; raises if it is another one's."""
        if self._passed_over:
            self._go_past()
        if not self._is_next(kind, sample):
            if (kind, sample) in self._done:
                return
            first = self._turns[0]
            restarts = kind is Kind.FORWARD and first.sample == sample and not self._is_under_way()
            if not restarts:
                raise self._refused(kind, sample)
            self._next = 0  # the last round was given up
        if self._repeats:
            if self._next == 0:
                self._done.clear()
            elif kind in _BACKWARDS:
                self._done.add((kind, sample))
        self._next = (self._next + 1) % len(self._turns)

    def _go_past(self) -> None:
        for _ in self._turns:
            turn = self.expected
            if turn.sample not in self._passed_over:
                return
            if turn.entry.kind is Kind.FORWARD:  # of the next round
                self._passed_over.discard(turn.sample)
                return
            self._next = (self._next + 1) % len(self._turns)

    def _is_next(self, kind: Kind, sample: int) -> bool:
        expected = self.expected
        if expected.entry.kind is not kind:
            return False
        if expected.sample == sample:
            return True
        if kind is not Kind.WEIGHT_GRAD:
            return False
        for index in range(self._next + 1, len(self._turns)):
            turn = self._turns[index]
            if turn.place != expected.place:
                return False
            if turn.sample == sample:  # any order within the entry: this one comes first, now and later
                self._turns[self._next], self._turns[index] = turn, expected
                return True
        return False

    def _refused(self, kind: Kind, sample: int) -> CaptureError:
        own = next((turn for turn in self._turns if turn.sample == sample and turn.entry.kind is kind), None)
        received = str(own) if own is not None else f"a {kind.value} of sample {sample}, which the order has not"
        expected = f"entry {self.expected.place} of {len(self._order)}: {self.expected}"
        return CaptureError(
            f"{received}, is out of order",
            rule="replay-order",
            details=[*point_at(self._order, self.expected.place, expected), f"received  {received}"],
            why="the graphs share memory by the order that they were captured in.",
            fix="call the graphed callables in that order, or capture them with the order that you run.",
        )


_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)
