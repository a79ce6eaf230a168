"""A backward for some of the parameters of a graphed part is refused, also where autograd's engine would pass it by.

A graph adds to the gradients of its parameters by itself, so that autograd has no edge to them. A full backward comes
to the part's node, which checks (`in_flight`). But `torch.autograd.grad(loss, parameters)` looks for edges to these
very parameters. It finds none, or only those of other uses, and would return the gradient without the part's share: the
engine runs no code of the part. So while graphs are there, backwards for certain tensors are looked at before they
start. torch has no hook for that: the function by which `grad` and `backward` enter the engine is replaced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError, StepgraphError
from stepgraph.core.tracebacks import trim
from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.record.pair.runner import InFlightSet
from stepgraph.engine.record.pair.uses import nodes_behind

_ENTRY = "_engine_run_backward"
_INPUTS = 3
"""The place of `inputs` among the positional arguments after the results."""


class CallsInFlight:
    """The calls in flight of a model's parts. Between `begin` and `end` it refuses partial backwards."""

    def __init__(self) -> None:
        self._of: dict[int, InFlightSet] = {}
        self._looking = contextlib.ExitStack()
        self._is_looking = False
        weakref.finalize(self, self._looking.close)

    def of(self, module: torch.nn.Module) -> InFlightSet:
        """The calls that may add to the gradients of a module's parameters, of any of its methods."""
        return self._of.setdefault(id(module), InFlightSet())

    def begin(self) -> None:
        """Look at backwards from now on: there is a graph that accumulates gradients."""
        if self._is_looking or not hasattr(torch.autograd, _ENTRY):
            return
        self._is_looking, known = True, weakref.ref(self)

        def enter(below: Callable[..., Any], results: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            inputs = args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs")
            try:
                if inputs and (calls := known()) is not None:
                    _refuse(results, inputs, calls._of.values())
                return below(results, *args, **kwargs)
            except StepgraphError as error:
                trim(error)
                raise

        self._looking.enter_context(replaced(torch.autograd, _ENTRY, enter, everywhere=True))

    def end(self) -> None:
        """There are no graphs any more."""
        self._looking.close()
        self._is_looking = False


def _refuse(results: Sequence[Any], inputs: Sequence[Any], in_flight: Iterable[InFlightSet]) -> None:
    wanted = {id(_variable(each)) for each in inputs}
    for call in [call for calls in list(in_flight) for call in calls]:
        node = call.node() if call.node is not None else None
        names = [name for name, parameter in call.runner.edges.inside.items() if id(parameter) in wanted]
        if node is not None and names and any(node is each for each in nodes_behind(map(_tensor, results))):
            raise CaptureError(
                "a backward for certain tensors only (autograd.grad, or backward(inputs=...)) asks for the gradient of "
                f"`{names[0]}`, a parameter of a graphed module",
                rule="partial-backward",
            )


def _variable(given: Any) -> Any:
    """The leaf that a tensor, or an edge to its accumulator, stands for."""
    return given if isinstance(given, torch.Tensor) else getattr(given.node, "variable", None)


class _Root:
    """An edge of autograd's graph, in the place of a result."""

    def __init__(self, edge: Any) -> None:
        self.grad_fn = edge.node


def _tensor(given: Any) -> Any:
    return given if isinstance(given, torch.Tensor) else _Root(given)
