"""Probes at module boundaries name the first module whose result, or whose result's gradient, differs.

A replay runs no Python, so that a hook sees nothing of it. Where a whole step is a graph, the step is captured once
more together with its probes: they copy every module's results inside the graph, and the copies are among the step's
results. Modules and callables that are graphed one by one are called from Python, and hooks see their boundaries.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stepgraph.core.errors import StepgraphError
from stepgraph.core.tree import flatten
from stepgraph.tools.program import Saved
from stepgraph.tools.verification.bits import measure, same_bits
from stepgraph.tools.verification.causes import Pair
from stepgraph.tools.verification.trace import Difference, fresh, vary

__all__ = ["ModuleProbes", "first_differing_module"]


class ModuleProbes:
    """Copies the results of all calls of modules, and their gradients, in the order in which they come."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        named = [(root, path, m) for root, model in modules.items() for path, m in model.named_modules()]
        self._names = {id(module): f"{root}.{path}" if path else root for root, path, module in reversed(named)}
        self._modules = [module for _, _, module in named]
        self._calls: Counter[str] = Counter()
        self._taken: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Take part in all calls of the modules during the block."""
        handles = [module.register_forward_hook(self._after) for module in {id(m): m for m in self._modules}.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Forget the step before."""
        self._calls.clear()
        self._taken.clear()

    def taken(self) -> dict[str, torch.Tensor]:
        """The copies so far: results of modules first, then gradients as the backward came to them."""
        return dict(self._taken)

    def _after(self, module: torch.nn.Module, _: Any, result: Any) -> None:
        name = self._names[id(module)]
        self._calls[name] += 1
        call = f", call {self._calls[name]}" if self._calls[name] > 1 else ""
        tensors = [leaf for leaf in flatten(result)[0] if issubclass(type(leaf), torch.Tensor)]
        for index, tensor in enumerate(tensors):
            which = f" {index}" if len(tensors) > 1 else ""
            self._taken[f"{name}{call}: result{which}"] = tensor.detach().clone()
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._note, f"{name}{call}: gradient of result{which}"))

    def _note(self, name: str, grad: torch.Tensor) -> None:
        self._taken[name] = grad.detach().clone()


def _probed(step: Callable[..., Any], probes: ModuleProbes, *args: Any, **kwargs: Any) -> Any:
    probes.begin()
    result = step(*args, **kwargs)
    return result, probes.taken()


def first_differing_module(
    pair: Pair, start: Saved, step: int, capture: Callable[[Callable[..., Any]], Any] | None
) -> Difference | None:
    """The first module whose result, or whose result's gradient, differs at a step; None if the probes see nothing.

    `capture` captures the step once more, with its probes; without it the graphed callable is called as it is.
    """
    probes = ModuleProbes(pair.program.modules)
    eager = functools.partial(_probed, pair.eager, probes)
    with probes.attached(), contextlib.ExitStack() as stack:
        expected = _notes(eager, pair, start, step)
        try:
            if capture is None:
                graphed: Callable[..., Any] = functools.partial(_probed, pair.graphed, probes)
            else:
                graphed = stack.enter_context(capture(eager))
            received = _notes(graphed, pair, start, step)
        except (StepgraphError, RuntimeError):  # the step with its probes cannot be captured: nothing is known then
            return None
    for name, value in expected.items():
        if name in received and not same_bits(value, received[name]):
            return Difference(step, "modules", name, measure(value, received[name]))
    return None


def _notes(call: Callable[..., Any], pair: Pair, start: Saved, step: int) -> dict[str, torch.Tensor]:
    start.restore()
    notes: dict[str, torch.Tensor] = {}
    for index, batch in enumerate(_through(pair.batches, step)):
        vary(pair.program, index)
        _, notes = call(*fresh(batch))
    return {name: value.clone() for name, value in notes.items()}


def _through(batches: Sequence[tuple[Any, ...]], step: int) -> Sequence[tuple[Any, ...]]:
    return batches[: step + 1]
