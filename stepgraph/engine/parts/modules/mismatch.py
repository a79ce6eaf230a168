"""`get_mismatch_errors` lists every argument in which a call differs from the one that was captured."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.core.tree import flatten
from stepgraph.engine.guards.signature import Signature, ambient_key, find_differences, leaf_key
from stepgraph.engine.memory.inputs import ArgMetadata


def get_mismatch_errors(
    captured_args: Sequence[Any],
    captured_kwargs: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    names: Sequence[str] = (),
) -> list[str]:
    """Return all differences between the arguments of two calls, by path; none if one graph serves both.

    Tensors are compared by type, shape, strides, dtype, device and requires_grad, plain values by value, other objects
    by identity. `ArgMetadata` may stand for a tensor that no longer exists. `names` are the positional parameters.

    Example:
        >>> get_mismatch_errors((x,), {"mask": mask}, (x[:2],), {}, names=["hidden_states"])
        ['mask: missing (captured present, received absent)',
         'hidden_states: shape changed (captured f32[4, 8] cpu, received f32[2, 8] cpu)']
    """
    captured = _signature(captured_args, captured_kwargs, names)
    return [str(difference) for difference in find_differences(captured, _signature(args, kwargs, names))]


def _signature(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Signature:
    leaves, structure = flatten((tuple(args), dict(kwargs)))
    return Signature(structure, tuple(map(_key, leaves)), ambient_key(), arguments=tuple(names))


def _key(leaf: Any) -> Hashable:
    """Return a leaf's key. A computed tensor and a leaf of autograd have equal keys if both require a gradient."""
    if isinstance(leaf, ArgMetadata) and not leaf.is_tensor:
        leaf = leaf.value
    if isinstance(leaf, ArgMetadata):
        return (torch.Tensor, leaf.shape, leaf.stride, leaf.dtype, leaf.device, leaf.requires_grad, False, False)
    if not isinstance(leaf, torch.Tensor):
        return leaf_key(leaf)
    if leaf.layout is not torch.strided:  # no strides to ask for
        return (type(leaf), leaf.shape, leaf.layout, leaf.dtype, leaf.device, leaf.requires_grad, False, False)
    key = leaf_key(leaf)
    assert isinstance(key, tuple)
    return (*key[:5], leaf.requires_grad, *key[6:])
