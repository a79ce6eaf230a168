"""The memory of a padded tensor: its strides, its contents, and the number that fills its padding."""

from __future__ import annotations

import cmath
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from stepgraph.core.tensor_memory import Contents, geometry, moved_argument, version_of
from stepgraph.engine.step.padding.buckets import Number


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for a shape, with its dimensions in the order that other strides show.

    The stride of a size of 1 shows no order; it is made that of a contiguous tensor.
    """
    inner_first = range(len(shape) - 1, -1, -1)
    strides = [1] * len(shape)
    orders = [list(inner_first)]
    if 0 not in like and any(a < b for a, b in itertools.pairwise(like)):
        orders.append(sorted((d for d in inner_first if shape[d] != 1), key=like.__getitem__))
    for order in orders:
        step = 1
        for dim in order:
            strides[dim] = step
            step *= max(shape[dim], 1)
    return tuple(strides)


class Copy(NamedTuple):
    """How a tensor is brought to another shape."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pads: list[int]
    """As torch.constant_pad_nd takes them: before and after each dimension, the last one first; negative ones cut."""
    by_torch: bool
    """Whether torch's padding, one call, makes these strides: it keeps those of a tensor that it does not enlarge, and
    may take one of four or five dimensions for channels-last."""
    fill: Number


def plan_copy(old: Sequence[int], new: tuple[int, ...], strides: tuple[int, ...], fill: Number) -> Copy:
    pads = [n for before, after in zip(reversed(old), reversed(new), strict=True) for n in (0, after - before)]
    by_torch = any(n > 0 for n in pads) and len(new) < 4 and strides == dense_strides(new, ())
    return Copy(new, strides, pads, by_torch, fill)


def copied(leaf: torch.Tensor, copy: Copy) -> torch.Tensor:
    """The part of the leaf that fits, and padding around it, on the leaf's device; pinned if the leaf is."""
    is_computed = leaf.requires_grad and not leaf.is_leaf
    if is_computed or type(leaf) is not torch.Tensor:
        return torch.constant_pad_nd(leaf, copy.pads, copy.fill)
    with torch.inference_mode(False), torch.no_grad():  # torch counts no writes to tensors of inference mode
        made = _padded(leaf.detach(), copy)
        if not leaf.requires_grad:
            return made
        made.requires_grad_()
        if leaf.grad is not None:
            made.grad = torch.zeros_like(made.detach())
            overlap(made.grad, leaf.shape).copy_(overlap(leaf.grad, copy.shape))
    return made


def _padded(source: torch.Tensor, copy: Copy) -> torch.Tensor:
    pinned = source.is_cpu and source.is_pinned()
    if copy.by_torch and not pinned:
        return torch.constant_pad_nd(source, copy.pads, copy.fill)
    made = torch.empty_strided(
        copy.shape, copy.strides, dtype=source.dtype, device=source.device, pin_memory=pinned
    ).fill_(copy.fill)
    overlap(made, source.shape).copy_(overlap(source, copy.shape))
    return made


class Made:
    """A tensor that takes the place of one of the caller's during a call; `look`: compare its contents too."""

    __slots__ = ("_contents", "_geometry", "_grad", "_grad_writes", "_name", "_source", "_tensor", "_writes", "index")

    def __init__(self, index: int, name: str, source: torch.Tensor, tensor: torch.Tensor, *, look: bool) -> None:
        self.index, self._name, self._source, self._tensor = index, name, source, tensor
        self._geometry = geometry(tensor)
        self._grad = tensor.grad if tensor.is_leaf else None
        self._grad_writes = 0 if self._grad is None else version_of(self._grad)
        self._writes = version_of(tensor)
        self._contents = Contents([(index, tensor)]) if look else None

    def was_written(self) -> bool:
        """Whether a write to the stand-in was seen."""
        if geometry(self._tensor) != self._geometry:
            raise moved_argument(self._name)
        return version_of(self._tensor) != self._writes or (
            self._contents is not None and bool(self._contents.changed())
        )

    def store(self) -> None:
        """Copy what was written to the stand-in back to the source."""
        with torch.no_grad():
            self._source.copy_(overlap(self._tensor, self._source.shape))

    def store_grad(self) -> None:
        """Give the source the gradient of its stand-in."""
        source, made = self._source, self._tensor
        if not made.is_leaf or (made.grad is None and self._grad is None):
            return
        found = self._grad
        with torch.no_grad():
            if found is not None and (made.grad is found or version_of(found) != self._grad_writes):
                assert source.grad is not None
                source.grad.copy_(overlap(found, source.shape))
            if made.grad is None:
                source.grad = None
            elif made.grad is not found:
                source.grad = overlap(made.grad, source.shape).clone()


def overlap(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that fits into a shape."""
    for dim, size in enumerate(shape):
        if size < tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def holds(dtype: torch.dtype, value: Number) -> bool:
    """Whether a dtype has this number: whole numbers exactly, others up to rounding."""
    try:
        held = torch.full((), value, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError, TypeError):
        return False
    if held == value or (held != held and value != value):
        return True
    if isinstance(value, int) or not (dtype.is_floating_point or dtype.is_complex):
        return False
    limits = torch.finfo(dtype)
    return cmath.isclose(held, value, rel_tol=limits.eps, abs_tol=limits.smallest_normal)
