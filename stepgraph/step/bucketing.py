"""Bucketing pads the arguments of a call to a bucket, and cuts its results back to their true size.

Which dimensions of the results are padded is learned from what calls of one family return in different buckets. A
family is all that tells graphs apart but the bucket: the arguments' structure, plain values, the sizes that have no
buckets, train or eval, the flags of the process. Calls of different families may return different things under one
name, and are never compared, but for one question: where a family has one bucket only, one that differs from it in
unbucketed sizes alone may know. A call that returns other shapes than its family did in the same bucket shows that
something out of sight has changed: what was learned is forgotten.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from stepgraph.errors import InvalidArgument
from stepgraph.frames import warn_user
from stepgraph.observe.finder import reachable
from stepgraph.observe.nonfinite import Flags, flags_over
from stepgraph.padding import BoundBuckets, Buckets, Padded, ResultDims, named_shapes, result_dims, result_names
from stepgraph.padding.results import Cut, Place, Shapes
from stepgraph.signature import AmbientReader, Signature
from stepgraph.tree import Structure, flatten, unflatten

Example: TypeAlias = tuple[tuple[int, ...], list[Any]]
"""The sizes of a bucket, and the leaves of a call that fills it."""

_training = operator.itemgetter("training")
_MAX_FAMILIES = 1024


class _Name(NamedTuple):
    """A family, by what its calls have in common."""

    structure: Structure
    around: Hashable
    """The process's flags, and the modes of the modules."""
    rough: Hashable
    """The arguments, but for all sizes."""
    exact: Hashable
    """The arguments, but for bucketed sizes."""


@dataclass(slots=True)
class _Family:
    """What calls that differ in their bucket alone have returned."""

    seen: dict[tuple[int, ...], Shapes]
    dims: ResultDims
    learned_at: int
    """How much was known of the step's results by then."""
    cuts: set[Cut] = field(default_factory=set)
    """What was cut so far."""


class BucketedCall(NamedTuple):
    """A call in its bucket."""

    padded: Padded
    name: _Name

    @property
    def leaves(self) -> list[Any]:
        """What the step is called with."""
        return self.padded.leaves


class Bucketing:
    """The buckets of one step, bound to the structures of its calls, and what is known of its results."""

    def __init__(self, step: Callable[..., Any], name: str, arguments: tuple[str, ...], buckets: Buckets) -> None:
        self._step, self._name, self._arguments, self._buckets = step, name, arguments, buckets
        self._bound: dict[Structure, BoundBuckets] = {}
        self._families: dict[_Name, _Family] = {}
        self._num_learned = 0
        self._ambient = AmbientReader()
        self._modes: list[dict[str, Any]] | None = None
        self._told: set[str] = set()

    def pad(self, leaves: Sequence[Any], structure: Structure) -> BucketedCall:
        """The call in its bucket."""
        bound = self._bound.get(structure)
        if bound is None:
            names = Signature(structure, (), (), arguments=self._arguments).names()
            bound = self._bound[structure] = BoundBuckets(self._buckets, names, leaves)
        padded = bound.pad(leaves)
        name = self._name_of(structure, padded.leaves)
        known = self._families.get(name)
        if known is None:
            self._modes = None  # the step may name other modules than it did
            name = self._name_of(structure, padded.leaves)
        elif padded.choice in known.seen:
            known = self._learn(name, padded.choice, padded.leaves, known.seen[padded.choice])
            known.dims.check(padded.choice, padded.lengths)
        return BucketedCall(padded, name)

    def cut(self, call: BucketedCall, structure: Structure, result: Any) -> Any:
        """The call's results at the lengths of the batch; and to the caller's tensors what was written to them."""
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
                    "the step of this call has run, and what it changed stays; its results are lost",
                ],
                why=error.why,
                fix=error.fix,
            ) from None
        if padded.lengths != padded.choice:
            family.cuts |= family.dims.cuts(padded.choice, padded.lengths)
        return unflatten(shape, family.dims.slice_back(names, leaves, padded.lengths))

    def note(self, structure: Structure, choice: tuple[int, ...], leaves: Sequence[Any], result: Any) -> None:
        """Learn from one more bucket which dimensions of the results are the padded ones."""
        found, shape = flatten(result)
        self._learn(self._name_of(structure, leaves), choice, leaves, named_shapes(result_names(shape), found))

    def flags(self, whole: Any, cut: Any) -> Flags | None:
        """For `nan_check`: flags over the results that may have had padding, as they are handed out."""
        leaves, structure = flatten(cut)
        named = zip(result_names(structure), leaves, flatten(whole)[0], strict=True)
        may_have_padded = self._buckets.may_have_padded
        return flags_over(
            (name, part)
            for name, part, padded in named
            if isinstance(padded, torch.Tensor) and may_have_padded(padded.shape)
        )

    def others(self, leaves: Sequence[Any], structure: Structure) -> tuple[list[Example], list[Example]]:
        """Calls for all buckets but this call's own, made from it: the larger ones and the smaller ones."""
        bound = self._bound[structure]
        choices = bound.all_choices(leaves)
        own = choices.index(bound.pad(leaves).choice)
        examples = [(choice, bound.example(leaves, choice)) for choice in choices]
        return examples[:own], examples[own + 1 :]

    def _learn(self, name: _Name, choice: tuple[int, ...], leaves: Sequence[Any], shapes: Shapes) -> _Family:
        """The family of a call, with what this call returned."""
        family = self._families.get(name)
        is_new = family is None or family.seen.get(choice) != shapes
        if family is not None and not is_new and (family.learned_at == self._num_learned or not family.dims.guesses):
            return family
        if is_new:
            self._num_learned += 1
        if family is not None and is_new and choice in family.seen:
            family = None  # the step is another than it was
        sizes = self._sizes_of_modules() | self._bound[name.structure].other_sizes(leaves)
        seen = {**(family.seen if family is not None else {}), choice: shapes}
        learned = _Family(seen, result_dims(self._buckets, seen, sizes, self._known(name)), self._num_learned)
        if len(self._families) >= _MAX_FAMILIES:
            self._families.clear()
        self._families[name] = learned
        if family is not None:
            learned.dims.refuse_wrong_cuts(family.cuts)
            learned.cuts = family.cuts
        warning = learned.dims.warning()
        if warning is not None and warning not in self._told:
            self._told.add(warning)
            warn_user(f"{self._name}: {warning}")
        return learned

    def _known(self, name: _Name) -> dict[Place, int | None]:
        """What families are sure of that differ from this one in unbucketed sizes alone, where they agree."""
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
        passed = [vars(m) for leaf in leaves if isinstance(leaf, torch.nn.Module) for m in leaf.modules()]
        modes = tuple(map(_training, self._modes + passed if passed else self._modes))
        return _Name(structure, (self._ambient.read(), modes), rough, exact)

    def _modules(self) -> list[torch.nn.Module]:
        return [value for value in reachable(self._step) if isinstance(value, torch.nn.Module)]

    def _sizes_of_modules(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for module in self._modules():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                for size in tensor.shape:
                    found.setdefault(size, f"a dimension of {name}")
        return found
