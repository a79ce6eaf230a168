"""Room for a larger signature: the graphs of smaller ones go first, and are recorded again in its memory.

Graphs of a session lie in one pool. A smaller one fits into what a larger one has left free, but a larger one not into
what several smaller have: torch's allocator does not join blocks of different segments, and eight sequence lengths,
shortest first, would take nearly three times the longest. So when a signature comes that is larger than all before,
what is there is dropped, and the pool with it. The others are captured again when they come back, without warm-up,
and use the memory of the larger one.

Eager warm-up uses the pool, too, as long as there is no graph in it, and would leave the same there. torch frees what a
pool has unused only when the pool goes, so that a step might run out of memory where eager code does not: there is a
new pool for the first call of a larger signature, and before the first capture after several have warmed up.

Where memory is no matter, or others' graphs lie in the pool, nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from stepgraph.session.session import Session
from stepgraph.step.chain import GraphLink
from stepgraph.step.site import Site

REASON = "made room for a larger signature"
_WORTH_BYTES = 256 << 20
"""A pool that is not worth the time."""


class PoolEviction:
    """Knows the largest signatures that a step has warmed up with and was captured for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._warmed = self._captured = 0

    def before_warm_up(self, leaves: Sequence[Any], sites: Collection[Site]) -> None:
        """Before an eager call with these leaves, of one of several signatures."""
        size = _bytes_of(leaves)
        is_largest, self._warmed = size > self._warmed, max(size, self._warmed)
        if is_largest and len(sites) > 1 and self._is_worth_it(graphs=0):
            self._session.workspace.renew()

    def before_capture(self, leaves: Sequence[Any], sites: Collection[Site]) -> int:
        """Before a capture for these leaves. Returns how many graphs have made room."""
        calls = [call for site in sites for call in site.calls]
        size, largest = _bytes_of(leaves), max((_bytes_of(call.inputs.leaves) for call in calls), default=0)
        is_largest, self._captured = size > max(largest, self._captured), max(size, self._captured)
        graphs = sum(isinstance(link, GraphLink) for call in calls for link in call.chain.links)
        if not (is_largest if calls else len(sites) > 1) or not self._is_worth_it(graphs=graphs):
            return 0
        for site in sites:
            site.drop_graphs()
        self._session.workspace.renew()
        return len(calls)

    def _is_worth_it(self, *, graphs: int) -> bool:
        """Whether there is much memory, and there are no graphs in it but so many of the step's own."""
        return self._session.num_graphs == graphs and self._session.pool_bytes() >= _WORTH_BYTES


def _bytes_of(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
