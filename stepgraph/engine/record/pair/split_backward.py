"""A split backward computes the gradients of the inputs first, and those of the weights when there is time.

Other stages of a pipeline wait for the gradients of a stage's inputs, but not for those of its weights. So a schedule
may split the backward: the I part goes from the results to the inputs, and the W part runs later, while the rank would
be idle.

Autograd's graph shows where to split. Nodes that lead to an input are on the *path*; the I part runs them, only for
their gradients towards the inputs. Other nodes that lead to a weight are *beside* the path. If a node of the path has
an edge to one beside it, its incoming gradients are kept, and the W part starts there. It computes only the edges
beside the path, and continues to the weights. Each product is computed once, in one of the parts.

Two computations lead to weights and are still done in the I part, since the W part would have to repeat work. A node
behind several nodes of the path gets its sum there. And a function written in Python always computes all its
gradients.

The additions are those of one unsplit backward, in the same order. A hook on a tensor inside sees its gradient in both
parts, as with `torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Edge = tuple[Any, int]
"""A node of autograd's graph, and the index of one of its incoming gradients."""
Grads = list[torch.Tensor | None]


def input_gradients(
    results: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> tuple[Grads, WeightPart]:
    """Compute the gradients of the inputs only (the I part), and keep the tensors that the W part needs.

    `incoming` are the gradients of the results, None where it is one. Autograd's graph is retained. The caller lets go
    of the results; the W part keeps the nodes it needs.

    Example:
        >>> grads, weights = input_gradients([y], [dy], [x], list(layer.parameters()))
        >>> send(grads[0])
        >>> later = weights.gradients()
    """
    roots: list[tuple[Edge, torch.Tensor | None]] = [
        (_edge(result), torch.ones_like(result) if grad is None else grad)
        for result, grad in zip(results, incoming, strict=True)
        if result.requires_grad
    ]
    wanted = [_edge(t) if t.requires_grad else None for t in inputs]
    leaves = [_edge(t) if t.requires_grad else None for t in parameters]
    plan = _Plan([edge for edge, _ in roots], _present(wanted), _present(leaves))
    found: dict[Edge, torch.Tensor | None] = {}
    if plan.path:
        asked = [*_present(wanted), *plan.kept(), *plan.summed, *plan.whole]
        found = _grad(roots, asked, retain_graph=True)
    beside = [(edge, grad) for edge, grad in roots if edge[0] not in plan.path]
    starts = [([(e, found[e]) for e in edges], targets) for edges, targets in plan.starts]
    known = {edge: found[edge] for edge in (*plan.summed, *plan.whole)}
    grads = [None if edge is None else found.get(edge) for edge in wanted]
    return grads, WeightPart(leaves, known, beside, starts)


@dataclass(slots=True)
class WeightPart:
    """The W part of a backward: the gradients that it starts from, until it is run."""

    _leaves: list[Edge | None]
    _known: dict[Edge, torch.Tensor | None]
    _beside: list[tuple[Edge, torch.Tensor | None]]
    _starts: list[tuple[list[tuple[Edge, torch.Tensor | None]], list[Edge]]]

    def kept(self) -> list[torch.Tensor]:
        """The tensors that it holds until it is run."""
        pairs = [*self._beside, *(pair for grads, _ in self._starts for pair in grads), *self._known.items()]
        return [grad for _, grad in pairs if grad is not None]

    def gradients(self, *, retain_graph: bool = False) -> Grads:
        """Compute the gradients of the weights, one for each parameter, and drop the kept tensors.

        `retain_graph` keeps them, and the tensors that autograd has saved, so that it can be called again.
        """
        leaves, known, beside, starts = self._leaves, self._known, self._beside, self._starts
        if retain_graph:
            known, starts = dict(known), list(starts)
        else:
            self._leaves, self._known, self._beside, self._starts = [], {}, [], []
        while starts:
            grads, targets = starts.pop()
            known |= _grad(grads, targets, retain_graph=retain_graph)
        ends = {edge for edge in leaves if edge is not None}
        onward = [(edge, grad) for edge, grad in known.items() if edge not in ends] + beside
        missing = [edge for edge in ends if edge not in known]
        known |= _grad(onward, missing, retain_graph=retain_graph)
        return [None if edge is None else known.get(edge) for edge in leaves]


@dataclass(slots=True)
class _Node:
    """The facts known about a node of the graph."""

    before: set[Any]
    """The nodes whose gradients come here."""
    places: set[int]
    """The indices of its incoming gradients."""
    is_result: bool = False


class _Plan:
    """The gradients that the I part computes, and the edges where the W part starts."""

    def __init__(self, roots: Sequence[Edge], inputs: Sequence[Edge], leaves: Sequence[Edge]) -> None:
        self._nodes = _reachable(roots)
        self.path = self._leading_to(edge[0] for edge in inputs)
        self.whole = self._whole(leaves)
        """Weights whose gradients are computed in the I part."""
        useful = self._leading_to(edge[0] for edge in leaves if edge not in set(self.whole))
        self.summed: list[Edge] = []
        """Edges beside the path whose gradients the I part computes."""
        self.starts: list[tuple[list[Edge], list[Edge]]] = []
        """Nodes of the path, by the gradients that come to them, and the edges that the W part asks them for."""
        split: dict[Any, list[Edge]] = {}
        for node in self._nodes:
            before = self._nodes[node].before & self.path
            if node in self.path or node not in useful or not before:
                continue
            edges = [(node, place) for place in sorted(self._nodes[node].places)]
            first = next(iter(before))
            if len(before) > 1 or _computes_everything(first):
                self.summed += edges
            else:
                split.setdefault(first, []).extend(edges)
        for node, targets in split.items():
            self.starts.append(([(node, place) for place in sorted(self._nodes[node].places)], targets))

    def kept(self) -> list[Edge]:
        """The incoming gradients of the nodes where the W part starts."""
        return [edge for edges, _ in self.starts for edge in edges]

    def _whole(self, leaves: Sequence[Edge]) -> list[Edge]:
        """Weights that are inputs too, and those behind a node that both the path and nodes beside it lead to."""
        useful = self._leading_to(edge[0] for edge in leaves)
        mixed = {node for node in useful - self.path if self._is_mixed(node)}
        behind = set(_reachable([(node, 0) for node in mixed])) if mixed else set()
        return [edge for edge in leaves if edge[0] in behind or edge[0] in self.path]

    def _is_mixed(self, node: Any) -> bool:
        known = self._nodes[node]
        on_path = known.before & self.path
        return bool(on_path) and (known.is_result or len(on_path) < len(known.before))

    def _leading_to(self, nodes: Iterable[Any]) -> set[Any]:
        """The nodes that come before these, and these."""
        found = {node for node in nodes if node in self._nodes}
        pending = list(found)
        while pending:
            fresh = self._nodes[pending.pop()].before - found
            found |= fresh
            pending += fresh
        return found


def _reachable(roots: Sequence[Edge]) -> dict[Any, _Node]:
    """All nodes from these edges on, in the order in which they are found."""
    nodes: dict[Any, _Node] = {}
    for node, place in roots:
        nodes.setdefault(node, _Node(set(), set())).places.add(place)
        nodes[node].is_result = True
    pending = list(nodes)
    while pending:
        node = pending.pop()
        for following, place in node.next_functions:
            if following is None:
                continue
            if following not in nodes:
                nodes[following] = _Node(set(), set())
                pending.append(following)
            nodes[following].before.add(node)
            nodes[following].places.add(place)
    return nodes


def _computes_everything(node: Any) -> bool:
    """True if a node always computes all its gradients."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _grad(
    roots: Sequence[tuple[Edge, torch.Tensor | None]], asked: Sequence[Edge], *, retain_graph: bool
) -> dict[Edge, torch.Tensor | None]:
    """Compute the gradients of the edges `asked` from those of `roots`. An edge that is not reached gets None."""
    asked = list(dict.fromkeys(asked))
    given = [(edge, grad) for edge, grad in roots if grad is not None]
    if not asked or not given:
        return dict.fromkeys(asked)
    grads = torch.autograd.grad(
        [GradientEdge(*edge) for edge, _ in given],
        [GradientEdge(*edge) for edge in asked],
        [grad for _, grad in given],
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return dict(zip(asked, grads, strict=True))


def _edge(tensor: torch.Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _present(edges: Sequence[Edge | None]) -> list[Edge]:
    return [edge for edge in edges if edge is not None]
