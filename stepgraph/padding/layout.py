"""The memory of a padded tensor: its strides, its contents, and the number that its padding is filled with."""

from __future__ import annotations

import cmath
import itertools
from collections.abc import Sequence

import torch

from stepgraph.padding.buckets import Number


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for a shape, with the dimensions in the order that other strides have."""
    order = list(range(len(shape) - 1, -1, -1))
    if 0 not in like and any(like[d] < like[d + 1] for d in range(len(like) - 1)):
        order.sort(key=like.__getitem__)
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def copy_to(leaf: torch.Tensor, shape: Sequence[int], strides: Sequence[int], fill: Number) -> torch.Tensor:
    """A tensor of this shape with what fits of the leaf in it, on the leaf's device and, like it, pinned or not."""
    pads = [n for old, new in zip(reversed(leaf.shape), reversed(shape), strict=True) for n in (0, new - old)]
    if type(leaf) is not torch.Tensor or (leaf.requires_grad and not leaf.is_leaf):
        return torch.constant_pad_nd(leaf, pads, fill)
    source = leaf.detach() if leaf.requires_grad else leaf
    pinned = leaf.is_cpu and leaf.is_pinned()
    if not pinned and all(a >= b for a, b in itertools.pairwise(strides)):
        made = torch.constant_pad_nd(source, pads, fill)
    else:
        made = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device, pin_memory=pinned).fill_(fill)
        overlap(made, leaf.shape).copy_(overlap(source, shape))
    return made.requires_grad_() if leaf.requires_grad else made


def overlap(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that fits into a shape."""
    for dim, size in enumerate(shape):
        if size < tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def version(tensor: torch.Tensor) -> int:
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
