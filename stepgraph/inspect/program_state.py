"""The state that a step may change, saved before it is called and restored afterwards.

To look at a step that has no graph yet, it has to be called: warm-up trains. So everything in its reach is saved: the
contents of tensors, gradients, the state and the numbers of optimizers, schedulers, scalers, modes, random states. It
is restored in place, in the same tensors. What was made meanwhile is taken away again. This takes as much memory as the
model and the optimizers' state. Host values are not saved: a step that changes one cannot be captured.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stepgraph.observe.finder import reachable
from stepgraph.observe.own_changes import ModelState

_STATEFUL = (LRScheduler, torch.amp.GradScaler)


@contextlib.contextmanager
def restored(step: Callable[..., Any], leaves: Sequence[Any]) -> Iterator[None]:
    """Restore the state of a step, and of the leaves of its arguments, at the end of the block, however it ends."""
    state = _State([*reachable(step), *leaves])
    try:
        yield
    finally:
        state.restore()


class _State:
    def __init__(self, objects: Sequence[Any]) -> None:
        roots = [value for value in objects if isinstance(value, torch.nn.Module)]
        modules = list({id(module): module for root in roots for module in root.modules()}.values())
        self._optimizers = [_OptimizerState(value) for value in objects if isinstance(value, Optimizer)]
        tensors = [value for value in objects if isinstance(value, torch.Tensor)]
        tensors += [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
        tensors += [tensor for optimizer in self._optimizers for tensor in optimizer.tensors()]
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
        self._model = ModelState(modules, [tensor for tensor in tensors if tensor.is_leaf])
        held = (*tensors, *(grad for _, grad in self._grads if grad is not None))
        with torch.no_grad():
            self._contents = [(tensor, tensor.detach().clone()) for tensor in held if _can_be_written(tensor)]
        self._others = [(value, _attributes(value)) for value in objects if isinstance(value, _STATEFUL)]
        self._generators = [(value, value.get_state()) for value in objects if isinstance(value, torch.Generator)]
        self._random = _random_states()

    def restore(self) -> None:
        self._model.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        for value, attributes in self._others:
            vars(value).clear()
            vars(value).update(attributes)
        for tensor, grad in self._grads:
            tensor.grad = grad
        with torch.no_grad():
            for tensor, content in self._contents:
                tensor.data.copy_(content)
        for generator, state in self._generators:
            generator.set_state(state)
        for restore in self._random:
            restore()


class _OptimizerState:
    """The entries of an optimizer's state, and its groups; the contents of tensors are kept elsewhere."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {key: dict(entries) for key, entries in optimizer.state.items() if isinstance(entries, dict)}
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, group in self._groups:
            yield from (value for value in (*group["params"], *group.values()) if isinstance(value, torch.Tensor))
        for entries in self._state.values():
            yield from (value for value in entries.values() if isinstance(value, torch.Tensor))

    def restore(self) -> None:
        state = self._optimizer.state
        for key in [key for key in state if key not in self._state]:
            del state[key]
        for key, entries in self._state.items():
            now = state.setdefault(key, {})
            now.clear()
            now.update(entries)
        for group, values in self._groups:
            group.clear()
            group.update(values)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of a scheduler or scaler; dicts among them are copied, because they are changed in place."""
    return {key: copy.copy(item) if isinstance(item, (dict, list)) else item for key, item in vars(value).items()}


def _random_states() -> list[Callable[[], Any]]:
    """Functions that restore the random generators of the process."""
    host, python = torch.get_rng_state(), random.getstate()
    found: list[Callable[[], Any]] = [lambda: torch.set_rng_state(host), lambda: random.setstate(python)]
    if torch.cuda.is_initialized():
        on_device = torch.cuda.get_rng_state_all()
        found.append(lambda: torch.cuda.set_rng_state_all(on_device))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        found.append(lambda: numpy.random.set_state(state))
    return found


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Check that a tensor has memory, and that no two of its elements share it: such a one is a view of another."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
