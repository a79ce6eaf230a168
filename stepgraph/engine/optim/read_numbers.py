"""Finds the numbers of optimizers that a step's own code reads, such as a learning rate in the loss.

An optimizer between graphs reads its numbers and its state at each step, so they are live. But where the step itself
reads `optimizer.param_groups[0]["lr"]` or `scheduler.get_last_lr()`, the number is baked into the graph, and of
`optimizer.state` the address. While a step is recorded, optimizers between graphs do not run, so whoever reads a number
or state of theirs then is the step. What was read is watched from then on.

A number that the step writes would be written at the capture and never again. That is refused. State that the step
takes out of an optimizer (`optimizer.state.clear()`) is a cut: it is taken out between graphs, at each replay.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import CaptureError
from stepgraph.engine.oplog import current_log
from stepgraph.engine.oplog.optimizer_steps import shadowed
from stepgraph.engine.optim.effects import OptimizerEffects
from stepgraph.engine.optim.optimizer import Cut

Reads = dict[tuple[str, int], Callable[[], Any]]
"""The numbers that a step has read, by name and the owner's id, and how to read each again."""


class ReadNumbers:
    """Notes the numbers that are read from optimizers and schedulers."""

    def __init__(self) -> None:
        self.found: Reads = {}
        self.states: dict[int, Optimizer] = {}
        """Optimizers whose state was read, by id."""

    def imitate(self, effects: OptimizerEffects, optimizer: Optimizer) -> Any:
        """In a recording, in the place of the optimizer's step: leave what it leaves, its state in the view too."""
        if isinstance(optimizer.state, _NotingState):
            optimizer.state.fill(effects.with_state(optimizer))
        result, log = effects.imitate(optimizer), current_log()
        if log is not None:
            log.effects.forgive(optimizer)
        return result

    @contextlib.contextmanager
    def noting(self, objects: Iterable[Any], cut: Cut, running: Sequence[Optimizer] = ()) -> Iterator[None]:
        """While recording: note what is read from the optimizers and schedulers among these objects.

        Optimizers that are `running` meanwhile read their own numbers, as do others that share groups with them. Each
        change of the others' state is a `cut`.
        """
        seen = {id(optimizer.param_groups) for optimizer in running}
        with contextlib.ExitStack() as stack:
            for value in objects:
                if issubclass(type(value), Optimizer) and id(value.param_groups) not in seen:
                    seen.add(id(value.param_groups))
                    groups = [_NotingGroup(value, i, self.found) for i in range(len(value.param_groups))]
                    stack.enter_context(_exchanged(value.param_groups, groups))
                    stack.enter_context(shadowed(value, "state", _NotingState(value, self.states, cut)))
                elif issubclass(type(value), LRScheduler):
                    stack.enter_context(shadowed(value, "get_last_lr", functools.partial(self._last_lr, value)))
            yield

    def _last_lr(self, scheduler: LRScheduler) -> Any:
        self.found[f"{type(scheduler).__name__}.get_last_lr()", id(scheduler)] = lambda: tuple(scheduler._last_lr)
        return scheduler._last_lr


@contextlib.contextmanager
def _exchanged(items: list[Any], others: list[Any]) -> Iterator[None]:
    """Put others into the same list, and put its own items back at the end."""
    before = list(items)
    items[:] = others
    try:
        yield
    finally:
        items[:] = before


