"""The uses of a tensor inside a part, whose gradients autograd adds up one by one.

A backward meets the uses of a tensor in reverse order of the forward, and adds each gradient to the sum of those
before. A penalty on a weight, or a second call of the part, adds to the same sum. If a graph added up its own uses
first, the sum would be associated in another way, and its last bits would differ. So where the part is not the only
source, its node in autograd's graph has one input for each use, in the order in which eager's backward meets them, and
autograd adds as in eager. A part's forward runs in one piece, so eager's backward runs its nodes in one piece, too.

The graph that is recorded does not add up such gradients, so that each of them costs memory, a copy and an addition
outside. Where the part is the only source, the sum is made inside the graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge

Edge: TypeAlias = tuple[Any, int]
"""A node of autograd's graph, and the index of one of its incoming gradients."""


def edge_of(tensor: torch.Tensor) -> Edge:
    """Where the gradient of a tensor arrives."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def nodes_behind(tensors: Iterable[torch.Tensor], stop: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd's graph behind these tensors, each once; without `stop` and the nodes behind it."""
    seen = set(stop)
    nodes = [tensor.grad_fn for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def is_reentrant(results: Sequence[torch.Tensor]) -> bool:
    """True if a backward from these tensors passes through reentrant checkpointing, torch's or a copy of it."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_behind(results))


def uses_behind(results: Sequence[torch.Tensor], stop: Iterable[Any] = ()) -> dict[Edge, list[Edge]]:
    """The uses of each tensor behind results, by its edge: a node, and the index of the gradient that it gives.

    Nodes in `stop`, and the nodes behind them, are left out.
    """
    found: dict[Edge, list[Edge]] = defaultdict(list)
    for node in nodes_behind(results, stop):
        for index, (following, place) in enumerate(node.next_functions):
            if following is not None:
                found[following, place].append((node, index))
    return found


def count_uses(results: Sequence[torch.Tensor], tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """The number of uses of tensors behind results, by id; a tensor that is a result has one more."""
    uses = uses_behind(results)
    roots = Counter(edge_of(result) for result in results)
    edges = {id(tensor): edge_of(tensor) for tensor in tensors}
    return Counter({index: len(uses.get(edge, ())) + roots[edge] for index, edge in edges.items()})


class NotedUses:
    """The gradients that a recorded backward has for a list of tensors.

    A tensor of `apart` is in the list once for each use, and gets the gradients of its uses in the backward's order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], apart: Iterable[torch.Tensor]) -> None:
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            self._places[id(tensor)].append(place)
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        """Each once."""
        self.apart = list(apart)
        self.arrival: list[int] = []
        """Places in the list, in the order in which the backward has their gradients."""
        self._found: list[torch.Tensor | None] = [None] * len(tensors)
        self._num_found: Counter[int] = Counter()

    @contextlib.contextmanager
    def noting(self, results: Sequence[torch.Tensor]) -> Iterator[None]:
        """Take the gradients of single uses out of a backward from these results, which then adds up none of them."""
        apart = {edge_of(tensor): id(tensor) for tensor in self.apart}
        with contextlib.ExitStack() as stack:
            for tensor in self.tensors:
                if all(tensor is not other for other in self.apart):
                    (place,) = self._places[id(tensor)]
                    stack.callback(tensor.register_hook(functools.partial(self._arrived, place)).remove)
            for node, taken in _taken_from(results, apart).items():
                stack.callback(node.register_hook(functools.partial(self._take, taken)).remove)
            yield

    def _arrived(self, place: int, grad: torch.Tensor) -> None:
        self.arrival.append(place)

    def _take(
        self, taken: Sequence[tuple[int, int]], grads: Sequence[torch.Tensor | None], _: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """The hook of a node: `taken` are indices of its gradients, each with the id of a tensor."""
        left = list(grads)
        for index, tensor in taken:
            grad, left[index] = left[index], None
            if grad is not None:
                place = self._places[tensor][self._num_found[tensor]]
                self._num_found[tensor] += 1
                self._found[place] = grad
                self.arrival.append(place)
        return tuple(left)

    def all(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of all places; `grads` are those that the backward has returned for `tensors`."""
        found = list(self._found)
        for tensor, grad in zip(self.tensors, grads, strict=True):
            places = self._places[id(tensor)]
            if grad is not None:  # of a tensor with several places: of the result that it is, and that comes first
                uses = [grad, *(found[place] for place in places[:-1])]
                for place, use in zip(places, uses, strict=True):
                    found[place] = use
        return found


def _taken_from(results: Sequence[torch.Tensor], apart: dict[Edge, int]) -> dict[Any, list[tuple[int, int]]]:
    """The nodes behind results that give gradients to these edges: which gradients, with the ids of the edges."""
    found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for node in nodes_behind(results) if apart else ():
        for index, edge in enumerate(node.next_functions):
            if edge in apart:
                found[node].append((index, apart[edge]))
    return found
