"""A `PairSession` holds what the graphed pairs of one model share: pool lanes, gradients, events of the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.grads.param_grads import ParamGrads
from stepgraph.guards.registration import RegistrationEvents
from stepgraph.pair.lanes import PoolLanes
from stepgraph.pair.proof import PairLogs
from stepgraph.pair.runner import InFlightSet, Runner
from stepgraph.session.session import Session
from stepgraph.signature import AmbientReader

_LIVE: weakref.WeakSet[PairSession] = weakref.WeakSet()
"""For the public functions without arguments, which Megatron's loops call."""


def live_sessions() -> Iterator[PairSession]:
    """All that are alive in the process."""
    return iter(list(_LIVE))


class PairSession:
    """What pairs have in common, whoever captures them."""

    def __init__(self, session: Session | None = None) -> None:
        self.session = session if session is not None else Session()
        self._owns_session = session is None
        self.lanes: PoolLanes[Runner] = PoolLanes(self.session.lane_numbers)
        self.events = RegistrationEvents()
        self.ambient = AmbientReader()
        self.grads = ParamGrads()
        self.logs = PairLogs()
        self._in_flight: dict[int, InFlightSet] = {}
        self.returned = WeakTensorKeyDictionary()
        """Parameters and other leaves that calls were seen to return as such."""
        self._warming = 0
        self.is_closed = False
        _LIVE.add(self)

    def in_flight_of(self, module: torch.nn.Module) -> InFlightSet:
        """The calls under way that may add to the gradients of a module's parameters, whichever method was called."""
        return self._in_flight.setdefault(id(module), InFlightSet())

    @property
    def is_warming(self) -> bool:
        """Whether a call runs eagerly to warm up, or waits for the backward of such a run."""
        return self._warming > 0

    def warming(self, run: Callable[[], Any]) -> Any:
        """Run an eager call of the warm-up."""
        self._warming += 1
        try:
            return run()
        finally:
            self._warming -= 1

    def close(self) -> None:
        """End it; what is graphed goes on eagerly."""
        if not self.is_closed:
            self.is_closed = True
            self.events.close()
            if self._owns_session:
                self.session.close()
