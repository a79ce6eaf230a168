"""Turns Python's garbage collector off while memory is recorded, and while the stacks of threads are read.

The process has one collector with one switch, and two threads may need it off at the same time. The first one turns the
collector off. The last one turns it on again, if it was on.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import torch

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
