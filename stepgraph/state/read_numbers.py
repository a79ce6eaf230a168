"""Numbers of optimizers that a step's own code reads: a learning rate in the loss, in the result, in a decay by hand.

An optimizer between graphs reads its numbers at each step, and they are live. But where the step itself reads
`optimizer.param_groups[0]["lr"]` or `scheduler.get_last_lr()`, the number is baked into the graph beside it. Nearly no
step does, and a schedule must not disturb the others, so it is found out: while a step is recorded, optimizers between
graphs do not run, and whoever reads a number of theirs then is the step. What was read is watched from then on.
"""

from __future__ import annotations

import contextlib
import functools
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stepgraph.state.patch import shadowed

Reads = dict[tuple[str, int], Callable[[], Any]]
"""What a step has read, by the name that it is told by and the owner's id, and how to read it again."""


class ReadNumbers:
    """Notes which numbers are read from optimizers and schedulers."""

    def __init__(self) -> None:
        self.found: Reads = {}

    @contextlib.contextmanager
    def noting(self, objects: Iterable[Any]) -> Iterator[None]:
        """While recording: note what is read from these objects, as far as they are optimizers and schedulers."""
        with contextlib.ExitStack() as stack:
            for value in objects:
                if isinstance(value, Optimizer):
                    groups = [_NotingGroup(value, i, self.found) for i in range(len(value.param_groups))]
                    stack.enter_context(shadowed(value, "param_groups", groups))
                elif isinstance(value, LRScheduler):
                    stack.enter_context(shadowed(value, "get_last_lr", functools.partial(self._last_lr, value)))
            yield

    def _last_lr(self, scheduler: LRScheduler) -> Any:
        self.found[f"{type(scheduler).__name__}.get_last_lr()", id(scheduler)] = lambda: tuple(scheduler._last_lr)
        return scheduler._last_lr


class _NotingGroup(UserDict[str, Any]):
    """A parameter group that notes which of its numbers are read; its parameters are anyone's."""

    def __init__(self, optimizer: Optimizer, index: int, found: Reads) -> None:
        self.data = optimizer.param_groups[index]
        self._optimizer, self._index, self._found = optimizer, index, found

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        if key != "params":
            name = f"{type(self._optimizer).__name__}.param_groups[{self._index}][{key!r}]"
            self._found[name, id(self._optimizer)] = functools.partial(_number, self._optimizer, self._index, key)
        return value


def _number(optimizer: Optimizer, index: int, key: str) -> Any:
    value = optimizer.param_groups[index][key]
    return tuple(value) if isinstance(value, list) else value
