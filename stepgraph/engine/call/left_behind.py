"""What a call leaves behind besides the values that its operations compute: gradients, modes, state of optimizers.

A replay installs all of this, so it belongs to the comparison of recordings. At each event of a log, and at the end of
the call, it is written down: for each parameter with a gradient which tensor that is, so that gradients that were
cleared, swapped or shared show; each module whose mode has changed; what the step itself has taken out of the state of
an optimizer. What an optimizer's own step does to its state is no effect of the step, since it
may run between graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.engine.observe.step_objects import StepObjects, numbered
from stepgraph.engine.oplog import Effects, OpLog


class LeftBehind(Effects):
    """The changes that one call has made to the objects it touches, since it began."""

    def __init__(self, touched: StepObjects, log: OpLog, arguments: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`arguments` are leaves of autograd among the call's arguments, with their names."""
        self._touched, self._log = touched, log
        self._modes = [(module, module.training) for module in touched.all_modules]
        self._grads: list[tuple[str, torch.Tensor, Callable[[], torch.Tensor | None]]] = []
        """Names, tensors, and weak references to the gradients that the call finds: a recording notes when they end."""
        taken: set[str] = set()
        for parameter in touched.all_parameters:
            name = numbered(touched.name(parameter), taken)
            taken.add(name)
            self._grads.append((f"{name}.grad", parameter, _weakly(parameter.grad)))
        self._grads += [(f"{name}.grad", leaf, _weakly(leaf.grad)) for name, leaf in arguments]
        self._states = {id(o): (o, _with_state(o)) for o in touched.all_optimizers}

    def forgive(self, optimizer: Optimizer) -> None:
        """Expect the state of an optimizer as it is now: its own step has run. One that the call made is let go."""
        if id(optimizer) in self._states:
            self._states[id(optimizer)] = optimizer, _with_state(optimizer)

    def now(self) -> Iterator[Any]:
        """Names and tensors of all that was changed so far; changes of an optimizer's state are given once."""
        for name, tensor, before in self._grads:
            grad = tensor.grad
            if grad is not None and grad is before() and not self._log.has_made(grad):
                yield f"{name} as found"
            elif grad is not None:
                yield name
                yield grad
        for module, mode in self._modes:
            if module.training != mode:
                yield f"{self._touched.name(module)}.training = {not mode}"
        for optimizer, known in list(self._states.values()):
            if lost := len(known - _with_state(optimizer)):
                yield f"{type(optimizer).__name__}.state: {lost} of {len(known)} gone"
                self.forgive(optimizer)


def _weakly(grad: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    return weakref.ref(grad) if grad is not None else _nothing


def _nothing() -> None:
    return None


def _with_state(optimizer: Optimizer) -> frozenset[int]:
    """The parameters that an optimizer has state of, by id."""
    return frozenset(map(id, dict.keys(optimizer.state)))  # past the subclass that notes reads
