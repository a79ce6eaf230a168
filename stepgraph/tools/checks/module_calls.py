"""Watches the calls of modules in a script's steps: their sites, the shapes of their inputs, and double backwards.

A module is offered to `graph_modules` only if a replay can serve it at each step. Two things are against it that are
not findings at a line of the module itself: other shapes come in from step to step, and its backward is differentiated
again (`create_graph=True`). What a step reaches over is known only later, so calls are sorted by a `Ledger`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stepgraph.core.tree import flatten
from stepgraph.tools.checks.findings import Ledger

__all__ = ["ModuleCalls"]

Shapes = tuple[tuple[int, ...], ...]
GRAD = tuple(inspect.signature(torch.autograd.grad).parameters)
"""The names of the parameters of `torch.autograd.grad`, in order."""
BACKWARD = tuple(inspect.signature(torch.autograd.backward).parameters)


class ModuleCalls:
    """The calls of one step, and what is known from the steps before."""

    def __init__(self) -> None:
        self.sites: set[Any] = set()
        """Where modules were called since the step, or its microbatch, began."""
        self.ledger = Ledger()
        self._steps: list[dict[str, list[Shapes]]] = []
        self._nodes: dict[Any, set[str]] = {}
        """The modules that end at a node of autograd's graph, in this step."""
        self._twice: set[str] = set()

    def begin(self) -> None:
        """A step begins."""
        self.ledger, self.sites, self._nodes = Ledger(), set(), {}

    def add(self, name: str, given: Any, result: Any) -> None:
        """A module has run."""
        with torch._C.DisableTorchFunction():
            self.ledger.note((name, tuple(tuple(one.shape) for one in _tensors_of(given))))
            for tensor in _tensors_of(result):
                if tensor.grad_fn is not None:
                    self._nodes.setdefault(tensor.grad_fn, set()).add(name)

    def end(self, *, is_step: bool) -> None:
        """The step is over."""
        self.ledger.end()
        calls: dict[str, list[Shapes]] = {}
        for name, shapes in self.ledger.inside:
            calls.setdefault(name, []).append(shapes)
        if is_step:
            self._steps.append(calls)
        self._nodes = {}

    def differentiate(self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`torch.autograd.grad` or `backward` is called: note the modules whose backward is differentiated again.

        `names` are those of the function's parameters, of which the first is what is differentiated.
        """
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("create_graph"):
            with torch._C.DisableTorchFunction():
                for node in _nodes_behind(_tensors_of(given.get(names[0]))):
                    self._twice |= self._nodes.get(node, set())

    def unfit(self, first: int) -> dict[str, str]:
        """The modules that no replay can serve, each with the rule; steps are compared from number `first` on.

        Modules of one list of which one gets other shapes are judged alike: the rows of experts depend on data.
        """
        found = dict.fromkeys(sorted(self._twice), "create-graph")
        steps = self._steps[first:]
        called = {name for calls in steps for name in calls}
        varying = {name for name in called if len({tuple(calls[name]) for calls in steps if name in calls}) > 1}
        lists = {name.rpartition(".")[0] for name in varying} - called - {""}
        varying |= {name for name in called if name.rpartition(".")[0] in lists}
        return dict.fromkeys(sorted(varying), "varying-shape") | found


def _tensors_of(values: Any) -> list[torch.Tensor]:
    return [one for one in flatten(values)[0] if isinstance(one, torch.Tensor)]


def _nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        new = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= new
        todo += new
