"""Looks for frozen values inside a running script: at the second call of each captured step, then stops the script.

At its second call a step has its optimizer's state and its caches, so that it can be captured. If the user names a step
(`--step`), that function is examined instead, captured or not. Several captured steps are examined in turn, a GAN's
two, as long as those that were called once are called again soon.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from stepgraph.core.errors import StepgraphError
from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.step.step import CapturedStep
from stepgraph.tools.frozen_values.frozen import examine
from stepgraph.tools.script.patience import Patience
from stepgraph.tools.script.probe import RunningScript
from stepgraph.tools.script.steps import named_call, steps_unwatched

__all__ = ["FrozenProbe"]

_PATIENCE = 64
"""Calls of captured steps after an examination within which another one may come to its second call."""


class FrozenProbe:
    """Examines the steps of a script. Its options: `env`, a mapping; `step`, true if the user names the step."""

    def __init__(self, script: RunningScript) -> None:
        self._script = script
        self._env: Mapping[str, str] = script.options.get("env", {})
        self._reports: list[dict[str, Any]] = []
        self._steps: dict[int, tuple[CapturedStep[..., Any], int]] = {}
        """Captured steps and how often each was called, by id."""
        self._done: set[int] = set()
        self._calls_since = 0
        self._is_examining = False
        self._num_named = 0
        """Calls of the function that the user names."""
        if script.options.get("step"):
            script.listen(self)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        patience = Patience(self._script, lambda: bool(self._steps or self._num_named), "calls no captured step")
        with patience.watching(), contextlib.ExitStack() as stack:
            if not self._script.options.get("step"):
                stack.enter_context(replaced(CapturedStep, "__call__", self._call))
            yield

    def result(self) -> Mapping[str, Any]:
        for key, (step, _) in self._steps.items():
            if key not in self._done:
                self._script.cannot_judge(f"{step!r} was called only once: there was nothing to compare")
        return {"reports": self._reports}

    # -- captured steps

    def _call(self, method: Callable[..., Any], step: CapturedStep[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._is_examining:
            _, calls = self._steps.get(id(step), (step, 0))
            self._steps[id(step)] = (step, calls + 1)
            if not calls:
                self._script.saw(f"a first call of {getattr(step, '__name__', 'a captured step')}")
            self._calls_since += bool(self._done)
            if calls == 1:
                self._done.add(id(step))
                self._calls_since = 0
                self._examine(step, args, kwargs)
            if self._done and (self._done >= self._steps.keys() or self._calls_since >= _PATIENCE):
                self._script.stop()
        return method(step, *args, **kwargs)

    # -- a step that the user names

    def step_begins(self, index: int) -> None:
        self._num_named = index + 1
        call = named_call()
        if index == 1 and call is not None and not self._is_examining:
            self._examine(*_bound(*call))
            self._script.stop()

    def step_reaches(self, index: int) -> None:
        """Nothing is to be seen at the end of a step."""

    def step_ends(self, index: int) -> None:
        """Nothing is to be seen at the end of a step."""

    # -- looking

    def _examine(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._is_examining = True
        try:
            with steps_unwatched(), _progress() as progress:
                report = examine(step, args, kwargs, env=self._env, progress=progress)
            self._reports.append(report.to_dict())
        except StepgraphError as error:
            self._script.cannot_judge(str(error))
        finally:
            self._is_examining = False


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Turn the call of a method's function into that of the method: its object is part of the step, no argument."""
    name = getattr(function, "__name__", "")
    owner = args[0] if args else None
    found = inspect.getattr_static(owner if isinstance(owner, type) else type(owner), name, None)
    wrapper = found.__func__ if isinstance(found, classmethod) else found
    if getattr(wrapper, "__wrapped__", None) is not function:
        return function, args, kwargs
    return function.__get__(owner, type(owner)), args[1:], kwargs


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, if that is a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("moving values"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
