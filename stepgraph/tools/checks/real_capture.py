"""Captures a script's own step function, in the running script, to see whether it works.

On a GPU the watched steps show much, and a capture shows the rest. The function is put back behind `stepgraph.capture`
where the script looks it up: in its module, or in its class. A capture that fails has no effect: the call then runs
eagerly, and the error becomes a finding.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from stepgraph.core.errors import CaptureError, refusal_in
from stepgraph.engine.step.capture import capture

__all__ = ["RealCapture"]

NUM_CALLS = 6
"""Calls of a trial: warm-up, a capture, and some replays."""


class RealCapture:
    """A step function of the script, captured."""

    def __init__(self, function: types.FunctionType, enough: Callable[[], None]) -> None:
        """`enough` is called when the trial is over: replays call no forward by which steps are found."""
        self._function, self._enough = function, enough
        self._num_calls = self.num_replays = 0
        self._captured: dict[int, Any] = {}
        self._closing = contextlib.ExitStack()
        self.error: CaptureError | None = None

    def put_in_place(self) -> bool:
        """Let the script call the captured function. Return False if the script does not look it up by name."""
        owner = _owner_of(self._function)
        if owner is None:
            return False
        name = self._function.__name__
        is_method = not isinstance(owner, types.ModuleType)
        setattr(owner, name, self._method() if is_method else functools.partial(self._call, self._function, 0))
        self._closing.callback(setattr, owner, name, self._function)
        return True

    def _method(self) -> Callable[..., Any]:
        @functools.wraps(self._function)
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(types.MethodType(self._function, this), id(this), *args, **kwargs)

        return method

    def _call(self, function: Callable[..., Any], key: int, *args: Any, **kwargs: Any) -> Any:
        self._num_calls += 1
        if self.error is not None or self._num_calls > NUM_CALLS:
            self._enough()
            return function(*args, **kwargs)
        if key not in self._captured:
            self._captured[key] = self._closing.enter_context(capture(function))
        try:
            return self._captured[key](*args, **kwargs)
        except Exception as error:
            refused = refusal_in(error)
            if not isinstance(refused, CaptureError):
                raise
            self.error = refused
            return function(*args, **kwargs)

    @property
    def is_over(self) -> bool:
        return self.error is not None or self._num_calls > NUM_CALLS

    def finish(self) -> None:
        """Put the function back, and free the graphs."""
        self.num_replays = sum(step.report().replays for step in self._captured.values())
        self._closing.close()


def _owner_of(function: types.FunctionType) -> Any:
    """The module or class in which the script looks a function up, or None."""
    module = sys.modules.get(function.__module__)
    if module is None or "<locals>" in function.__qualname__:
        return None
    owner: Any = module
    for name in function.__qualname__.split(".")[:-1]:
        owner = getattr(owner, name, None)
    return owner if getattr(owner, function.__name__, None) is function else None
