"""Ctrl-C during a capture waits until the state is whole.

A KeyboardInterrupt can be raised between any two instructions, also inside a weak reference's callback, where Python
prints it and drops it, or half-way through a rollback. A capture and the replay after it take no more than a few
steps' time. So the signal waits. It is raised when everything is recorded, and the recording is dropped as if the step
had not been called; or, if it comes later than that, after the replay, when the step is done. A second Ctrl-C does not
wait.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back for the length of the block; the function that is handed out lets it through if it came.

    Python runs signal handlers in the main thread only: in another one there is nothing to hold.
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
