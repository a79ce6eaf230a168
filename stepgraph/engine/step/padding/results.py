"""Finds which dimensions of a step's results are bucketed, and cuts them back.

A result of size 256 may have the padded length, or the model's width. Two sizes tell: a dimension that has the bucket's
size in each of them grows with it. So shapes are compared over all choices that were seen, of calls that differ in
their bucket only. Where only one size was seen (a list of one, or the first warm-up call), calls with other unbucketed
sizes may tell. If not, a dimension is taken for the bucketed one if nothing else is known to have that size; otherwise,
if the batch was padded, an error asks the user to say it: `"result.logits": {1: [256]}`, or `"result.logits": {}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tree import Structure, paths
from stepgraph.engine.step.padding.buckets import RESULT, Buckets, Choice, Sizes, dotted, find, invalid

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shape of each tensor among a call's results, by name."""
Dims: TypeAlias = tuple[tuple[int, int], ...]
"""(dimension, group)"""
Place: TypeAlias = tuple[str, int]
Cut: TypeAlias = tuple[str, int, int]
"""A dimension of a result, and the group to whose length it was cut."""


def result_names(structure: Structure) -> list[str]:
    """The names of a result's leaves: `result`, `result['logits']`, `result[0]`."""
    return paths(structure, RESULT)


