"""A step may change its model in ways that a graph does not record: other tensors, other modules, other flags.

A replay runs no Python. A buffer that the step puts in another's place (`self.mean = 0.9 * self.mean + ...`), data that
it gives a parameter (`p.data = p.data - lr * p.grad`), a flag that it leaves changed would stay those of the capture.
In-place changes are part of the graph. Modes are set again after each replay: a step that calls `model.train()` leaves
the model so, whatever its mode was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.plain_values import MISSING
from stepgraph.engine.guards.layout import change_of, layouts_of
from stepgraph.engine.guards.optimizer import NumbersGuard
from stepgraph.engine.observe.module_attributes import Slots


@dataclass(frozen=True, slots=True)
class OwnChange:
    """A change of a model."""

    what: str
    """The change in words."""
    name: str
    """The parameter, buffer or module, by its path."""
    key: int | None = None
    """The id of the tensor that was changed itself; None if something else is in its place now."""


class ModelState:
    """The parts of modules and parameters at one moment."""

    def __init__(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> None:
        self._slots = Slots(
            (module, where)
            for module in modules
            for where in (module._parameters, module._buffers, module._modules)
            if isinstance(where, dict)  # those of TorchScript's modules are not, and cannot be changed by Python
        )
        held = (t for _, _, kept in self._slots.kept for t in kept.values() if issubclass(type(t), torch.Tensor))
        tensors = {id(t): t for t in (*parameters, *held)}
        self._data = [(layout, layout[0].detach()) for layout in layouts_of(tensors.values())]
        self._flags = [(p, p.requires_grad) for p in parameters]
        self._modes = [(module, module.training) for module in modules]

    def changed(self, name: Callable[[Any], str]) -> str | None:
        """The first change since then, in words."""
        found = next(self.changes(name), None)
        return found.what if found is not None else None

    def changes(self, name: Callable[[Any], str]) -> Iterator[OwnChange]:
        """All changes since then."""
        for module, where, before in self._slots.kept:
            for key in {**before, **where}:
                if where.get(key, MISSING) is not before.get(key, MISSING):
                    path = f"{name(module)}.{key}"
                    yield OwnChange(f"puts something else in the place of `{path}`", path)
        for layout, _ in self._data:
            if change_of(layout) is not None:
                path = self._name(layout[0], name)
                yield OwnChange(f"gives `{path}` other data (`.data = ...`)", path, id(layout[0]))
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                path = self._name(parameter, name)
                what = f"leaves requires_grad of `{path}` {not flag}, and found it {flag}"
                yield OwnChange(what, path, id(parameter))

    def _name(self, tensor: torch.Tensor, name: Callable[[Any], str]) -> str:
        for module, _, before in self._slots.kept:
            for key, value in before.items():
                if value is tensor:
                    return f"{name(module)}.{key}"
        return name(tensor)

    def restore(self) -> None:
        self._slots.restore()
        for layout, data in self._data:
            if change_of(layout) is not None:
                layout[0].data = data
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        self.take_modes()

    def take_modes(self) -> list[tuple[torch.nn.Module, bool]]:
        """The modules whose mode has changed, and their modes; they are put back."""
        left = [(module, module.training) for module, mode in self._modes if module.training != mode]
        for module, mode in self._modes:
            module.training = mode
        return left


class OwnNumbers:
    """The numbers of optimizers that the step itself changes, in one eager call.

    An optimizer between graphs changes its own numbers in its own step at each replay, too.
    """

    def __init__(self, optimizers: Sequence[Optimizer], is_inside: Callable[[Optimizer], bool]) -> None:
        self._guards = {id(o): NumbersGuard(o) for o in optimizers}
        self._is_inside = is_inside
        self._changes: dict[int, str] = {}

    def begin(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._guards:
            self._guards[id(optimizer)] = NumbersGuard(optimizer)
        elif not self._is_inside(optimizer):
            self._note(id(optimizer))

    def end(self, optimizer: Optimizer) -> None:
        if not self._is_inside(optimizer):
            self._guards[id(optimizer)] = NumbersGuard(optimizer)

    def _note(self, key: int) -> None:
        for change in self._guards[key].changed():
            self._changes.setdefault(key, str(change))

    def changes(self) -> dict[int, str]:
        """The changes of each optimizer by the step so far, by id, in words."""
        for key in self._guards:
            self._note(key)
        return self._changes

    def finish(self) -> dict[int, str]:
        """The changes of each optimizer by the step, by id, in words. Releases the optimizers."""
        self.changes()
        self._guards.clear()
        return self._changes
