"""`Patience` ends a script that trains and never does what the command has come to judge.

Without it a script that graphs nothing would train to its end, and its checkpoints would replace those of a run that
counts. So after some steps in which nothing was seen the script is stopped. It is stopped before that if, after its
first step, it opens a file for writing that was there before it began, or is about to replace or remove one: that is
then not done, nor by what runs while the script ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from stepgraph.tools.script.probe import RunningScript
from stepgraph.tools.script.steps import StepEvents, StepFinder

__all__ = ["Patience"]

STEPS = 20
"""Steps after which a script is stopped in which nothing was seen."""


class Patience:
    """Watches the steps of a script until `has_seen()`. `what` says what it lacks, such as "graphs nothing"."""

    def __init__(self, script: RunningScript, has_seen: Callable[[], bool], what: str, steps: int = STEPS) -> None:
        self._script, self._has_seen, self._what, self._steps = script, has_seen, what, max(steps, STEPS)
        self._place = os.getpid(), threading.get_ident()
        self._num_seen = 0
        """Steps that have reached their end."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block."""
        self._script.at_write(self._writes)
        with StepEvents(StepFinder(self)).watching():
            yield

    def step_begins(self, index: int) -> None:
        """Stop the script if it has had its steps."""
        if index >= self._steps and not self._has_seen():
            self._end(f"the script {self._what} in its first {index} steps, and was stopped")

    def step_reaches(self, index: int) -> None:
        """Count a step."""
        self._num_seen = index + 1

    def step_ends(self, index: int) -> None:
        """Nothing is to be seen at the end of a step."""

    def _writes(self, path: str) -> None:
        if self._num_seen and os.path.exists(path) and self._place[0] == os.getpid() and not self._has_seen():
            steps = f"{self._num_seen} step{'s' * (self._num_seen > 1)}"
            self._end(f"the script {self._what} in its first {steps}, and was stopped before it wrote to {path}")

    def _end(self, what: str) -> None:
        self._script.cannot_judge(what)
        self._script.refuse_writes()
        self._script.stop()
