"""A `PairSession` holds the state that graphed pairs of one model share: pool lanes, gradients, process events."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.engine.backends import Backend
from stepgraph.engine.call.backend_choice import backend_of
from stepgraph.engine.call.report import backend_name
from stepgraph.engine.call.session import Session
from stepgraph.engine.grads.param_grads import ParamGrads
from stepgraph.engine.guards.registration import RegistrationEvents
from stepgraph.engine.guards.signature import AmbientReader
from stepgraph.engine.observe.finder import devices
from stepgraph.engine.record.pair.eager_proof import AuditTurns, PairLogs
from stepgraph.engine.record.pair.kind import CallKind, equality
from stepgraph.engine.record.pair.lanes import PoolLanes
from stepgraph.engine.record.pair.partial import CallsInFlight
from stepgraph.engine.record.pair.waiting import WaitingCalls

_LIVE: weakref.WeakSet[PairSession] = weakref.WeakSet()
"""For the public functions without arguments, which Megatron's loops call."""


def live_sessions() -> Iterator[PairSession]:
    """All sessions that are alive in the process."""
    return iter(list(_LIVE))


class PairSession:
    """The state that pairs of one model share."""

    def __init__(self, session: Session | None = None, delete_graphs: Callable[[], None] | None = None) -> None:
        """`delete_graphs` frees all graphs, and forgets the facts learnt for them."""
        self.session = session if session is not None else Session()
        self._owns_session = session is None
        self.lanes: PoolLanes = PoolLanes(self.session.lane_numbers)
        self.events = RegistrationEvents()
        self.ambient = AmbientReader()
        self.grads = ParamGrads()
        self.logs = PairLogs()
        self.in_flight = CallsInFlight()
        self.returned = WeakTensorKeyDictionary()
        """Parameters and other leaves that calls have returned themselves."""
        self.waiting = WaitingCalls()
        self.turns = AuditTurns("auto")
        self.capture_seconds = 0.0
        self._delete_graphs = delete_graphs
        self._warming = 0
        self.is_closed = False
        _LIVE.add(self)

    def backend_for(self, *values: Any) -> Backend:
        """The backend, chosen by the device of the first call's modules and tensors."""
        if not self.session.has_backend:
            self.session.settle(backend_of(devices(values)))
        return self.session.backend

    def note_returned(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Remember leaves that a call has returned. Return True if a graph accumulates the gradient of one of them.

        Autograd accumulates it from now on, since it must add up all uses, inside and outside, in eager's order.
        """
        new = [tensor for tensor in tensors if tensor not in self.returned]
        for tensor in new:
            self.returned[tensor] = None
        return any(self.grads.knows(tensor) for tensor in new)

    def begins_audit(self) -> bool:
        """Begin a round. Return True if it is audited first; other uses of parameters are looked for in it, too."""
        is_due = self.turns.begin()
        if is_due:
            self.grads.other_uses.ask_again()
        return is_due

    def facts(self, kinds: Collection[CallKind], static_bytes: int) -> dict[str, Any]:
        """Return the part of a report that all engines share; `kinds` of calls have graphs."""
        return {
            "backend": backend_name(self.session),
            "capture_seconds": self.capture_seconds,
            "pool_bytes": self.session.pool_bytes(),
            "static_bytes": static_bytes,
            "audits": self.turns.audits,
            "equality": equality(kinds, self.turns.audits),
        }

    @property
    def is_warming(self) -> bool:
        """True if a call runs eagerly to warm up, or waits for the backward of such a run."""
        return self._warming > 0 or bool(self.waiting)

    def warming(self, run: Callable[[], Any]) -> Any:
        """Run an eager call of the warm-up."""
        self._warming += 1
        try:
            return run()
        finally:
            self._warming -= 1

    def delete_cuda_graphs(self) -> None:
        """Free all graphs; calls warm up and are captured again, as at first."""
        if self._delete_graphs is not None:
            self._delete_graphs()
            self.returned = WeakTensorKeyDictionary()
            self.grads.other_uses.forget()
        self.in_flight.end()

    def close(self) -> None:
        """Free all graphs; calls run eagerly from now on."""
        if not self.is_closed:
            self.delete_cuda_graphs()
            self.is_closed = True
            self.events.close()
            if self._owns_session:
                self.session.close()
