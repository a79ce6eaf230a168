"""Gradients that a module's backward graph accumulates by itself, at an address that the session keeps.

The graph adds to the buffer, as autograd's accumulators add to `.grad`. Where there was no gradient before, eager would
have put the new one there as it is; the buffer is filled with -0.0 for that, the one number that leaves every other
unchanged, bit for bit, when it is added to.

Autograd sums what several uses of a parameter contribute to one backward before it adds the sum to an old gradient.
Graphs that run one after the other would add to the old one each. Where the same backward will run another use, the old
gradient is put aside until the last of them, and added then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepgraph.state.grads import GradBuffers


class ParamGrads:
    """The gradient buffers of one module's parameters, for all graphs that add to them."""

    def __init__(self, buffers: GradBuffers) -> None:
        self._buffers = buffers
        self._task = -1
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def part(self, parameters: Sequence[torch.Tensor]) -> GradPart:
        """The parameters that one backward graph gives gradients to."""
        return GradPart(self, [(parameter, self._buffer(parameter)) for parameter in parameters])

    def _buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(parameter)
        if kept is None or kept.shape != parameter.shape or kept.dtype != parameter.dtype:
            kept = torch.empty_like(parameter, requires_grad=False)
            self._buffers.keep(parameter, kept)
        return kept

    def put_aside(self, task: int, buffers: Sequence[torch.Tensor]) -> None:
        """In a backward that adds several times: start a sum of its own."""
        if task != self._task:
            self.take_back()  # what a backward that ended in an error has left
            self._task = task
        fresh = [buffer for buffer in buffers if id(buffer) not in self._aside]
        if fresh:
            with torch.no_grad():
                self._aside.update({id(buffer): (buffer, buffer.clone()) for buffer in fresh})
                _fill_with_nothing(fresh)

    def take_back(self) -> None:
        """After the last addition: the old gradient, and the sum."""
        if self._aside:
            with torch.no_grad():
                buffers, old = zip(*self._aside.values(), strict=True)
                self._aside = {}
                torch._foreach_add_(old, buffers)
                torch._foreach_copy_(buffers, old)


class GradPart:
    """Parameters and their buffers, as one backward graph knows them."""

    def __init__(self, grads: ParamGrads, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._grads, self._pairs = grads, pairs
        self.buffers = [buffer for _, buffer in pairs]

    def attach(self) -> None:
        """Before a replay: `.grad` at its buffer, with what it was."""
        for parameter, buffer in self._pairs:
            if parameter.grad is not buffer:
                self._bring()
                return

    def _bring(self) -> None:
        empty = []
        with torch.no_grad():
            for parameter, buffer in self._pairs:
                grad = parameter.grad
                if grad is None:
                    empty.append(buffer)
                elif grad is not buffer:
                    buffer.copy_(grad)
                parameter.grad = buffer
            if empty:
                _fill_with_nothing(empty)

    def begin_sum(self, task: int) -> None:
        """More than one graph adds in this backward, and this is not the last."""
        self._grads.put_aside(task, self.buffers)

    def end_sum(self) -> None:
        """No further graph adds in this backward."""
        self._grads.take_back()


def _fill_with_nothing(buffers: Sequence[torch.Tensor]) -> None:
    torch._foreach_zero_(list(buffers))
    torch._foreach_neg_(list(buffers))
