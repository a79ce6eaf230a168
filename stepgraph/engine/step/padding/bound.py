"""Buckets for calls of one structure: chooses the size of each group and pads the call's tensors to it.

Names are looked up once; a call then costs a look at the bucketed sizes. A padded tensor is dense, in the order of the
strides of the tensor it came from, so that all batches of one bucket have one signature. For the same reason a tensor
that has the bucket's size and gaps between its rows (`tokens[:, :-1]`) is copied; any other is passed on as it is.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tensor_attributes import as_given, attributes_on
from stepgraph.engine.guards.signature import leaf_key, refuse_gradient
from stepgraph.engine.step.padding.buckets import (
    RESULT,
    Buckets,
    Choice,
    Number,
    described,
    dotted,
    find,
    invalid,
    same_leaf,
)
from stepgraph.engine.step.padding.layout import Copy, Made, copied, dense_strides, holds, plan_copy

Kind: TypeAlias = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Padded:
    """A call's leaves at their bucket's sizes."""

    leaves: list[Any]
    choice: Choice
    """The size of each group; calls with equal choices have equal shapes."""
    lengths: tuple[int, ...]
    """The size of each group's largest member before padding."""
    made: list[Made]
    known_written: set[int]
    """Leaves that earlier calls wrote to."""

    def store(self) -> None:
        """After the step: copy what it wrote to these tensors, and their gradients, back to the caller's own."""
        for made in self.made:
            if made.was_written():
                self.known_written.add(made.index)
            if made.index in self.known_written:
                made.store()
            made.store_grad()


@dataclass(frozen=True, slots=True)
class _Member:
    index: int
    name: str
    dims: tuple[tuple[int, int], ...]
    pad: Number
    is_pad_given: bool
    kind: int
    """Equal for leaves that are padded alike: one tensor passed as both stays one."""


class _Plan(NamedTuple):
    choice: Choice
    lengths: tuple[int, ...]
    copies: list[Copy | None]


_MAX_PLANS = 4096
_NUM_LOOKS = 4
"""How many calls of one bucket are searched for writes that torch does not count."""


