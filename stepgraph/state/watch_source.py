"""What a step may draw from: generators of random numbers of its own, and iterators.

A replay draws nothing. The state of a random generator can be read, so that a step that draws from one is seen in
warm-up to change it. An iterator cannot be looked at without being moved on; it is named, for whoever is to refuse it.
"""

from __future__ import annotations

import functools
import io
import random
import sys
import types
from typing import Any

from stepgraph.state.watch_code import is_users_code
from stepgraph.state.watch_parts import Reading


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose place cannot be seen: not a file, and not a class that can be followed."""
    for base in type(value).__mro__:
        if "__next__" in vars(base):
            step = vars(base)["__next__"]
            is_followed = type(step) is types.FunctionType and is_users_code(step.__code__)
            return not is_followed and not issubclass(type(value), io.IOBase)
    return False


def state_of_generator(name: str, value: Any) -> Reading | None:
    """The state of a random generator of Python's or numpy's, if the value is one."""
    kind = type(value)
    read: Any = None
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        read = functools.partial(random.Random.getstate, value)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None and issubclass(kind, numpy_random.Generator):
        read = functools.partial(_state, value.bit_generator)
    elif numpy_random is not None and issubclass(kind, numpy_random.RandomState):
        read = functools.partial(_state, value._bit_generator)
    if read is None:
        return None
    before = read()
    return Reading(name, read, lambda: f"{kind.__name__} {'as it was' if read() == before else 'drawn from'}")


def _state(bits: Any) -> Any:
    return _comparable(bits.state)


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
