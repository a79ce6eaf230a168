"""What lies behind objects that do not show it: the dict of a view, the results in a cache, the name in a getter.

Python's own tools keep what they work on in C. The garbage collector knows it, and so does pickle; neither runs code of
the user.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph.values.watch_values import attributes_of

_VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_GETTERS = (operator.attrgetter, operator.methodcaller)
_TORCHS = (torch.Tensor, torch.nn.Module)
_MAX_CACHED = 64


def dict_behind(value: Any) -> dict[Any, Any] | None:
    """The dict that a view or a read-only mapping shows; None of other values."""
    if type(value) not in _VIEWS:
        return None
    return next((found for found in gc.get_referents(value) if issubclass(type(found), dict)), None)


def cached_by(value: Any) -> list[Any]:
    """What a function with `functools.cache` or `lru_cache` has returned so far, as long as that is little.

    Not tensors and modules: others know them by what the step does with them.
    """
    if type(value) is not functools._lru_cache_wrapper:
        return []
    own = attributes_of(value) or {}
    found = [v for v in gc.get_referents(value) if v is not own and v is not own.get("__wrapped__")]
    cache = next((v for v in found if type(v) is dict), {})
    if len(cache) > _MAX_CACHED:
        return []
    return [v for v in (*found, *cache.values()) if v is not cache and not issubclass(type(v), (type, *_TORCHS))]


def holds_cached(value: Any, results: frozenset[int]) -> bool:
    """Whether a function still returns these results, by id."""
    return results.issubset(map(id, cached_by(value)))


def is_getter(value: Any) -> bool:
    """Whether a value is an `operator.attrgetter` or `methodcaller`."""
    return type(value) in _GETTERS


def names_of_getter(value: Any) -> set[str]:
    """The names that a getter asks for."""
    made = value.__reduce__()
    spelled = made[0].args if issubclass(type(made[0]), functools.partial) else made[1]  # with keyword arguments
    names = spelled if type(value) is operator.attrgetter else spelled[:1]
    return {part for name in names for part in name.split(".")}


def implementations_of(function: types.FunctionType) -> Iterator[Any]:
    """The functions that a `functools.singledispatch` chooses from."""
    registry = dict_behind(vars(function).get("registry"))
    if registry is not None and "dispatch" in vars(function):
        yield from registry.values()
