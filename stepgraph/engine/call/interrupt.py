"""Ctrl-C during a capture waits until the state is consistent.

Python can raise a KeyboardInterrupt between any two instructions: also half-way through a rollback, or inside the
callback of a weak reference, where Python prints and drops it. A capture and the replay after it take only as long as a
few steps. So the signal waits. It is raised when everything is recorded, and the recording is dropped as if the step
had not been called. A signal that arrives later is raised after the replay, when the step is done. A second Ctrl-C does
not wait.

Modules, callables and pipeline stages hold the signal for each round of recordings: a capture, with the warm-up of
callables, and an audit with what follows from it. What was recorded whole is kept.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back during the block. Yield a function that raises it now if it has arrived.

    Python runs signal handlers in the main thread only: in another thread there is nothing to hold.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            let_through()

    def let_through() -> None:
        while held:
            handler(*held.pop(0))

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
        let_through()
