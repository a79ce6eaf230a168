"""Where an observed step uses tensors, as far as the bits of gradients depend on it.

Autograd adds up the gradients of all uses of a tensor, one after the other, and adds the sum to an old gradient. A
graphed module is one use (`grads.other_uses`). Two facts about a step decide whether a module can be graphed with
eager's bits:

- An argument or parameter is used several times inside a module, and also outside it: a residual around a norm that is
  made of several operations. The graph would add up its own uses first. `GradientSums` finds these modules.
- The step calls `torch.autograd.grad`, or a backward with `create_graph=True` or `inputs=`. A recorded backward
  computes all gradients once, so no module that such a backward may reach can be graphed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree

from stepgraph.backends.threads import replaced

Edge: TypeAlias = tuple[Any, int]
"""A node of autograd's graph, and the number of its output."""
_ARGUMENTS = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
"""The arguments of `torch.autograd.backward` after the tensors."""


@dataclass(frozen=True, slots=True)
class _Inside:
    """The uses of a tensor inside one call of a module."""

    name: str
    edge: Edge
    count: int
    tell: Callable[[str], None]


class GradientSums:
    """Compares the uses of tensors inside modules with all uses in the backward that follows."""

    def __init__(self) -> None:
        self._waiting: list[_Inside] = []
        self.partial: str | None = None
        """The call of the step that computes some gradients, or gradients of gradients."""

    def note(
        self, named: Mapping[str, Edge], parameters: Iterable[tuple[str, Any]], result: Any, tell: Callable[[str], None]
    ) -> None:
        """Note a call of a module: its arguments by name, as edges, its parameters, and its result.

        `tell` is called with a sentence if a sum would be made in another order.
        """
        counts = _uses(result, {node for node, _ in named.values()})
        several = {edge: count for edge, count in counts.items() if count > 1}
        self._waiting += [_Inside(name, edge, several[edge], tell) for name, edge in named.items() if edge in several]
        names = {id(parameter): name for name, parameter in parameters}
        for edge, count in several.items():
            name = names.get(id(getattr(edge[0], "variable", None)))
            if name is not None:
                self._waiting.append(_Inside(name, edge, count, tell))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See the backwards of this block."""

        def backward(below: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            for name in ("create_graph", "inputs"):
                if given.get(name):
                    self.partial = f"backward({name}=...)"
            self._compare([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
            below(tensors, *args, **kwargs)

        def grad(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.partial = "torch.autograd.grad"
            return below(*args, **kwargs)

        with replaced(torch.autograd, "backward", backward), replaced(torch.autograd, "grad", grad):
            yield
        self._waiting.clear()

    def _compare(self, roots: Sequence[Any]) -> None:
        """Before a backward, compare the uses inside modules with all uses that it reaches."""
        totals = _uses(roots, set()) if self._waiting else Counter[Edge]()
        for inside in self._waiting:
            if totals[inside.edge] > inside.count:
                others = totals[inside.edge] - inside.count
                inside.tell(f"`{inside.name}` is used {inside.count} times in it, and outside it (times: {others})")
        self._waiting = [inside for inside in self._waiting if not totals[inside.edge]]


def edges_of(named: Iterable[tuple[str, Any]]) -> dict[str, Edge]:
    """The places of tensors in autograd's graph, by name, of those that get gradients."""
    found: dict[str, Edge] = {}
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            edge = torch.autograd.graph.get_gradient_edge(tensor)
            found[name] = (edge.node, edge.output_nr)
    return found


def _uses(results: Any, stop: set[Any]) -> Counter[Edge]:
    """Count the uses of each tensor behind results, as edges of autograd's graph; nothing behind `stop`."""
    tensors = [leaf for leaf in _pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None and t.grad_fn not in stop]
    seen, counts = set(nodes), Counter[Edge]()
    while nodes:
        for following, number in nodes.pop().next_functions:
            if following is not None:
                counts[following, number] += 1
                if following not in seen and following not in stop:
                    seen.add(following)
                    nodes.append(following)
    return counts
