"""A `CallShape` describes the call that a graph was captured for, and checks each later call against it.

A graph reads static memory of one geometry. A call whose tensors have the same shapes and dtypes is copied there, whose
plain values are the same is the same call; anything else is refused with the names of all that differs. Strides may
differ, since the copy brings a tensor to those of the sample, and a tensor that needs no gradient may come where the
sample needed one: the gradient is computed and nobody asks for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from stepgraph.errors import InvalidArgument, SignatureMismatch
from stepgraph.signature import (
    AMBIENT_NAMES,
    Signature,
    ambient_key,
    find_differences,
    leaf_keys,
    refuse_arguments,
)
from stepgraph.signature.attributes import NONE, as_given, attributes_in
from stepgraph.tree import Structure

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
        *,
        needs_backward: bool = False,
    ) -> None:
        """`needs_backward`: each call has one, so that none can come without gradients."""
        self.name = name
        keys = tuple(_settled_key(key) for key in leaf_keys(leaves))
        self.call = Signature(structure, keys, ambient_key(), arguments=arguments)
        self._check_sample(leaves)
        self._ambients = {self.call.ambient}
        if self.call.ambient[_GRAD] and not self.call.ambient[_INFERENCE] and not needs_backward:
            without = list(self.call.ambient)
            without[_GRAD] = False
            self._ambients.add(tuple(without))  # the same numbers, and nothing for a backward
        self._tensors = [(i, k) for i, k in enumerate(keys) if _is_tensor(k)]
        self._others = [(i, k) for i, k in enumerate(keys) if not _is_tensor(k)]
        self._is_simple = not self._others and all(len(k) == _PLAIN_KEY for _, k in self._tensors)

    def _check_sample(self, leaves: Sequence[Any]) -> None:
        try:
            refuse_arguments(leaves, self.call.names())
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.name}: {error.what}", rule=error.rule, why=error.why, fix=error.fix) from None

    @property
    def takes_gradients(self) -> bool:
        """Whether it was captured with gradients on."""
        return bool(self.call.ambient[_GRAD])

    @property
    def geometry(self) -> tuple[Hashable, ...]:
        """What its static buffers look like."""
        return tuple(key[1:5] for _, key in self._tensors)

    def check(self, leaves: Sequence[Any], structure: Structure, ambient: tuple[Hashable, ...]) -> None:
        """Raise `SignatureMismatch` unless the graph serves this call."""
        if ambient not in self._ambients or structure != self.call.structure:
            raise self._mismatch(leaves, structure)
        is_simple = self._is_simple
        for index, key in self._tensors:
            leaf = leaves[index]
            if (
                type(leaf) is not key[0]
                or leaf.shape != key[1]
                or leaf.dtype is not key[3]
                or leaf.device != key[4]
                or (leaf.requires_grad and not key[5])
            ):
                raise self._mismatch(leaves, structure)
            is_simple = is_simple and not leaf.__dict__
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
        for index, key in enumerate(map(_settled_key, leaf_keys(leaves))):
            old = known[index] if structure == self.call.structure else None
            keys.append(_forgiven(old, key) if _is_tensor(old) and _is_tensor(key) else key)
        received = Signature(structure, tuple(keys), ambient, arguments=self.call.arguments)
        found = [str(difference) for difference in find_differences(self.call, received)]
        return SignatureMismatch(
            f"{self.name}: a call unlike the sample that its graphs were captured from",
            rule="sample-mismatch",
            details=found[:8],
            why="a graph replays fixed addresses and shapes, and every value that is not a tensor is baked in.",
            fix="call it as the sample says, or capture with samples of this look (after .reset()).",
        )


_PLAIN_KEY = 8


def _is_tensor(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) >= _PLAIN_KEY


def _settled_key(key: Hashable) -> Any:
    """Whether a tensor that needs a gradient was computed or is a leaf makes no graph another."""
    return (*key[:5], bool(key[5]), *key[6:]) if _is_tensor(key) else key  # type: ignore[index]


def _forgiven(old: Any, key: Any) -> Any:
    """A tensor's key without what may differ."""
    strides = old[2] if old[1] == key[1] else key[2]
    return (
        *key[:2],
        strides,
        *key[3:5],
        old[5] if old[5] else key[5],
        *key[6:8],
        *_beside(old, key),
    )


def _beside(old: Any, key: Any) -> tuple[Any, ...]:
    """What counts of a tensor's key beside its geometry, against that of the sample: what hangs on the tensor.

    And its identity, where that counted for the sample: a tensor that was given twice has one buffer, a parameter is
    the thing itself.
    """
    attributes = attributes_in(key)
    own = () if attributes is NONE else (attributes,)
    is_told = len(old) > _PLAIN_KEY + (attributes_in(old) is not NONE)
    return (*own, *key[_PLAIN_KEY + len(own) :]) if is_told else own


def same_modes(modes: Sequence[dict[str, Any]], captured: Sequence[bool]) -> bool:
    """Whether all modules are in the mode they were captured in."""
    return all(mode["training"] is flag for mode, flag in zip(modes, captured, strict=True))


def detached(leaf: Any) -> Any:
    """An argument for warm-up: a tensor of its own, so that nothing happens to the caller's."""
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
        return as_given(leaf.detach().clone(), leaf).requires_grad_(leaf.requires_grad)
    return leaf
