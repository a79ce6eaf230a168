"""A recording leaves none of its tensors in the program's containers.

A step that fills a cache while it is recorded (`if key not in masks: masks[key] = make_mask(key)`) puts a tensor there
whose bytes nobody has computed. If the recording is dropped, the eager call after it finds the key and reads them. So
the containers in reach are noted before a recording. Those that hold such a tensor afterwards are put back.

Torch's cache of `parametrize.cached()` counts as one, since no code of the user's names it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

from stepgraph.core.plain_values import attributes_of, items_of, kept_by, results_of
from stepgraph.engine.guards.host_values.parts import Place, attribute_of
from stepgraph.engine.observe.finder import Found
from stepgraph.engine.observe.holdings import Kept, kept_as_it_is

Selects = Callable[[list[torch.Tensor]], list[torch.Tensor]]
_DEPTH = 3
"""How many new containers may lead to a tensor, as in `escaped_tensors`."""
_LARGE = 4096
"""The items of a larger container are taken for data."""


class ContainersBefore:
    """What containers hold, as they are now. `selects` picks the tensors that are in the memory of graphs."""

    def __init__(self, found: Found, selects: Selects) -> None:
        self._selects = selects
        self._kept: list[tuple[Callable[[], list[Any]], list[Any], Kept]] = []
        for one in (*found.containers, parametrize._cache):
            kept = CacheBefore(one) if type(one) is functools._lru_cache_wrapper else kept_as_it_is(one)
            self._note(functools.partial(_values_in, one), kept)
        for place in found.variables:
            self._note(functools.partial(_value_at, place), kept_as_it_is(place))

    def _note(self, read: Callable[[], list[Any]], kept: Kept) -> None:
        if len(values := read()) <= _LARGE:
            self._kept.append((read, values, kept))

    def take_back(self) -> None:
        """Put back the containers that have got a tensor of the recording."""
        for read, values, kept in self._kept:
            before = set(map(id, values))
            new = [value for value in read() if id(value) not in before]
            if new and self._selects(list(_tensors_in(new, _DEPTH))):
                kept.restore()
        self._kept.clear()


class CacheBefore(Kept):
    """The results of a function with `functools.lru_cache`, in the dictionary that the cache looks them up in."""

    def __init__(self, cache: Any) -> None:
        self._results = kept_by(cache)
        self._keys = list(self._results)

    def restore(self) -> None:
        """Forget the newer results. Clearing the cache would lose the older ones, which may be state."""
        before = set(map(id, self._keys))
        for key in [key for key in self._results if id(key) not in before]:
            del self._results[key]


def _values_in(container: Any) -> list[Any]:
    if type(container) is functools._lru_cache_wrapper:
        return results_of(container)
    if issubclass(type(container), dict):
        return list(dict.values(container))
    return list(items_of(container))


def _value_at(place: Place) -> list[Any]:
    is_item = issubclass(type(place.where), dict)
    return [place.where.get(place.key) if is_item else attribute_of(place.where, "cell_contents")]


def _tensors_in(values: Iterable[Any], depth: int) -> Iterator[torch.Tensor]:
    for value in values:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            yield value
        elif depth > 1 and issubclass(kind, (dict, list, tuple, set, frozenset, deque)):
            inner = dict.values(value) if issubclass(kind, dict) else items_of(value)
            yield from _tensors_in(list(inner)[:_LARGE], depth - 1)
        elif depth > 1 and not issubclass(kind, type) and (own := attributes_of(value)):
            yield from _tensors_in(list(own.values()), depth - 1)
