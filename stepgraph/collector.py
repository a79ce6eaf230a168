"""Python's garbage collector at rest: while memory is recorded, and while the stacks of threads are read.

The process has one collector with one switch, and two threads may want its rest at the same time: the first to want it
turns the collector off, and the last to leave turns it on again, if it was on.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import torch

_CHANGING = threading.RLock()
_RESTS: list[bool] = []
"""For each block that is under way, whether the collector was on when it began."""


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Let nothing be collected in this block; what is no longer referred to goes at once, as always."""
    with _CHANGING:
        _RESTS.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _CHANGING:
            was_on = _RESTS.pop()  # the first block's entry is the last to go
            if was_on and not _RESTS:
                gc.enable()


def state_of(generator: torch.Generator) -> torch.Tensor:
    """A random generator's state, read with the collector at rest.

    torch holds the generator's lock while it makes the tensor. A collection at that moment may run Python code, and
    then another thread, which asks for the same lock and waits for ever: it does not let go of Python meanwhile.
    """
    with collector_at_rest():
        return generator.get_state()
