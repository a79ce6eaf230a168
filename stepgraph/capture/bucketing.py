"""Buckets at work: a call is padded on its way in, and its results are cut on their way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from stepgraph.frames import warn_user
from stepgraph.padding import BoundBuckets, Buckets, Padded, ResultDims, named_shapes, result_dims
from stepgraph.padding.results import Shapes, result_names
from stepgraph.signature import Signature
from stepgraph.state.reach import reachable
from stepgraph.tree import Structure, flatten, settled, unflatten

Example: TypeAlias = tuple[tuple[int, ...], list[Any]]
"""The sizes of a bucket, and the leaves of a call that fills it."""


class Bucketing:
    """The buckets of one step, bound to the structures of its calls, and what is known of its results."""

    def __init__(self, step: Callable[..., Any], name: str, arguments: tuple[str, ...], buckets: Buckets) -> None:
        self._step, self._name, self._arguments, self._buckets = step, name, arguments, buckets
        self._bound: dict[Structure, BoundBuckets] = {}
        self._seen: dict[Structure, dict[tuple[int, ...], Shapes]] = {}
        self._dims: dict[Structure, ResultDims] = {}
        self._told: set[str] = set()

    def pad(self, leaves: Sequence[Any], structure: Structure) -> Padded:
        """The call in its bucket."""
        bound = self._bound.get(structure)
        if bound is None:
            names = Signature(structure, (), (), arguments=self._arguments).names()
            bound = self._bound[settled(structure)] = BoundBuckets(self._buckets, names, leaves)
        padded = bound.pad(leaves)
        dims = self._dims.get(structure)
        if dims is not None and padded.choice in self._seen[structure]:
            dims.check(padded.choice, padded.lengths)
        return padded

    def cut(self, padded: Padded, structure: Structure, result: Any) -> Any:
        """The call's results at the lengths of the batch; and to the caller's tensors what was written to them."""
        padded.store()
        self.note(structure, padded.choice, padded.leaves, result)
        dims = self._dims[structure]
        dims.check(padded.choice, padded.lengths)
        leaves, shape = flatten(result)
        return unflatten(shape, dims.slice_back(result_names(shape), leaves, padded.lengths))

    def note(self, structure: Structure, choice: tuple[int, ...], leaves: Sequence[Any], result: Any) -> None:
        """Learn from one more bucket which dimensions of the results are the padded ones."""
        if choice in self._seen.get(structure, {}):
            return
        structure = settled(structure)
        found, shape = flatten(result)
        seen = self._seen.get(structure, {}) | {choice: named_shapes(shape, found)}
        others = self._sizes_of_modules() | self._bound[structure].other_sizes(leaves)
        self._dims[structure] = result_dims(self._buckets, seen, others, self._dims.get(structure))
        self._seen[structure] = seen
        warning = self._dims[structure].warning()
        if warning is not None and warning not in self._told:
            self._told.add(warning)
            warn_user(f"{self._name}: {warning}")

    def others(self, leaves: Sequence[Any], structure: Structure) -> tuple[list[Example], list[Example]]:
        """Calls for all buckets but this call's own, made from it: the larger ones and the smaller ones."""
        bound = self._bound[structure]
        choices = bound.all_choices(leaves)
        own = choices.index(bound.pad(leaves).choice)
        examples = [(choice, bound.example(leaves, choice)) for choice in choices]
        return examples[:own], examples[own + 1 :]

    def _sizes_of_modules(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for value in reachable(self._step):
            if isinstance(value, torch.nn.Module):
                for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                    for size in tensor.shape:
                        found.setdefault(size, f"a dimension of {name}")
        return found
