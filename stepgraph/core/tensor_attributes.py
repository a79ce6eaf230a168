"""A buffer gets the class and the Python attributes of its tensor argument (`x.scale = 3.0`).

A graph is captured on buffers in the place of the arguments, and code may read attributes of an argument. So a buffer
gets the argument's plain attributes (numbers, strings, enums, dtypes, tuples of these), and they are part of the call's
signature. Anything else, such as a tensor, would stay that of the capture, and is refused. Marks that libraries leave
for each other are ignored: they say how a tensor is to be treated, not what is computed. A tensor of a wrapper class
keeps its data in attributes, which the class copies itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.plain_values import is_plain, token
from stepgraph.core.storage import special_kind
from stepgraph.core.wording import with_article

_MARKS = (
    *("_dynamo_", "_has_dynamo_", "_specialize_on"),
    *("_do_not_clear", "activation_offloading", "offloading_activation", "weight_offloading"),
)
"""Prefixes of the names of marks: those of torch's compiler, and of Transformer Engine."""


class Attributes:
    """The Python attributes of one tensor, compared by name and value."""

    __slots__ = ("_key", "others", "values")

    def __init__(self, found: dict[str, Any]) -> None:
        self.values = {name: value for name, value in found.items() if is_plain(value)}
        self.others = {name: type(value) for name, value in found.items() if name not in self.values}
        """The classes of the others."""
        self._key = (frozenset((n, token(v)) for n, v in self.values.items()), frozenset(self.others.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attributes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        values = [f".{name}={value!r}" for name, value in self.values.items()]
        return ", ".join(values + [f".{name}=<{kind.__name__} object>" for name, kind in self.others.items()])

    def difference(self, other: Attributes) -> str | None:
        """The end of a sentence about the first attribute that differs."""
        for name in (*self.values, *self.others, *other.values, *other.others):
            mine, its = self._at(name), other._at(name)
            if mine != its:
                return f".{name}` was {'added' if mine is None else 'removed' if its is None else 'changed'}"
        return None

    def _at(self, name: str) -> Any:
        return token(self.values[name]) if name in self.values else self.others.get(name)


NONE = Attributes({})


def attributes_on(tensor: torch.Tensor) -> Attributes:
    """The attributes of a tensor, without marks. Those of a parameter do not count: no buffer takes its place."""
    found = tensor.__dict__
    if not found or isinstance(tensor, torch.nn.Parameter) or _is_wrapper(type(tensor)):
        return NONE
    found = {name: value for name, value in found.items() if not name.startswith(_MARKS)}
    return Attributes(found) if found else NONE


def attributes_in(key: Any) -> Attributes:
    """The attributes of the tensor that a leaf's key is of."""
    return key[8] if len(key) > 8 and isinstance(key[8], Attributes) else NONE


def put_on(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    """Give a buffer the attributes of the tensor that a leaf's key is of."""
    tensor.__dict__.update(attributes_in(key).values)
    return tensor


def as_given(made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A tensor made in the place of a given one, with the class and attributes of that one."""
    if type(made) is not type(given):
        if _is_wrapper(type(given)):
            raise InvalidArgument(
                f"an argument is {with_article(type(given))}, and a buffer for it is {with_article(type(made))}",
                rule="tensor-class",
                why="a step is captured on buffers in the place of its arguments, and may treat them differently.",
                fix="pass plain tensors, and put them together inside the step.",
            )
        made = made.as_subclass(type(given))
    if given.__dict__:
        made.__dict__.update(attributes_on(given).values)
    return made


def refuse_unlike_buffers(leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Refuse tensors that no buffer can replace: of a special kind, with attributes not plain, or without data."""
    for leaf, name in zip(leaves, names, strict=True):
        if not issubclass(type(leaf), torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
            continue
        if leaf.is_meta:
            raise InvalidArgument(
                f"`{name}` is a tensor on the meta device",
                rule="tensor-class",
                why="it has no data that could be copied into a buffer.",
                fix="pass its shape (x.shape, a plain value), or let the step take the tensor from a variable.",
            )
        if special := special_kind(leaf):
            raise InvalidArgument(
                f"`{name}` is a {special}",
                rule="tensor-class",
                why="an argument is copied into a buffer, which has only shape, strides and dtype.",
                fix="pass the plain tensors that it consists of (its values, indices, offsets), and put them together "
                "elsewhere, or leave the part that takes it out of the graphs.",
            )
        for attribute, kind in attributes_on(leaf).others.items():
            raise InvalidArgument(
                f"`{name}` has an attribute `{attribute}` that is {with_article(kind)}",
                rule="tensor-attribute",
                why="the argument is copied into a buffer; its attribute would be that of the capture at every "
                "replay, unless it is a plain value (a number, a string, an enum, a tuple of these).",
                fix=f"pass it as an argument of its own, or remove it before the call (del {name}.{attribute}).",
            )


def changed_attributes(arguments: Iterable[tuple[str, Any, Any]]) -> str | None:
    """The first attribute that a call has changed on tensors it was given, in words.

    `arguments` are names, leaves as they are now, and their keys from before the call.
    """
    for name, leaf, key in arguments:
        if issubclass(type(leaf), torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
            difference = attributes_in(key).difference(attributes_on(leaf))
            if difference is not None:
                return f"attribute `{name}{difference}"
    return None


def _is_wrapper(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors defines its own operations: its instances hold other tensors."""
    return kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
