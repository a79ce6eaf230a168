"""A probe is the part of a command that runs in the script's own process and watches its steps.

`stepgraph check`, `verify`, `frozen` and `advise` run the same script in the same way and look at different things. The
runner (`run`) knows nothing about what they look for; a probe knows nothing about processes, signals and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["Probe", "RunningScript", "StepListener"]


class StepListener(Protocol):
    """Receives the steps of a script, as `observe.steps` defines them."""

    def step_begins(self, index: int) -> None:
        """The step with this number begins: the first forward of an iteration is about to run."""

    def step_reaches(self, index: int) -> None:
        """An optimizer, scaler or zero_grad call has returned: all that ran since `step_begins` is in the step."""

    def step_ends(self, index: int) -> None:
        """The next step begins, or the script ends. What ran since the last `step_reaches` was outside the step."""


class RunningScript(Protocol):
    """The script, as a probe sees it."""

    options: Mapping[str, Any]
    """The plain values that the command passed to the probe."""
    is_cuda_mapped: bool
    """True if there is no GPU, and the names of `torch.cuda` that the script uses stand for the CPU."""

    def listen(self, listener: StepListener) -> None:
        """Report all further steps to this listener."""

    def stop(self) -> None:
        """End the script early: raises an exception that is no `Exception`, inside the script's own code."""

    def cannot_judge(self, what: str) -> None:
        """Note that nothing certain can be said, and why: the command then never exits with 0."""


class Probe(Protocol):
    """What a command does while the script runs. Made by `PROBE(script)` in the script's process."""

    def running(self) -> AbstractContextManager[None]:
        """Watch during the block, in which the script runs."""

    def result(self) -> Mapping[str, Any]:
        """Return what was seen, as plain values. Called once, after the script has ended in any way."""
