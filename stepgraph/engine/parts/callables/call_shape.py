"""A `CallShape` describes the call that a graph was captured for, and checks each later call against it.

A graph reads static memory of one geometry. It serves calls whose tensors have the same shapes and dtypes, and whose
plain values are equal. Any other call is refused, and the error names all differences. Strides may differ, since the
copy into static memory changes them to those of the sample; the alignment may not. A tensor may need no gradient
although the sample needed one: the gradient is then computed and not used.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument, SignatureMismatch
from stepgraph.core.tensor_attributes import NONE, as_given, attributes_in
from stepgraph.core.tensor_memory import Alignment, alignment_of
from stepgraph.core.tree import Structure
from stepgraph.engine.guards.signature import (
    AMBIENT_NAMES,
    Signature,
    ambient_key,
    find_differences,
    leaf_keys,
    refuse_arguments,
)
from stepgraph.engine.guards.signature.key import alignment_in

_GRAD = AMBIENT_NAMES.index("grad mode")
_INFERENCE = AMBIENT_NAMES.index("inference mode")


class CallShape:
    """One captured call."""

    def __init__(
        self,
        name: str,
        leaves: Sequence[Any],
        structure: Structure,
        arguments: tuple[str, ...],
        training: tuple[bool, ...],
        *,
        needs_backward: bool = False,
    ) -> None:
        """`training`: the modes of the modules. `needs_backward`: no call may be made without gradients."""
        self.name = name
        self._on = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
        keys = tuple(_settled_key(key) for key in leaf_keys(leaves, on=self._on))
        self.call = Signature(structure, keys, ambient_key(), training, arguments=arguments)
        self._check_sample(leaves)
        self._ambients, self._last_ambient = {self.call.ambient}, self.call.ambient
        if self.call.ambient[_GRAD] and not self.call.ambient[_INFERENCE] and not needs_backward:
            without = list(self.call.ambient)
            without[_GRAD] = False
            self._ambients.add(tuple(without))  # the same numbers, without a backward
        self._tensors = [(i, k) for i, k in enumerate(keys) if _is_tensor(k)]
        self._expected = [(i, k[0], k[1], *k[3:6]) for i, k in self._tensors]
        self._others = [(i, k) for i, k in enumerate(keys) if not _is_tensor(k)]
        found = [(i, alignment_of(leaves[i], self._on)) for i, _ in self._tensors]
        self._aligned = [(i, *alignment) for i, alignment in found if alignment is not None]
        self._is_simple = not self._others and all(len(k) == _PLAIN_KEY for _, k in self._tensors)

    def _check_sample(self, leaves: Sequence[Any]) -> None:
        try:
            refuse_arguments(leaves, self.call.names())
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.name}: {error.what}", rule=error.rule, why=error.why, fix=error.fix) from None

    @property
    def takes_gradients(self) -> bool:
        """True if it was captured with gradients enabled."""
        return bool(self.call.ambient[_GRAD])

    @property
    def geometry(self) -> tuple[Hashable, ...]:
        """Shape, strides, dtype, device and alignment of each static buffer."""
        return tuple((*key[1:5], alignment_in(key)) for _, key in self._tensors)

    def check(self, leaves: Sequence[Any], structure: Structure, ambient: tuple[Hashable, ...]) -> None:
        """Raise `SignatureMismatch` unless the graph serves this call."""
        if ambient is not self._last_ambient:  # to compare two of them costs as much as all else here
            if ambient not in self._ambients:
                raise self._mismatch(leaves, structure)
            self._last_ambient = ambient
        if structure is not self.call.structure and structure != self.call.structure:
            raise self._mismatch(leaves, structure)
        is_simple = self._is_simple
        for index, kind, shape, dtype, device, needs_grad in self._expected:
            leaf = leaves[index]
            if (
                type(leaf) is not kind
                or leaf.layout is not torch.strided
                or leaf.is_nested
                or leaf.shape != shape
                or leaf.dtype is not dtype
                or leaf.device != device
                or (leaf.requires_grad and not needs_grad)
            ):
                raise self._mismatch(leaves, structure)
            is_simple = is_simple and not leaf.__dict__
        for index, modulus, rest in self._aligned:
            if leaves[index].data_ptr() % modulus != rest:
                raise self._mismatch(leaves, structure)
        if not is_simple and self._differs_otherwise(leaves):
            raise self._mismatch(leaves, structure)

    def _differs_otherwise(self, leaves: Sequence[Any]) -> bool:
        keys = leaf_keys(leaves)
        if any(keys[index] != key for index, key in self._others):
            return True
        return any(_beside(key, keys[index]) != _beside(key, key) for index, key in self._tensors)

    def _mismatch(self, leaves: Sequence[Any], structure: Structure) -> SignatureMismatch:
        ambient = self.call.ambient if ambient_key() in self._ambients else ambient_key()
        known = list(self.call.leaves)
        keys = []
        for index, key in enumerate(map(_settled_key, leaf_keys(leaves, on=self._on))):
            old = known[index] if structure == self.call.structure else None
            keys.append(_forgiven(old, key) if _is_tensor(old) and _is_tensor(key) else key)
        received = Signature(structure, tuple(keys), ambient, self.call.training, arguments=self.call.arguments)
        found = [str(difference) for difference in find_differences(self.call, received)]
        return SignatureMismatch(
            f"{self.name}: this call differs from the sample that its graphs were captured from",
            rule="sample-mismatch",
            details=found[:8],
            why="a graph replays fixed addresses and shapes, and every value that is not a tensor is baked in.",
            fix="make the call like the sample, or capture with samples like this call (after .reset()).",
        )


_PLAIN_KEY = 8


def _is_tensor(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) >= _PLAIN_KEY


def _settled_key(key: Hashable) -> Any:
    """Reduce `requires_grad` to a flag: a computed tensor and a leaf have the same graph."""
    return (*key[:5], bool(key[5]), *key[6:]) if _is_tensor(key) else key  # type: ignore[index]


def _forgiven(old: Any, key: Any) -> Any:
    """Return a tensor's key, with the sample's values where a difference is allowed."""
    strides = old[2] if old[1] == key[1] else key[2]
    return (
        *key[:2],
        strides,
        *key[3:5],
        old[5] if old[5] else key[5],
        *key[6:8],
        *_beside(old, key),
        *(() if (alignment := alignment_in(key)) is None else (alignment,)),
    )


def _beside(old: Any, key: Any) -> tuple[Any, ...]:
    """Return the parts of a tensor's key besides its geometry that count: the attributes set on the tensor.

    Its identity counts, too, if it counted for the sample: a tensor passed twice has one buffer, and a parameter is
    used itself.
    """
    attributes, old = attributes_in(key), [part for part in old if type(part) is not Alignment]
    own = () if attributes is NONE else (attributes,)
    identity = (part for part in key[_PLAIN_KEY + len(own) :] if type(part) is not Alignment)
    has_identity = len(old) > _PLAIN_KEY + (attributes_in(old) is not NONE)
    return (*own, *identity) if has_identity else own


def detached(leaf: Any) -> Any:
    """Return an argument for warm-up: a copy, so that the caller's tensor does not change."""
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
        return as_given(leaf.detach().clone(), leaf).requires_grad_(leaf.requires_grad)
    return leaf