class BoundBuckets:
    """The buckets of calls with one structure."""

    def __init__(self, buckets: Buckets, names: Sequence[str], leaves: Sequence[Any]) -> None:
        self.buckets = buckets
        self._names = tuple(names)
        self._members: list[_Member] = []
        kinds: list[tuple[object, ...]] = []
        taken: dict[int, str] = {}
        _refuse_argument_called_result(buckets, names)
        told = [described(leaf) for leaf in leaves]
        for leaf in buckets.arguments:
            index = find(leaf.name, names, told, "the call")
            if taken.setdefault(index, leaf.name) != leaf.name:
                raise same_leaf(taken[index], leaf.name, f", {names[index]}")
            kind = (leaf.dims, type(leaf.pad), repr(leaf.pad))
            kinds += [kind] if kind not in kinds else []
            self._members.append(
                _Member(index, names[index], leaf.dims, leaf.pad, leaf.is_pad_given, kinds.index(kind))
            )
        self._dims = {member.index: [dim for dim, _ in member.dims] for member in self._members}
        self._indices = [member.index for member in self._members]
        self._plans: dict[tuple[Hashable, ...], _Plan] = {}
        self._written: set[int] = set()
        self._looks: Counter[Hashable] = Counter()
        self.lengths(leaves)
        for member in self._members:
            _fill(member, leaves[member.index])
        self.warning = self._warning(leaves)
        """A warning for the first call that is padded, or None."""

    def pad(self, leaves: Sequence[Any]) -> Padded:
        """Pad the call: each group to the smallest size that holds its largest member."""
        try:
            members = [leaves[i] for i in self._indices]
            key = tuple([(type(leaf), leaf.shape, leaf.stride(), leaf.dtype) for leaf in members])
            plan = self._plans.get(key)
        except (AttributeError, RuntimeError):  # no tensor, or one without strides
            self.lengths(leaves)
            raise
        if plan is None:
            lengths = self.lengths(leaves)
            choice = self.choose(lengths, leaves)
            plan = _Plan(choice, lengths, self._copies(leaves, choice))
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        kind = (plan.choice, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self._looks[kind] += self._looks[kind] < _NUM_LOOKS + 1
        padded, made = self._fit(leaves, plan.copies, look=self._looks[kind] <= _NUM_LOOKS)
        return Padded(padded, plan.choice, plan.lengths, made, self._written)

    def _warning(self, leaves: Sequence[Any]) -> str | None:
        """Warn of integers that are padded with 0 by default, unless the user gave any integers a pad value."""
        found = [member for member in self._members if _holds_integers(leaves[member.index])]
        if not found or any(member.is_pad_given for member in found):
            return None
        names = " and ".join(f"`{member.name}`" for member in found)
        last = dotted(found[-1].name)
        return (
            f"buckets pad {names} with 0, the default for integers   [pad-value]\n"
            "Why: 0 is also a class and a token. The padding of targets then counts in the loss, as class 0.\n"
            f'Fix: pad_values={{"{last}": -100}} for targets (cross_entropy ignores -100). If 0 is right, because a '
            f'mask hides the padding: pad_values={{"{last}": 0}}.'
        )

    def lengths(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The largest size in each group."""
        found = [0] * len(self.buckets.groups)
        for member in self._members:
            leaf = leaves[member.index]
            _check_leaf(member, leaf)
            for dim, group in member.dims:
                found[group] = max(found[group], leaf.shape[dim])
        return tuple(found)

    def choose(self, lengths: Sequence[int], leaves: Sequence[Any]) -> Choice:
        """The smallest size in each group that holds this length."""
        choice = []
        for group, (sizes, length) in enumerate(zip(self.buckets.groups, lengths, strict=True)):
            place = bisect_left(sizes, length)
            if place == len(sizes):
                raise self._overflow(group, length, leaves)
            choice.append(sizes[place])
        return tuple(choice)

    def _overflow(self, group: int, length: int, leaves: Sequence[Any]) -> InvalidArgument:
        sizes = list(self.buckets.groups[group])
        member, dim = next(
            (m, d) for m in self._members for d, g in m.dims if g == group and leaves[m.index].shape[d] == length
        )
        together = ", ".join(f'"{dotted(m.name)}"' for m in self._members for _, g in m.dims if g == group)
        return InvalidArgument(
            f"argument `{member.name}`, dimension {dim}: {length} is past the largest bucket, {sizes[-1]}",
            rule="bucket-overflow",
            details=[f"received  {described(leaves[member.index])}", f"buckets   {sizes}"],
            fix=f"add a size of at least {length} to the list of {together}, or cut the batch to {sizes[-1]}.",
        )

    def all_choices(self, leaves: Sequence[Any]) -> list[Choice]:
        """Every combination of sizes, the one with most elements first: the first capture sets the pool's size."""

        def elements(choice: Choice) -> int:
            return sum(math.prod(_target(m, leaves[m.index].shape, choice)) for m in self._members)

        return sorted(itertools.product(*self.buckets.groups), key=lambda c: (elements(c), c), reverse=True)

    def example(self, leaves: Sequence[Any], choice: Choice) -> list[Any]:
        """A call of another choice, made from this one: cut where too long, padded where too short."""
        self.lengths(leaves)
        return self._fit(leaves, self._copies(leaves, choice))[0]

    def other_sizes(self, leaves: Sequence[Any]) -> dict[int, str]:
        """Sizes that results may have from unbucketed dimensions or plain numbers, and their owners."""
        dims = {m.index: {d % leaves[m.index].ndim for d, _ in m.dims} for m in self._members}
        found: dict[int, str] = {}
        for index, (name, leaf) in enumerate(zip(self._names, leaves, strict=True)):
            if type(leaf) is int:
                found.setdefault(leaf, f"argument {name}")
            for dim, size in enumerate(leaf.shape if isinstance(leaf, torch.Tensor) else ()):
                if dim not in dims.get(index, ()):
                    found.setdefault(size, f"dimension {dim} of {name}")
        return found

    def kind(self, leaves: Sequence[Any]) -> tuple[Kind, Kind]:
        """A key for calls that differ in their bucket only: with the sizes that have no buckets, and without them."""
        exact: list[Hashable] = []
        rough: list[Hashable] = []
        for index, leaf in enumerate(leaves):
            around: Hashable
            unbucketed: tuple[int, ...] = ()
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
                around = (type(leaf), leaf.ndim, leaf.dtype, leaf.device, leaf.requires_grad, attributes_on(leaf))
                bucketed = {dim % leaf.ndim for dim in self._dims.get(index, ())}
                unbucketed = tuple(-1 if dim in bucketed else size for dim, size in enumerate(leaf.shape))
            else:
                around = leaf_key(leaf)
            exact.append((around, unbucketed))
            rough.append(around)
        return tuple(exact), tuple(rough)

    def _copies(self, leaves: Sequence[Any], choice: Choice) -> list[Copy | None]:
        """The copy that gives each member the chosen sizes; None where it has them."""
        copies: list[Copy | None] = []
        for member in self._members:
            leaf = leaves[member.index]
            shape = _target(member, leaf.shape, choice)
            strides = dense_strides(shape, leaf.stride())
            fits = shape == leaf.shape and strides == leaf.stride()
            copies.append(None if fits else plan_copy(leaf.shape, shape, strides, _fill(member, leaf)))
        return copies

    def _fit(
        self, leaves: Sequence[Any], copies: Sequence[Copy | None], *, look: bool = False
    ) -> tuple[list[Any], list[Made]]:
        fitted, made = list(leaves), []
        done: dict[tuple[int, int], torch.Tensor] = {}
        first: dict[int, int] = {}
        for member, copy in zip(self._members, copies, strict=True):
            leaf = leaves[member.index]
            key = (id(leaf), member.kind)
            known = done.get(key)
            if known is None:
                if copy is not None:
                    refuse_gradient(member.name, leaf)
                    known = as_given(copied(leaf, copy), leaf)
                    made.append(Made(member.index, member.name, leaf, known, look=look))
                elif first.setdefault(id(leaf), member.kind) == member.kind or leaf.requires_grad:
                    known = leaf
                else:  # one tensor with two pad values: two tensors in every bucket, so here too
                    known = as_given(leaf.detach(), leaf)
                done[key] = known
            fitted[member.index] = known
        return fitted, made


def _holds_integers(leaf: torch.Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool)


def _target(member: _Member, shape: Sequence[int], choice: Choice) -> tuple[int, ...]:
    target = list(shape)
    for dim, group in member.dims:
        target[dim] = choice[group]
    return tuple(target)


def _check_leaf(member: _Member, leaf: Any) -> None:
    if type(leaf) is not torch.Tensor and (not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter)):
        raise invalid(
            f"buckets: `{member.name}` is not a tensor to pad: {described(leaf)}",
            why="padding makes a larger copy of a tensor; parameters and other objects are used as they are.",
            fix=f"drop it from buckets, or pass a tensor for `{member.name}`.",
        )
    if leaf.layout is not torch.strided:
        raise invalid(
            f"buckets: `{member.name}` is a {leaf.layout} tensor",
            why="only dense tensors are padded.",
            fix=f"pass {member.name}.to_dense().",
        )
    rank = leaf.dim()
    for dim, _ in member.dims:
        if not -rank <= dim < rank:
            raise invalid(
                f"buckets: `{member.name}` has no dimension {dim}: {described(leaf)}",
                why=f"it has {rank}, counted from 0, or from -1 at the end.",
                fix=f"give a dimension between {-rank} and {rank - 1}." if rank else "drop it from buckets.",
            )
    if len(member.dims) > 1 and len({dim % rank for dim, _ in member.dims}) < len(member.dims):
        raise invalid(
            f"buckets: `{member.name}`: {[d for d, _ in member.dims]} name one dimension twice: {described(leaf)}",
            why="a dimension has one list of sizes.",
            fix="drop one of them.",
        )


def _fill(member: _Member, leaf: torch.Tensor) -> Number:
    """The member's pad value, checked against the leaf's dtype."""
    if not holds(leaf.dtype, member.pad):
        raise invalid(
            f"pad_values: `{member.name}` is {described(leaf)}, which does not hold {member.pad!r}",
            why="the padding would be filled with another number than the given one.",
            fix=f'pad_values={{"{dotted(member.name)}": ...}} with a number that fits {leaf.dtype}.',
        )
    return member.pad


def _refuse_argument_called_result(buckets: Buckets, names: Sequence[str]) -> None:
    if buckets.results and any(dotted(name).partition(".")[0] == RESULT for name in names):
        raise invalid(
            f"buckets: `{buckets.results[0].name}` could be an argument or what the step returns",
            why="`result` stands for what the step returns, and this step has an argument of that name.",
            fix="give the argument another name.",
        )
