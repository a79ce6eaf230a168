"""A round whose calls share memory by their order: which runner's turn it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from stepgraph.modules.recorder import Event
from stepgraph.modules.replay_order import ReplayEntry, ReplayOrder
from stepgraph.modules.site import ModuleSite
from stepgraph.pair.lanes import PoolLane
from stepgraph.pair.runner import Runner


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
