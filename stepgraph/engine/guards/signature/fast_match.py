"""One fast check finds that a call looks like an earlier one.

A call's full signature takes several microseconds to make and to look up. Most calls look like the one before: as many
arguments, tensors of the same geometry, the same plain values. torch's compiler has a guard in C++ that compares
tensors by type, dtype, device, shape, strides and gradient in one call. When in doubt the check returns None; the
caller falls back to the full signature.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from stepgraph.core.ambient import compiler_guards
from stepgraph.core.tensor_memory import alignment_of, sharing
from stepgraph.engine.guards.signature.key import gradient_mark

_TensorGuards: Any = getattr(compiler_guards, "TensorGuards", None)
_PLAIN = frozenset({type(None), bool, int, str})
_attributes = operator.attrgetter("__dict__")


def geometry_check(tensors: Sequence[torch.Tensor], on: str) -> Callable[..., bool] | None:
    """A function that compares as many other tensors by class, dtype, device, shape, strides, and alignment.

    `on`: the kind of device whose tensors have an alignment. None where torch has no such guard. It also returns False
    where autocast was switched on or off for their device, and where one tensor is given twice.
    """
    if _TensorGuards is None:
        return None
    check, aligned = _guard(tensors), _alignments(tensors, on)

    def fits(*others: torch.Tensor) -> bool:
        if not check(*others):
            return False
        for index, modulus, rest in aligned:  # noqa: SIM110 (a generator would cost more than the check)
            if others[index].data_ptr() % modulus != rest:
                return False
        return True

    return fits if aligned else check


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    check: Callable[..., bool] = _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


def _alignments(tensors: Sequence[torch.Tensor], on: str) -> list[tuple[int, int, int]]:
    """Index, modulus and rest of those tensors whose address counts."""
    found = ((index, alignment_of(tensor, on)) for index, tensor in enumerate(tensors))
    return [(index, *alignment) for index, alignment in found if alignment is not None]


class FastMatch:
    """The form of one call whose arguments are plain tensors and plain values."""

    __slots__ = (
        *("_aligned", "_check", "_is_all_tensors", "_names", "_num_args", "_others", "_tensors", "_with_grad"),
        "_written",
    )

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], on: str, *, tell_computed: bool, written: Collection[int]
    ) -> None:
        leaves = [*args, *kwargs.values()]
        self._num_args, self._names = len(args), tuple(kwargs)
        self._tensors = [i for i, leaf in enumerate(leaves) if type(leaf) is torch.Tensor]
        self._others = [(i, leaf) for i, leaf in enumerate(leaves) if type(leaf) is not torch.Tensor]
        self._is_all_tensors = not self._others
        tensors = [leaves[i] for i in self._tensors]
        self._with_grad = [(i, gradient_mark(t)) for i, t in enumerate(tensors) if t.requires_grad and tell_computed]
        self._written = written
        self._check, self._aligned = _guard(tensors), _alignments(tensors, on)

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on: str,
        *,
        tell_computed: bool = True,
        written: Collection[int] = frozenset(),
    ) -> FastMatch | None:
        """The form of a call, or None where no later call could be compared with it.

        `on`: the kind of device whose tensors have an alignment. `tell_computed`: a tensor that needs a gradient is
        compared by whether it was computed, and by its `.grad`. `written`: the leaves that are written to, a collection
        that may grow; a call in which another leaf shares their memory does not match.
        """
        leaves = [*args, *kwargs.values()]
        tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        if _TensorGuards is None or not tensors or len({id(tensor) for tensor in tensors}) < len(tensors):
            return None
        if any(type(leaf) not in _PLAIN for leaf in leaves if type(leaf) is not torch.Tensor):
            return None
        if any(map(_attributes, tensors)):  # what hangs on a tensor counts
            return None
        if not torch.is_grad_enabled():  # the guard would not tell whether a tensor needs a gradient
            return None
        return cls(args, kwargs, on, tell_computed=tell_computed, written=written)

    def leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The leaves of a call that matches, or None."""
        if len(args) != self._num_args or ((kwargs or self._names) and tuple(kwargs) != self._names):
            return None
        leaves = [*args, *kwargs.values()] if kwargs else list(args)
        if self._is_all_tensors:
            tensors = leaves
        else:
            for index, value in self._others:
                if leaves[index] is not value:
                    return None
            tensors = [leaves[index] for index in self._tensors]
        if not self._check(*tensors) or any(map(_attributes, tensors)):
            return None
        for index, modulus, rest in self._aligned:
            if tensors[index].data_ptr() % modulus != rest:
                return None
        for index, mark in self._with_grad:
            if gradient_mark(tensors[index]) != mark:
                return None
        if self._written and sharing(leaves, self._written):
            return None
        return leaves
