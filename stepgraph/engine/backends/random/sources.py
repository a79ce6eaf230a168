"""Finds what a step may draw from: its own generators of random numbers, and iterators.

A replay draws nothing. Warm-up compares where each of them is before a call and after it. Most iterators can be asked
for their position without moving them; of the others only the name is known.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgraph.core.frames import is_users_code

_MADE_OF_OTHERS = (enumerate, zip, map, filter, itertools.cycle, itertools.islice, itertools.chain)
_DEPTH = 4
_MOCKS = ("unittest.mock", "mock.mock")


class Source:
    """Something to draw from, and where it was."""

    def __init__(self, name: str, read: Callable[[], Any], kind: str, generator: torch.Generator | None = None) -> None:
        """`generator` is one of torch's."""
        self.name, self.kind, self._read, self.generator = name, kind, read, generator
        self._before = read()

    def __str__(self) -> str:
        return f"{self.kind} `{self.name}`"

    @property
    def is_seen(self) -> bool:
        """Whether its position can be read."""
        return self._before is not None

    def was_drawn_from(self) -> bool:
        return bool(self._read() != self._before)


def source_of(name: str, value: Any) -> Source | None:
    """The value as something to draw from, if it is that."""
    read = _state_of_generator(value)
    if read is not None:
        return Source(name, read, "the random generator", value if type(value) is torch.Generator else None)
    return Source(name, functools.partial(position_of, value), "the iterator") if is_iterator(value) else None


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator, not a file, that is moved by other code than the user's Python."""
    for base in type(value).__mro__ if type(value) not in weakref.ProxyTypes else ():
        if "__next__" in vars(base):
            step = vars(base)["__next__"]
            if type(step).__module__ in _MOCKS:  # a mock has every method there is
                return False
            is_followed = type(step) is types.FunctionType and is_users_code(step.__code__)
            return not is_followed and not issubclass(type(value), io.IOBase)
    return False


def position_of(value: Any, depth: int = _DEPTH) -> Any:
    """An iterator's position, as something to compare; None where it cannot be read."""
    kind = type(value)
    if kind is types.GeneratorType:
        frame = value.gi_frame
        return "at its end" if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))
    if kind is itertools.count:
        return repr(value)
    yielded = getattr(value, "__dict__", {}).get("_num_yielded")  # torch's, over a DataLoader
    if isinstance(yielded, int):
        return yielded
    if hasattr(kind, "__length_hint__"):
        try:
            return value.__length_hint__()
        except TypeError:  # `itertools.repeat(x)`: drawing does not move it
            return "endless"
    if kind in _MADE_OF_OTHERS and depth:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = list(_flat(value.__reduce__()[1:]))
        found = [position_of(part, depth - 1) for part in parts if is_iterator(part)]
        return None if not found or None in found else (found, [part for part in parts if type(part) in (int, bool)])
    return None


def _flat(parts: Any) -> Iterator[Any]:
    for part in parts:
        if type(part) is tuple:
            yield from _flat(part)
        else:
            yield part


def _state_of_generator(value: Any) -> Callable[[], Any] | None:
    """What reads the state of a random generator of Python's or numpy's."""
    kind = type(value)
    if kind is torch.Generator and value.device.type == "cpu":  # that of a GPU is a matter of the graph
        return lambda: value.get_state().numpy().tobytes()
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return functools.partial(random.Random.getstate, value)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None and issubclass(kind, numpy_random.Generator):
        return functools.partial(_state, value.bit_generator)
    if numpy_random is not None and issubclass(kind, numpy_random.RandomState):
        return functools.partial(_state, value._bit_generator)
    return None


def _state(bits: Any) -> Any:
    return _comparable(bits.state)


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
