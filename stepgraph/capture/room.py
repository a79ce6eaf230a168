"""Room for a larger signature: the graphs of smaller ones go first, and are recorded again in its memory.

Graphs of a session lie in one pool. A smaller one fits into what a larger one has left free, but a larger one not into
what several smaller have: torch's allocator does not join blocks of different segments, and eight sequence lengths,
shortest first, would take nearly three times the longest. So when a signature comes that is larger than all before,
what is there is dropped, and the pool with it. The others are captured again when they come back, without warm-up,
and use the memory of the larger one. Eager warm-up leaves the same in the pool, if it was with several signatures, and
there is a new pool before the first of them is captured. Where memory is no matter, or others' graphs lie in the pool,
nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from stepgraph.capture.chain import GraphLink
from stepgraph.capture.session import Session
from stepgraph.capture.site import Site

REASON = "made room for a larger signature"
_WORTH_BYTES = 256 << 20
"""A pool that is not worth the time."""


class Room:
    """Knows the largest signature that a step was captured for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._largest = 0

    def make(self, leaves: Sequence[Any], sites: Collection[Site]) -> int:
        """Before a capture for these leaves: drop what is in its way. Returns how many graphs went."""
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
        is_largest, self._largest = size > self._largest, max(size, self._largest)
        calls = [call for site in sites for call in site.calls]
        own = sum(isinstance(link, GraphLink) for call in calls for link in call.chain.links)
        is_in_the_way = is_largest if calls else len(sites) > 1
        is_alone = own == self._session.num_graphs
        if not is_in_the_way or not is_alone or self._session.pool_bytes() < _WORTH_BYTES:
            return 0
        for site in sites:
            site.drop_graphs()
        self._session.workspace.renew()
        return len(calls)
