"""`--try`: captures a script's step for real, in the script's own process, and times its replays.

The function that is one step is captured, as a line with `stepgraph.capture` in the script would do. In a second run
the model is compiled first: what a compiler makes of a step cannot be predicted, so it is measured only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.advice.measure import Models, current_device
from stepgraph.backends.threads import replaced
from stepgraph.bench.measure import StepTimes, elapsed_ms, mark
from stepgraph.joined.capture import capture
from stepgraph.observe.steps import StepCalls
from stepgraph.script.probe import RunningScript
from stepgraph.script.run import Outcome, Script, Status, run_script
from stepgraph.step.step import CapturedStep

SETTLE = 8
"""Steps before the timed ones: warm-up, capture, and a few in which caches settle."""
_PROBE = "stepgraph.advice.trial:TrialProbe"
NAMES = ("whole step", "whole step + compile")


@dataclass(frozen=True, slots=True)
class Trial:
    """A capture that was tried."""

    name: str
    step_ms: float | None = None
    used_bytes: int | None = None
    replays: int = 0
    eager_reasons: Mapping[str, int] | None = None
    error: str = ""


class TrialProbe:
    """Captures the step and times it. Options: `steps`, and whether the model is compiled (`compiles`)."""

    def __init__(self, script: RunningScript) -> None:
        self._script = script
        self._steps, self._compiles = int(script.options["steps"]), bool(script.options["compiles"])
        self._captured: list[CapturedStep[Any, Any]] = []
        self._marks: list[Any] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Capture the step function of the block."""
        self._script.listen(self)
        with replaced(StepCalls, "wrapped", self._wrapped):
            yield

    def _wrapped(self, below: Callable[..., Any], calls: StepCalls, function: Callable[..., Any]) -> Any:
        """Capture the function at its first call, or at its second if the model is compiled after the first."""
        qualified = str(getattr(function, "__qualname__", "")).rpartition("<locals>.")[2]
        begun: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not begun and self._compiles:
                begun.append(function)
                return self._compiled_after(function, args, kwargs)
            if not begun or begun[-1] is function:
                step = capture(function)
                self._captured.append(step)
                begun.append(step)
            step = self._captured[-1]
            if "." in qualified:
                return step.__get__(args[0], type(args[0]))(*args[1:], **kwargs)
            return step(*args, **kwargs)

        return below(calls, called)

    def _compiled_after(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        models = Models()
        with models.noting():
            result = function(*args, **kwargs)
        models.settle()
        if models.largest is not None:
            models.largest.compile()
        return result

    def step_begins(self, index: int) -> None:
        """Mark the beginning of a timed step."""
        if index > SETTLE + self._steps:
            self._script.stop()
        if index >= SETTLE:
            self._marks.append(mark(current_device()))

    def step_reaches(self, index: int) -> None:
        """Nothing to do: a call is a step."""

    def step_ends(self, index: int) -> None:
        """Nothing to do."""

    def result(self) -> Mapping[str, Any]:
        """Return times, memory and the counts of the captured step."""
        has_gpu = torch.cuda.is_available()
        report = self._captured[-1].report() if self._captured else None
        return {
            "times_ms": list(elapsed_ms(self._marks, current_device())),
            "used_bytes": torch.cuda.max_memory_reserved() if has_gpu else None,
            "replays": report.replays if report is not None else 0,
            "eager_reasons": dict(report.eager_reasons) if report is not None else {},
        }


def try_captures(script: Script, steps: int, *, stdout_to_stderr: bool = False) -> tuple[Trial, ...]:
    """Run the script with its step captured, and with its model compiled too; one row each."""
    return tuple(
        _trial(
            name,
            run_script(script, _PROBE, {"steps": steps, "compiles": compiles}, stdout_to_stderr=stdout_to_stderr),
        )
        for name, compiles in zip(NAMES, (False, True), strict=True)
    )


def _trial(name: str, outcome: Outcome) -> Trial:
    result = outcome.result
    if outcome.status in (Status.FAILED, Status.TIMED_OUT):
        lines = outcome.exception.splitlines() or [str(outcome.status)]
        errors = [line for line in lines if line[:1].strip() and not line.startswith("Traceback")]
        return Trial(name, error=(errors or lines)[-1] if not errors else errors[0])
    times = result.get("times_ms", ())
    if not times:
        return Trial(name, error=f"the script ended after {outcome.steps} steps, before any replay was timed")
    if not result.get("replays"):
        reasons = ", ".join(result.get("eager_reasons", ())) or "it was never called"
        return Trial(name, error=f"the step was never replayed: {reasons}")
    return Trial(
        name,
        StepTimes(tuple(times)).median,
        result.get("used_bytes"),
        result.get("replays", 0),
        result.get("eager_reasons", {}),
    )
