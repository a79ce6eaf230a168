"""A recording imitates what an optimizer's step does besides its update: its result, the gradients it clears.

An optimizer between graphs does not run while the step is recorded. The recording goes on as if it had run: gradients
that it was seen to clear are gone, and what it was seen to return is an unknown value. Replays see the real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import CaptureError


class OptimizerEffects:
    """The effects of the optimizers of a step in its last eager call."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        """The gradients that a step under way has found."""
        self._returning: set[int] = set()
        self._cleared: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._with_state: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """The parameters that have state after its step."""

    def begin(self, optimizer: Optimizer) -> None:
        """Its step begins."""
        self._found[id(optimizer)] = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]

    def end(self, optimizer: Optimizer, result: Any) -> None:
        """Its step ends and returns this."""
        before = self._found.pop(id(optimizer), [])
        if result is not None:
            self._returning.add(id(optimizer))
        cleared = self._cleared.setdefault(id(optimizer), [])
        cleared += [weakref.ref(p) for p, grad in before if grad is not None and p.grad is None]
        self._with_state[id(optimizer)] = [weakref.ref(p) for p, _ in before if p in optimizer.state]

    def with_state(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters that have state after its step."""
        found = (parameter() for parameter in self._with_state.get(id(optimizer), ()))
        return [parameter for parameter in found if parameter is not None]

    def imitate(self, optimizer: Optimizer) -> Any:
        """In a recording, in the place of the optimizer's step: leave what it leaves."""
        for cleared in self._cleared.get(id(optimizer), ()):
            parameter = cleared()
            if parameter is not None:
                parameter.grad = None
        return _Unknown(f"{type(optimizer).__name__}.step()") if id(optimizer) in self._returning else None


class _Unknown:
    """The unknown result of an optimizer between graphs. It may be thrown away, and nothing else."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise result_used(self.__dict__["_name"])

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if issubclass(type(value), cls):
                value._refuse()
        raise result_used("an optimizer")

    __bool__ = __float__ = __int__ = __index__ = __iter__ = __len__ = __getitem__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


def refuse_unknown_results(values: list[Any]) -> None:
    """Refuse a step that returns the result of an optimizer between graphs."""
    for value in values:
        if isinstance(value, _Unknown):
            value._refuse()


def result_used(name: str) -> CaptureError:
    """The error for a step that uses the result of an optimizer between graphs."""
    return CaptureError(
        f"the step uses the result of {name}",
        rule="optimizer-result",
    )