def named_shapes(names: Sequence[str], leaves: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    named = zip(names, leaves, strict=True)
    return {name: tuple(leaf.shape) for name, leaf in named if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class Doubt:
    """A dimension that has a bucket's size, perhaps for another reason."""

    name: str
    dim: int
    groups: tuple[int, ...]
    other: str | None
    """Something else of that size."""


@dataclass(frozen=True, slots=True)
class ResultDims:
    """The bucketed dimensions of a step's results, as far as they are known."""

    groups: tuple[Sizes, ...]
    dims: Mapping[str, Dims]
    """By name, as in `result_names`."""
    doubts: tuple[Doubt, ...] = ()
    derived: tuple[str, ...] = ()
    """Dimensions that change with the bucket and are not its size, in words; they are not cut."""
    sure: Mapping[Place, int | None] = field(default_factory=dict)
    """Known from several sizes: the group that a dimension grows with, or None for one that grows with none."""
    guesses: bool = False
    """Whether only one size of a dimension was seen, so that calls with other sizes may show more."""

    def check(self, choice: Choice, lengths: Sequence[int]) -> None:
        """Raise if a doubt would make a difference to this call's results."""
        for doubt in self.doubts:
            possible = {lengths[group] for group in doubt.groups}
            if doubt.other is not None:
                possible.add(choice[doubt.groups[0]])
            if len(possible) > 1:
                raise self._undecided(doubt, choice)

    def slice_back(self, names: Sequence[str], leaves: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
        """The results with bucketed dimensions cut to their lengths, as views."""
        cut = list(leaves)
        for index, name in enumerate(names):
            for dim, group in self.dims.get(name, ()):
                if cut[index].shape[dim] != lengths[group]:
                    cut[index] = cut[index].narrow(dim, 0, lengths[group])
        return cut

    def cuts(self, choice: Choice, lengths: Sequence[int]) -> set[Cut]:
        """The dimensions that are cut in a call of these lengths."""
        return {(n, dim, g) for n, dims in self.dims.items() for dim, g in dims if lengths[g] != choice[g]}

    def refuse_wrong_cuts(self, made: Iterable[Cut]) -> None:
        """Raise if a dimension that was cut in earlier calls turns out not to be that group's."""
        for name, dim, group in sorted(made):
            if (dim, group) not in self.dims.get(name, ()):
                raise InvalidArgument(
                    f"buckets: dimension {dim} of `{name}` was taken for a padded one, and does not grow with the "
                    f"bucket",
                    rule="bucket-result",
                    why="in the first calls its size was that of the bucket and of nothing else known; where the batch "
                    "was padded, this result was cut short. Later calls leave it whole.",
                    fix=f'say it in buckets: "{dotted(name)}": {{}}.',
                )

    def warning(self) -> str | None:
        """The warning about results that come back padded."""
        if not self.derived:
            return None
        lines = "\n  ".join(self.derived)
        return (
            f"results change with the bucket, and are not of its size: they come back padded   [bucket-result]\n  "
            f"{lines}\nFix: cut them yourself; an entry for them in buckets ({{}} for none) ends this warning."
        )

    def _undecided(self, doubt: Doubt, choice: Choice) -> InvalidArgument:
        path, size = dotted(doubt.name), choice[doubt.groups[0]]
        lists = " or ".join(str(list(self.groups[g])) for g in doubt.groups)
        also = f"{doubt.other} is {size} too" if doubt.other else f"the lists {lists} both have {size}"
        return InvalidArgument(
            f"buckets: dimension {doubt.dim} of `{doubt.name}` has the bucket's size, {size}, and {also}",
            rule="bucket-result",
            why="a result is cut back to the batch's own length where it was padded and nowhere else, and the size "
            "alone does not tell whether this is such a dimension.",
            fix=f'say it in buckets: "{path}": {{{doubt.dim}: {lists}}} if it is, "{path}": {{}} if it is not.',
        )


def result_dims(
    buckets: Buckets,
    seen: Mapping[Choice, Shapes],
    other_sizes: Mapping[int, str],
    known: Mapping[Place, int | None] | None = None,
) -> ResultDims:
    """Find which dimensions of the results are bucketed, from the shapes that each choice gave.

    `other_sizes` has the sizes of all that is known not to be bucketed, and whose they are: the call's own
    (`BoundBuckets.other_sizes`), those of parameters and buffers. `known` is what calls with other sizes have shown.
    """
    names = list(dict.fromkeys(name for shapes in seen.values() for name in shapes))
    dims: dict[str, Dims] = _said(buckets, names, seen)
    said = set(dims)
    doubts: list[Doubt] = []
    derived: list[str] = []
    sure: dict[Place, int | None] = {}
    guesses = False
    for name in names:
        if name in said:
            continue
        found = {choice: shapes[name] for choice, shapes in seen.items() if name in shapes}
        ranks = {len(shape) for shape in found.values()}
        if len(ranks) > 1:
            derived.append(f"{name}: {', '.join(str(list(shape)) for shape in found.values())}")
            continue
        mine: list[tuple[int, int]] = []
        for dim in range(ranks.pop()):
            sizes = {choice: shape[dim] for choice, shape in found.items()}
            groups = _growing_with(sizes, len(buckets.groups))
            constant = len(set(sizes.values())) == 1
            if not groups or (len(groups) == 1 and not constant):
                sure[name, dim] = groups[0] if groups else None
            elif known is not None and known.get((name, dim), -1) in (None, *groups):
                groups = tuple(g for g in groups if g == known[name, dim])
                guesses = True
            else:
                guesses = True
                other = other_sizes.get(next(iter(sizes.values()))) if constant else None
                if other is not None or len(groups) > 1:
                    doubts.append(Doubt(name, dim, groups, other))
            if groups:
                mine.append((dim, groups[0]))
            elif not constant:
                told = ", ".join(f"{size} in bucket {_told(choice)}" for choice, size in sizes.items())
                derived.append(f"{name}, dimension {dim}: {told}")
        if mine:
            dims[name] = tuple(mine)
    cut = {name: found for name, found in dims.items() if found}
    return ResultDims(buckets.groups, cut, tuple(doubts), tuple(derived), sure, guesses)


def _growing_with(sizes: Mapping[Choice, int], num_groups: int) -> tuple[int, ...]:
    return tuple(g for g in range(num_groups) if all(size == choice[g] for choice, size in sizes.items()))


def _said(buckets: Buckets, names: Sequence[str], seen: Mapping[Choice, Shapes]) -> dict[str, Dims]:
    said: dict[str, Dims] = {}
    told = {name: str(list(shape)) for shapes in seen.values() for name, shape in shapes.items()}
    absent = []
    for leaf in buckets.results:
        if leaf.name not in names and dotted(leaf.name) not in map(dotted, names):
            absent.append(leaf.name)
            continue
        name = names[find(leaf.name, names, [told[n] for n in names], "what the step returns")]
        for choice, shape in [(choice, shapes[name]) for choice, shapes in seen.items() if name in shapes]:
            for dim, group in leaf.dims:
                if not -len(shape) <= dim < len(shape) or shape[dim] != choice[group]:
                    raise invalid(
                        f"buckets: dimension {dim} of `{name}` does not have the bucket's size, {choice[group]}",
                        details=[f"shape  {list(shape)}"],
                        why="only a dimension that was padded can be cut back.",
                        fix=f"name the dimension that has it, or leave `{leaf.name}` out of buckets.",
                    )
        said[name] = leaf.dims
    if absent and any(
        size in choice
        for choice, shapes in seen.items()
        for name, shape in shapes.items()
        for size in (shape if name not in said else ())
    ):  # not one that only other calls return, an evaluation perhaps: here it may be a name misspelt
        find(absent[0], names, [told[n] for n in names], "what the step returns")
    return said


def _told(choice: Choice) -> str:
    return " x ".join(map(str, choice))
