"""A single-pool round replays its graphs in the order in which they were recorded, and refuses any other order.

Graphs that share memory by lifetime are right in one order only. So each forward and backward asks for its turn first:
`ReplayOrder` knows what comes next, and refuses any other call before it overwrites anything. After the last entry the
order begins again. It also begins again after a round that was given up: nothing is under way, and the first entry is
called. `FixedRound` hands out the runner whose turn it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from stepgraph.errors import CaptureError
from stepgraph.modules.recorder import Event
from stepgraph.modules.site import ModuleSite
from stepgraph.pair.lanes import PoolLane
from stepgraph.pair.runner import Runner


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """A forward or a backward in the order."""

    module: str
    kind: Hashable
    """What tells this kind of call from others of the same module."""
    call: int
    """Which call of the round it belongs to."""
    backward: bool

    def __str__(self) -> str:
        return f"{'backward' if self.backward else 'forward'} of `{self.module}` (call {self.call})"


class ReplayOrder:
    """Where a round stands."""

    def __init__(self, entries: Sequence[ReplayEntry], is_under_way: Callable[[], bool]) -> None:
        self.entries = tuple(entries)
        self.kinds = frozenset(entry.kind for entry in entries)
        self._is_under_way = is_under_way
        self._next = 0

    @property
    def expected(self) -> ReplayEntry:
        """What comes next."""
        return self.entries[self._next]

    def take_forward(self, module: str, kind: Hashable) -> ReplayEntry:
        """The turn of a forward of this kind."""
        if not self._is_next(kind) and self._next and not self._is_under_way():
            self._next = 0  # the last round was given up
        if not self._is_next(kind):
            raise self._refused(f"a forward of `{module}`")
        return self._take()

    def take_backward(self, entry: ReplayEntry) -> None:
        """The turn of the backward of the call that an entry belongs to."""
        if not (self.expected.backward and self.expected.call == entry.call):
            raise self._refused(f"the backward of `{entry.module}` (call {entry.call})")
        self._take()

    def _is_next(self, kind: Hashable) -> bool:
        return not self.expected.backward and self.expected.kind == kind

    def _take(self) -> ReplayEntry:
        entry = self.expected
        self._next = (self._next + 1) % len(self.entries)
        return entry

    def _refused(self, received: str) -> CaptureError:
        return CaptureError(
            f"{received} is out of order",
            rule="replay-order",
            details=[
                f"expected  entry {self._next} of {len(self.entries)}: {self.expected}",
                f"received  {received}",
            ],
            why="with a single pool, calls share memory by the order in which they were recorded.",
            fix="keep to that order, call handle.reset() where the order changes for good, or leave "
            "cuda_graph_use_single_mempool=False: then any order is right.",
        )


class FixedRound:
    """The runners of a round, one for each call that was captured, by id of the recorded call."""

    def __init__(self, events: Sequence[Event], runners: Mapping[int, Runner | None], lane: PoolLane[Runner]) -> None:
        calls: dict[int, int] = {}
        entries = []
        self._runners: list[Runner] = []
        for event in events:
            runner = runners.get(id(event.call))
            if runner is None or (event.backward and not runner.backwards):
                continue
            if not event.backward:
                calls[id(event.call)] = len(self._runners)
                self._runners.append(runner)
            site = event.call.site
            entries.append(ReplayEntry(site.manager.name, site, calls[id(event.call)], event.backward))
        self._order = ReplayOrder(entries, lambda: lane.is_busy)
        self.kinds = self._order.kinds
        """The kinds of calls that have a turn; others are free."""
        for entry in entries:
            if entry.backward:
                self._runners[entry.call].take_turn = functools.partial(self._order.take_backward, entry)

    def __len__(self) -> int:
        return len(self._order.entries)

    def take_forward(self, module: str, site: ModuleSite) -> Runner:
        """The runner of the call whose turn it is; raises if that is another module's."""
        return self._runners[self._order.take_forward(module, site).call]

    def end(self) -> None:
        """The graphs are dropped; backwards of calls under way still run."""
        for runner in self._runners:
            runner.take_turn = None
