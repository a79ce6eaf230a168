"""The traceback of a refusal ends at the user's line: stepgraph's own frames are left out.

A refusal is an error of stepgraph that names the cause and the fix. Ten frames of the engine after the user's line only
hide it. So the functions that users call catch a refusal, trim its traceback and raise it again. Python adds a frame
when an error leaves it, but not at a bare `raise`, so the function that trims is not shown either. Functions that
replay calls are not wrapped: they have an inline `try`, which costs nothing. The environment variable
STEPGRAPH_FULL_TRACEBACK=1 keeps all frames.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from stepgraph.core.errors import CaptureError, CaptureRefused, StepgraphError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_USER_MODULES = ("stepgraph.lab.models", "stepgraph.lab.bench")
_PLATFORM = sys.stdlib_module_names | {"torch"}


def trim(error: StepgraphError) -> None:
    """Keep only the user's frames in a refusal's traceback. The caller raises it again by a bare `raise`.

    An error that the step itself raised, and that became the refusal's `__cause__`, keeps all frames.
    """
    if os.environ.get("STEPGRAPH_FULL_TRACEBACK", "0") not in ("", "0"):
        return
    cause = error.__cause__
    if isinstance(cause, CaptureRefused):  # the tape's error, which adds nothing to the refusal
        error.__cause__ = None
    elif cause is not None and isinstance(error, CaptureError) and error.entry is not None:
        cause.__traceback__ = _kept(cause.__traceback__, lambda module: not _is_engine(module))
    error.__traceback__ = _kept(error.__traceback__, _is_users)


def entry_point(function: _Function) -> _Function:
    """Decorate a function that users call, so that it trims its refusals. Functions that replay call `trim` inline."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StepgraphError as error:
            trim(error)
            raise

    return cast(_Function, called)


def _kept(trace: TracebackType | None, keeps: Callable[[str], bool]) -> TracebackType | None:
    """Return a traceback of only those frames whose module is kept."""
    frames = []
    while trace is not None:
        if keeps(str(trace.tb_frame.f_globals.get("__name__", ""))):
            frames.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for kept in reversed(frames):
        found = TracebackType(found, kept.tb_frame, kept.tb_lasti, kept.tb_lineno)
    return found


def _is_engine(module: str) -> bool:
    return module.partition(".")[0] == "stepgraph" and not module.startswith(_USER_MODULES)


def _is_users(module: str) -> bool:
    return module.partition(".")[0] not in _PLATFORM and not _is_engine(module)
