"""The probe of `--try`: captures the function that is one step, in the script's own process, and times its replays."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.step.capture import capture
from stepgraph.engine.step.step import CapturedStep
from stepgraph.tools.advice.measure import Models, current_device
from stepgraph.tools.measure import elapsed_ms, mark
from stepgraph.tools.script.probe import RunningScript
from stepgraph.tools.script.steps import StepCalls

SETTLE = 8
"""Steps before the timed ones: warm-up, capture, and a few in which caches settle."""


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
