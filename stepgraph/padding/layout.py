"""The memory of a padded tensor: its strides, its contents, and the number that its padding is filled with."""

from __future__ import annotations

import cmath
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from stepgraph.padding.buckets import Number


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for a shape, with its dimensions in the order that other strides show.

    The stride of a size of 1 means nothing and shows no order. It is that of a contiguous tensor, whatever it was.
    """
    inner_first = range(len(shape) - 1, -1, -1)
    strides = [1] * len(shape)
    step = 1
    for dim in inner_first:
        strides[dim] = step
        step *= max(shape[dim], 1)
    if 0 in like or all(a >= b for a, b in itertools.pairwise(like)):
        return tuple(strides)
    step = 1
    for dim in sorted((d for d in inner_first if shape[d] != 1), key=like.__getitem__):
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
    """Whether torch's padding, which is one call, has these strides: it keeps those of a tensor that it does not
    enlarge, and may take one of four or five dimensions for channels-last."""
    fill: Number


def plan_copy(old: Sequence[int], new: tuple[int, ...], strides: tuple[int, ...], fill: Number) -> Copy:
    """The copy from one shape to another."""
    pads = [n for before, after in zip(reversed(old), reversed(new), strict=True) for n in (0, after - before)]
    by_torch = any(n > 0 for n in pads) and len(new) < 4 and strides == dense_strides(new, ())
    return Copy(new, strides, pads, by_torch, fill)


def copied(leaf: torch.Tensor, copy: Copy) -> torch.Tensor:
    """What fits of the leaf, and padding around it: on the leaf's device and, like it, pinned or not."""
    is_computed = leaf.requires_grad and not leaf.is_leaf
    if is_computed or type(leaf) is not torch.Tensor:
        return torch.constant_pad_nd(leaf, copy.pads, copy.fill)
    source = leaf.detach() if leaf.requires_grad else leaf
    pinned = leaf.is_cpu and leaf.is_pinned()
    if copy.by_torch and not pinned:
        made = torch.constant_pad_nd(source, copy.pads, copy.fill)
    else:
        made = torch.empty_strided(
            copy.shape, copy.strides, dtype=leaf.dtype, device=leaf.device, pin_memory=pinned
        ).fill_(copy.fill)
        overlap(made, leaf.shape).copy_(overlap(source, copy.shape))
    return made.requires_grad_() if leaf.requires_grad else made


class Made(NamedTuple):
    """A tensor that stands for one of the caller's during a call."""

    source: torch.Tensor
    made: torch.Tensor
    writes: int

    def store(self) -> None:
        """Give the source what was written to its stand-in since, and the gradient that was left on it."""
        source, made, writes = self
        if made.requires_grad and made.is_leaf and made.grad is not None:
            grad = overlap(made.grad, source.shape)
            source.grad = grad.clone() if source.grad is None else source.grad + grad
        if written(made) != writes:
            with torch.no_grad():
                source.copy_(overlap(made, source.shape))


def overlap(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that fits into a shape."""
    for dim, size in enumerate(shape):
        if size < tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def written(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


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
