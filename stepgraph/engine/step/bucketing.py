"""Bucketing pads the arguments of a call to a bucket, and cuts its results back to their true size.

It learns which dimensions of the results are padded by comparing calls of one family in different buckets. Calls of a
family agree in all that distinguishes graphs except the bucket: the structure of the arguments, plain values, sizes
without buckets, train or eval, the flags of the process. Calls of different families may return different things under
one name and are not compared, with one exception: a family that has seen only one bucket uses what another family has
learned that differs only in unbucketed sizes. If a call returns other shapes than its family did in the same bucket,
something unobserved has changed: what was learned is forgotten.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.frames import warn_user
from stepgraph.core.tree import Structure, flatten, unflatten
from stepgraph.engine.guards.signature import AmbientReader, Signature
from stepgraph.engine.observe.finder import reachable
from stepgraph.engine.step.nonfinite import Flags, flags_over
from stepgraph.engine.step.padding import (
    BoundBuckets,
    Buckets,
    Padded,
    ResultDims,
    named_shapes,
    result_dims,
    result_names,
)
from stepgraph.engine.step.padding.results import Cut, Place, Shapes

Example: TypeAlias = tuple[tuple[int, ...], list[Any]]
"""The sizes of a bucket, and the leaves of a call that fills it."""

_training = operator.itemgetter("training")
_MAX_FAMILIES = 1024


class _Name(NamedTuple):
    """The key of a family: what its calls have in common."""

    structure: Structure
    around: Hashable
    """The flags of the process, and the modes of the modules."""
    rough: Hashable
    """The arguments without any sizes."""
    exact: Hashable
    """The arguments without bucketed sizes."""


@dataclass(slots=True)
class _Family:
    """What calls returned that differ only in their bucket."""

    seen: dict[tuple[int, ...], Shapes]
    dims: ResultDims
    learned_at: int
    """The value of `Bucketing._num_learned` at the time."""
    cuts: set[Cut] = field(default_factory=set)
    """Cuts made so far."""


class BucketedCall(NamedTuple):
    """A call, padded to its bucket."""

    padded: Padded
    name: _Name

    @property
    def leaves(self) -> list[Any]:
        return self.padded.leaves


class Bucketing:
    """The buckets of one step, bound to the structures of its calls, and what it has learned about the results."""

    def __init__(self, step: Callable[..., Any], name: str, arguments: tuple[str, ...], buckets: Buckets) -> None:
        self._step, self._name, self._arguments, self._buckets = step, name, arguments, buckets
        self._bound: dict[Structure, BoundBuckets] = {}
        self._families: dict[_Name, _Family] = {}
        self._num_learned = 0
        self._ambient = AmbientReader()
        self._modes: list[dict[str, Any]] | None = None
        self._warned: set[str] = set()

    def pad(self, leaves: Sequence[Any], structure: Structure) -> BucketedCall:
        """Pad a call to its bucket."""
        bound = self._bound.get(structure)
        if bound is None:
            names = Signature(structure, (), (), arguments=self._arguments).names()
            bound = self._bound[structure] = BoundBuckets(self._buckets, names, leaves)
        padded = bound.pad(leaves)
        if padded.lengths != padded.choice:
            self._warn(bound.warning)
        name = self._name_of(structure, padded.leaves)
        known = self._families.get(name)
        if known is None:
            self._modes = None  # the step may refer to other modules now
            name = self._name_of(structure, padded.leaves)
        elif padded.choice in known.seen:
            known = self._learn(name, padded.choice, padded.leaves, known.seen[padded.choice])
            known.dims.check(padded.choice, padded.lengths)
        return BucketedCall(padded, name)

    def cut(self, call: BucketedCall, structure: Structure, result: Any) -> Any:
        """Cut a call's results to the lengths of the batch, and copy the step's writes to the caller's tensors."""
        padded = call.padded
        padded.store()
        leaves, shape = flatten(result)
        names = result_names(shape)
        try:
            family = self._learn(call.name, padded.choice, padded.leaves, named_shapes(names, leaves))
            family.dims.check(padded.choice, padded.lengths)
        except InvalidArgument as error:
            raise InvalidArgument(
                error.what,
                rule=error.rule,
                details=[
                    *error.details,
                    "the step of this call has run: its changes stay, its results are lost",
                ],
                why=error.why,
                fix=error.fix,
            ) from None
        if padded.lengths != padded.choice:
            family.cuts |= family.dims.cuts(padded.choice, padded.lengths)
        return unflatten(shape, family.dims.slice_back(names, leaves, padded.lengths))

    def note(self, structure: Structure, choice: tuple[int, ...], leaves: Sequence[Any], result: Any) -> None:
        """Learn from one more bucket which dimensions of the results are padded."""
        found, shape = flatten(result)
        self._learn(self._name_of(structure, leaves), choice, leaves, named_shapes(result_names(shape), found))

    def flags(self, whole: Any, cut: Any) -> Flags | None:
        """For `nan_check`: return flags over those results, once cut, that may have had padding."""
        leaves, structure = flatten(cut)
        named = zip(result_names(structure), leaves, flatten(whole)[0], strict=True)
        may_have_padded = self._buckets.may_have_padded
        return flags_over(
            (name, part)
            for name, part, padded in named
            if issubclass(type(padded), torch.Tensor) and may_have_padded(padded.shape)
        )

    def others(self, leaves: Sequence[Any], structure: Structure) -> tuple[list[Example], list[Example]]:
        """Make example calls from this one for all other buckets. Return the larger ones and the smaller ones."""
        bound = self._bound[structure]
        choices = bound.all_choices(leaves)
        own = choices.index(bound.pad(leaves).choice)
        examples = [(choice, bound.example(leaves, choice)) for choice in choices]
        return examples[:own], examples[own + 1 :]

    def _learn(self, name: _Name, choice: tuple[int, ...], leaves: Sequence[Any], shapes: Shapes) -> _Family:
        """Return the family of a call, updated with what this call returned."""
        family = self._families.get(name)
        is_new = family is None or family.seen.get(choice) != shapes
        if family is not None and not is_new and (family.learned_at == self._num_learned or not family.dims.guesses):
            return family
        if is_new:
            self._num_learned += 1
        if family is not None and is_new and choice in family.seen:
            family = None  # the step has changed
        sizes = self._sizes_of_modules() | self._bound[name.structure].other_sizes(leaves)
        seen = {**(family.seen if family is not None else {}), choice: shapes}
        learned = _Family(seen, result_dims(self._buckets, seen, sizes, self._known(name)), self._num_learned)
        if len(self._families) >= _MAX_FAMILIES:
            self._families.clear()
        self._families[name] = learned
        if family is not None:
            learned.dims.refuse_wrong_cuts(family.cuts)
            learned.cuts = family.cuts
        self._warn(learned.dims.warning())
        return learned

    def _warn(self, warning: str | None) -> None:
        """Warn once."""
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            warn_user(f"{self._name}: {warning}")

    def _known(self, name: _Name) -> dict[Place, int | None]:
        """Return what all families agree on that differ from this one only in unbucketed sizes."""
        found: dict[Place, set[int | None]] = defaultdict(set)
        for other, family in self._families.items():
            if other.exact != name.exact and other[:3] == name[:3]:
                for place, group in family.dims.sure.items():
                    found[place].add(group)
        return {place: groups.pop() for place, groups in found.items() if len(groups) == 1}

    def _name_of(self, structure: Structure, leaves: Sequence[Any]) -> _Name:
        if self._modes is None:
            self._modes = [vars(module) for root in self._modules() for module in root.modules()]
        exact, rough = self._bound[structure].kind(leaves)
        passed = [vars(m) for leaf in leaves if issubclass(type(leaf), torch.nn.Module) for m in leaf.modules()]
        modes = tuple(map(_training, self._modes + passed if passed else self._modes))
        return _Name(structure, (self._ambient.read(), modes), rough, exact)

    def _modules(self) -> list[torch.nn.Module]:
        return [value for value in reachable(self._step) if issubclass(type(value), torch.nn.Module)]

    def _sizes_of_modules(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for module in self._modules():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                for size in tensor.shape:
                    found.setdefault(size, f"a dimension of {name}")
        return found
