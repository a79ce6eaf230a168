"""Turns Python's garbage collector off while memory is recorded, and asks it for the objects that it tracks.

The process has one collector with one switch, and two threads may need it off at the same time. The first one turns the
collector off. The last one turns it on again, if it was on.

A plain `gc.get_objects()` breaks other threads. Its list refers to everything that is tracked, also to a tuple which
another thread is filling with `tuple(generator)`. If that thread goes on while the list is alive, Python finds a
reference too many at the end of the tuple and raises SystemError there (cpython#59313; Python 3.14 fills tuples out of
sight). The functions here select objects in a single call of C code that runs no Python code. Python changes threads
only between its own instructions, so the list is gone before another thread runs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

_CHANGING = threading.RLock()
_RESTS: list[bool] = []
"""For each active block, whether the collector was on when the block began."""


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Turn the collector off in this block. Objects without references are still freed at once."""
    with _CHANGING:
        _RESTS.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _CHANGING:
            was_on = _RESTS.pop()  # the entry of the first block is removed last
            if was_on and not _RESTS:
                gc.enable()


def state_of(generator: torch.Generator) -> torch.Tensor:
    """Return a random generator's state, read with the collector off.

    torch holds the generator's lock while it makes the tensor. A collection at that moment may run Python code, and so
    let another thread run. If that thread asks for the same lock, it waits for ever, since it holds Python's lock.
    """
    with collector_at_rest():
        return generator.get_state()


def objects_of(kind: type[_T], generation: int | None = None) -> list[_T]:
    """Return the tracked objects of a type and its subclasses: of one generation, or all.

    The type must not be `tuple` or `object`: tuples that other threads are filling would be among the results.
    """
    passed_on: dict[str, list[Any]] = {}  # not `itertools.tee`: the list refers to it, and it would refer to the list
    first = map(passed_on.setdefault, ["list"], map(gc.get_objects, [generation]))
    second = map(passed_on.pop, ["list"])
    is_kind = type.__subclasscheck__.__get__(kind)  # `isinstance` may run code of a class
    selectors = map(is_kind, map(type, itertools.chain.from_iterable(second)))
    # A chain drops its list when asked for more than the list has. The None makes `compress` ask both chains for more.
    objects = itertools.chain(itertools.chain.from_iterable(first), [None])
    with collector_at_rest():  # a collection would run Python code
        return list(itertools.compress(objects, selectors))


def address(value: object) -> int:
    """Return a number that belongs to an object while it lives. `id` is reported to audit hooks, which are Python."""
    return object.__hash__(value)


def addresses(generation: int) -> set[int]:
    """Return the addresses of a generation's objects, tuples among them."""
    with collector_at_rest():
        return set(map(object.__hash__, itertools.chain.from_iterable(map(gc.get_objects, [generation]))))
