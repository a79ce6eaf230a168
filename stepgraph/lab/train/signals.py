"""SIGINT and SIGTERM become a flag that the loop reads between two steps.

The handler only notes the signal: nothing is interrupted half-way through a step, a capture or a checkpoint. After the
step the ranks agree on the flag, save, free their graphs, leave the process group and exit with 130 or 143. A second
signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class SignalFlag:
    """Notes signals from `__enter__` to `__exit__`; outside the main thread, where Python runs no handlers, nothing."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self.number = 0
        """The signal that arrived, or 0."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalFlag:
        if self._wanted and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _WATCHED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        print("\nending after this step; a second signal ends at once", file=sys.stderr, flush=True)
