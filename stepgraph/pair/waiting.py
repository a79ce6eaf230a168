"""`WaitingCalls` follows eager calls to their backward: it notes which results gradients come back to."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from stepgraph.buffers.inputs import ArgMetadata
from stepgraph.pair.call import EagerCall
from stepgraph.signature import ambient_key


class WaitingCall:
    """A call whose backward has not run; gone with the autograd graph that holds it, if it never does."""

    __slots__ = ("__weakref__", "call", "then")

    def __init__(self, call: EagerCall, then: Callable[[WaitingCall], None]) -> None:
        self.call, self.then = call, then


class WaitingCalls:
    """The eager calls of one session that wait for their backward."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[WaitingCall] = weakref.WeakSet()
        self._task = -1
        """The last backward that came to one of them."""

    def __bool__(self) -> bool:
        """Whether a call waits, or the calling thread runs a backward that came to one."""
        return bool(self._calls) or (self._task != -1 and self._task == torch._C._current_graph_task_id())

    def add(
        self,
        call: EagerCall,
        results: Sequence[torch.Tensor],
        then: Callable[[WaitingCall], None] = lambda waiting: None,
    ) -> WaitingCall:
        """Note the gradients that come back to these results; `then` is called when the first one does."""
        waiting = WaitingCall(call, then)
        self._calls.add(waiting)
        for index, tensor in enumerate(results):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(functools.partial(self._saw_grad, waiting, index))
        return waiting

    def clear(self) -> None:
        """Wait for none of them any longer."""
        self._calls.clear()

    def _saw_grad(self, waiting: WaitingCall, index: int, grad: torch.Tensor) -> None:
        if waiting in self._calls:
            self._calls.discard(waiting)
            self._task = torch._C._current_graph_task_id()
            waiting.call.backward_ambient = ambient_key()
            waiting.then(waiting)
        waiting.call.grads[index] = ArgMetadata.of(grad)