class _NotingGroup(dict[str, Any]):
    """A parameter group that notes which of its numbers are read; parameters are not noted.

    It is a dictionary, because code may ask for one, and an empty one, so that nobody reads past the notes.
    """

    def __init__(self, optimizer: Optimizer, index: int, found: Reads) -> None:
        super().__init__()
        self._group = optimizer.param_groups[index]
        self._optimizer, self._index, self._found = optimizer, index, found

    def __getitem__(self, key: str) -> Any:
        value = self._group[key]
        if key != "params":
            name = _spell(self._optimizer, self._index, key)
            self._found[name, id(self._optimizer)] = functools.partial(_number, self._optimizer, self._index, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __contains__(self, key: object) -> bool:
        return key in self._group

    def keys(self) -> Any:
        return self._group.keys()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._group else default

    def items(self) -> Any:
        return ItemsView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        keys = [str(key) for key in (*args[:1], *kwargs) if isinstance(key, str)]
        raise _written(_spell(self._optimizer, self._index, keys[0] if keys else "..."))

    __setitem__ = __delitem__ = update = pop = popitem = clear = __ior__ = _refuse

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._group else self._refuse(key)


class _NotingState(dict[Any, Any]):
    """An optimizer's state that notes whether anything is read from it, and cuts the recording where it is changed."""

    def __init__(self, optimizer: Optimizer, found: dict[int, Optimizer], cut: Cut) -> None:
        super().__init__(optimizer.state)
        self._optimizer, self._found, self._cut = optimizer, found, cut

    def _note(self) -> None:
        self._found[id(self._optimizer)] = self._optimizer

    def __getitem__(self, key: Any) -> Any:
        self._note()
        return super().__getitem__(key)

    def __missing__(self, key: Any) -> Any:
        return super().setdefault(key, {})

    def get(self, key: Any, default: Any = None) -> Any:
        self._note()
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        self._note()
        return super().__iter__()

    def items(self) -> Any:
        self._note()
        return super().items()

    def values(self) -> Any:
        self._note()
        return super().values()

    def fill(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let these have state: the optimizer's step, which does not run now, makes it."""
        for parameter in parameters:
            super().setdefault(parameter, {})

    def _take_out(self, method: str, *args: Any) -> Any:
        optimizer = self._optimizer

        def between() -> None:
            with contextlib.suppress(KeyError):  # the recording has shown whether the step minds
                getattr(optimizer.state, method)(*args)

        self._cut(f"{type(optimizer).__name__}.state.{method}", between, None)
        return getattr(super(), method)(*args)

    def clear(self) -> None:
        self._take_out("clear")

    def pop(self, key: Any, *default: Any) -> Any:
        return self._take_out("pop", key, *default)

    def __delitem__(self, key: Any) -> None:
        self._take_out("__delitem__", key)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _written(f"{type(self._optimizer).__name__}.state")

    __setitem__ = update = popitem = setdefault = __ior__ = _refuse


@contextlib.contextmanager
def refusing_writes(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """While recording: refuse that the step writes a number of these optimizers, even the same one.

    They run meanwhile, so their groups stay. Each number is made an object of its own: if it is gone at the end, it was
    written.
    """
    groups = [(o, i, group) for o in optimizers for i, group in enumerate(o.param_groups)]
    before = [{k: v for k, v in group.items() if type(v) is float} for _, _, group in groups]
    marks = [{k: struct.unpack("d", struct.pack("d", v))[0] for k, v in numbers.items()} for numbers in before]
    for (_, _, group), marked in zip(groups, marks, strict=True):
        group.update(marked)
    written: str | None = None
    try:
        yield
        written = next(
            (
                _spell(optimizer, index, key)
                for (optimizer, index, group), marked in zip(groups, marks, strict=True)
                for key, mark in marked.items()
                if group.get(key) is not mark
            ),
            None,
        )
    finally:
        for (_, _, group), numbers in zip(groups, before, strict=True):
            group.update(numbers)
    if written is not None:
        raise _written(written)


def _spell(optimizer: Optimizer, index: int, key: str) -> str:
    return f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]"


def _written(name: str) -> CaptureError:
    return CaptureError(
        f"the step itself writes {name}",
        rule="host-value",
        why="Python code runs only at capture, not at replay: it would be written once.",
        fix="set it outside the step, before the call; optimizers take it from there.",
    )


def _number(optimizer: Optimizer, index: int, key: str) -> Any:
    value = optimizer.param_groups[index][key]
    return tuple(value) if isinstance(value, list) else value
