"""Autocast casts a weight once for several uses; warm-up checks that no use is outside the graph.

Autocast keeps the cast of a weight until its region ends. Two uses of the weight then share one cast, and autograd adds
up their gradients in low precision before it converts the sum. A graph cannot share a cast with code outside it: it
converts first and adds in full precision, which gives other bits. So warm-up checks that a call does not share casts:
the gradient that reaches a cast must be the sum that this call has sent there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.engine.guards.signature import AMBIENT_NAMES
from stepgraph.engine.record.pair.uses import nodes_behind

_AROUND = [AMBIENT_NAMES.index(name) for name in ("grad mode", "autocast cache", "autocast on cuda", "autocast on cpu")]


def keeps_casts(ambient: Sequence[Hashable], *, grad_mode: bool = True) -> bool:
    """True if eager code under these flags shares the casts of weights; `grad_mode`: only if gradients are on."""
    grad_on, cache, cuda, cpu = (ambient[index] for index in _AROUND)
    return bool((grad_on or not grad_mode) and cache and (cuda or cpu))


def as_computed(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that is a view: autocast keeps the casts of leaves, and an argument that was computed is none in eager."""
    with torch.no_grad():
        return tensor.view_as(tensor).requires_grad_()


def casts_behind(results: Iterable[torch.Tensor], stop: Iterable[Any] = ()) -> dict[Any, list[tuple[Any, int]]]:
    """The casts of leaves that lead to results, as nodes of autograd's graph, each with the nodes that use it.

    A use is a node and the index of its gradient. Nodes in `stop`, and the nodes behind them, are left out.
    """
    found: dict[Any, list[tuple[Any, int]]] = {}
    for node in nodes_behind(results, stop):
        for index, (following, _) in enumerate(node.next_functions):
            if following is not None and _leaf_of(following) is not None:
                found.setdefault(following, []).append((node, index))
    return found


def casts_twice(results: Iterable[torch.Tensor]) -> bool:
    """True if a leaf is cast more than once on the way to these results."""
    leaves = [id(_leaf_of(cast)) for cast in casts_behind(results)]
    return len(set(leaves)) != len(leaves)


class CastWatch:
    """Finds, in the backward of an eager call, casts that other calls use as well."""

    def __init__(self) -> None:
        self._differs: list[torch.Tensor] = []
        self._is_shared = False

    def follow(self, results: Iterable[torch.Tensor], arguments: Iterable[torch.Tensor]) -> None:
        """Watch the casts of a call with these results and arguments."""
        stop = [tensor.grad_fn for tensor in arguments if tensor.grad_fn is not None]
        for cast, uses in casts_behind(results, stop).items():
            share = _Share(self._differs)
            for node, index in uses:
                node.register_hook(share.adding(index))
            cast.register_prehook(share.compare)

    def found(self) -> CaptureError | None:
        """Return the error that says why the calls cannot be graphed, if a cast was shared. Waits for the device."""
        differs, self._differs[:] = list(self._differs), []
        self._is_shared = self._is_shared or any(bool(flag) for flag in differs)
        return shared_cast("the module") if self._is_shared else None


class _Share:
    """The sum that one call adds to the gradient of a cast, in the order in which autograd adds it."""

    def __init__(self, differs: list[torch.Tensor]) -> None:
        self._differs = differs
        self._own: torch.Tensor | None = None

    def adding(self, index: int) -> Any:
        """The hook of a use of the cast."""

        def hook(grads: Sequence[torch.Tensor | None], _: Any) -> None:
            grad = grads[index]
            if _is_plain(grad):
                self._own = grad.detach().clone() if self._own is None else self._own + grad.detach()

        return hook

    def compare(self, grads: Sequence[torch.Tensor | None]) -> None:
        """The hook of the cast."""
        own, self._own = self._own, None
        grad = grads[0]
        if _is_plain(grad) and own is not None:  # None: a backward that does not come to this call
            self._differs.append((_bits(grad.detach()) != _bits(own)).any())


def shared_cast(whose: str) -> CaptureError:
    """Make the error for a cast of a weight with several uses."""
    return CaptureError(
        f"{whose} uses a weight whose cast autocast shares with another use in the same region",
        rule="autocast-cache",
    )


def _leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf that a node is a cast of."""
    if not node.name().startswith("ToCopyBackward"):
        return None
    behind = node.next_functions[0][0]
    return getattr(behind, "variable", None)


def _is_plain(grad: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return type(grad) is torch.Tensor and grad.layout is torch.strided


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16) if tensor.element_size() == 2 else tensor
