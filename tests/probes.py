"""Probes for tests of the script runner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from stepgraph.tools.script.probe import RunningScript


class Recorder:
    """Records the events of steps; stops the script after `steps` of them, if that option is given."""

    def __init__(self, script: RunningScript) -> None:
        self._script = script
        self._events: list[str] = []
        self._last: Any = script.options.get("steps")
        script.listen(self)
        script.at_synchronize(lambda name: self._events.append(name))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        yield

    def step_begins(self, index: int) -> None:
        self._events.append(f"begins {index}")

    def step_reaches(self, index: int) -> None:
        self._events.append(f"reaches {index}")

    def step_ends(self, index: int) -> None:
        self._events.append(f"ends {index}")
        if self._last is not None and index + 1 >= self._last:
            self._script.stop()

    def result(self) -> Mapping[str, Any]:
        return {"events": self._events}
