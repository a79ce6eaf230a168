"""`WaitingCalls` notes, for eager calls, which of their results get gradients in the backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from stepgraph.engine.guards.signature import ambient_key
from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.record.pair.call import EagerCall


class WaitingCall:
    """A call whose backward has not run. Without a backward it dies with its autograd graph."""

    __slots__ = ("__weakref__", "call", "then")

    def __init__(self, call: EagerCall, then: Callable[[WaitingCall], None]) -> None:
        self.call, self.then = call, then


class WaitingCalls:
    """The eager calls of one session that wait for their backward."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[WaitingCall] = weakref.WeakSet()
        self._task = -1
        """The last backward that reached one of them."""

    def __bool__(self) -> bool:
        """True if a call waits, or the calling thread runs a backward that reached one."""
        return bool(self._calls) or (self._task != -1 and self._task == torch._C._current_graph_task_id())

    def add(
        self,
        call: EagerCall,
        results: Sequence[torch.Tensor],
        then: Callable[[WaitingCall], None] = lambda waiting: None,
    ) -> WaitingCall:
        """Note the gradients of these results; `then` is called at the first one."""
        waiting = WaitingCall(call, then)
        self._calls.add(waiting)
        for index, tensor in enumerate(results):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(functools.partial(self._saw_grad, waiting, index))
        return waiting

    def clear(self) -> None:
        """Forget all of them."""
        self._calls.clear()

    def _saw_grad(self, waiting: WaitingCall, index: int, grad: torch.Tensor) -> None:
        if waiting in self._calls:
            self._calls.discard(waiting)
            self._task = torch._C._current_graph_task_id()
            waiting.call.backward_ambient = ambient_key()
            waiting.then(waiting)
        waiting.call.grads[index] = ArgMetadata(grad)
