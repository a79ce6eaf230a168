"""A probe is the part of a command that runs in the script's own process and watches its steps.

`stepgraph check`, `verify`, `frozen` and `advise` run the same script in the same way and look at different things. The
runner (`run`) knows nothing about what they look for; a probe knows nothing about processes, signals and files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from stepgraph.tools.script.steps import StepListener

__all__ = ["Probe", "RunningScript", "StepListener"]


class RunningScript(Protocol):
    """The script, as a probe sees it."""

    options: Mapping[str, Any]
    """The plain values that the command passed to the probe."""
    is_cuda_mapped: bool
    """True if there is no GPU, and the names of `torch.cuda` that the script uses stand for the CPU."""

    def listen(self, listener: StepListener) -> None:
        """Report all further steps to this listener."""

    def at_synchronize(self, call: Callable[[str], None]) -> None:
        """Call this with the name, such as `torch.cuda.synchronize`, before each wait for the device.

        On the CPU, where `is_cuda_mapped`, nothing waits; a GPU reports its waits by itself.
        """

    def at_write(self, call: Callable[[str], None]) -> None:
        """Call this with the path before the script first opens a file for writing, replaces or removes it."""

    def refuse_writes(self) -> None:
        """From now on refuse all files that the script opens for writing, as `--no-write` does."""

    def saw(self, what: str) -> None:
        """Note what was seen, for a script that is ended at its time limit."""

    def stop(self) -> None:
        """End the script early: raises an exception that is no `Exception`, inside the script's own code.

        A script that catches it meets it again at its next step.
        """

    def cannot_judge(self, what: str) -> None:
        """Note that nothing certain can be said, and why: the command then never exits with 0."""

    def note(self, what: str) -> None:
        """Note what the user should know about this run, such as that compiled code ran as eager."""


class Probe(Protocol):
    """What a command does while the script runs. Made by `PROBE(script)` in the script's process."""

    def running(self) -> AbstractContextManager[None]:
        """Watch during the block, in which the script runs."""

    def result(self) -> Mapping[str, Any]:
        """Return what was seen, as plain values. Called once, after the script has ended in any way."""
