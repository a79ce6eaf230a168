"""Finds the user's own line on a stack, and on whose behalf the code there runs.

Most frames of a training step are torch's or a library's. A finding stands at the innermost line of the user's own
files, because that is the line to change; the function of a library that it called is said beside it. Some work counts
for nobody: an optimizer's or a GradScaler's own, which stepgraph runs where it fits, and the loading of data.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import Location
from stepgraph.core.frames import is_engine, is_installed, is_users_code

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OPTIMIZERS = (_TORCH + f"optim{os.sep}", _TORCH + os.path.join("amp", "grad_scaler.py"))
_SCHEDULERS = (_TORCH + os.path.join("optim", "lr_scheduler.py"), _TORCH + os.path.join("optim", "swa_utils.py"))
_LOADING = _TORCH + os.path.join("utils", "data", "")
_CALL = torch.nn.Module._call_impl.__code__
_PLUMBING = tuple(
    _TORCH + name for name in ("overrides.py", "utils", "_ops.py", "_tensor.py", "_dynamo", "_compile.py")
)


@dataclass(frozen=True, slots=True)
class Place:
    """A place on a stack."""

    where: Location | None
    """The innermost line of the user's own code; None where there is none, as in a thread of torch's."""
    inside: str
    """The function of a library, or of torch, that this line called and that did the work; empty where it did it."""
    module: torch.nn.Module | None
    """The innermost module whose forward runs."""
    is_optimizers: bool
    """Whether it is an optimizer's, a scheduler's or a GradScaler's own work."""
    is_loading: bool
    """Whether it is part of a DataLoader's work."""


@functools.lru_cache(maxsize=4096)
def is_own_code(code: types.CodeType) -> bool:
    """Whether code is the user's own: not torch's, Python's, stepgraph's or an installed library's."""
    return is_users_code(code) and not is_installed(code.co_filename)


def stack_of(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame and those around it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def own_frames(frame: types.FrameType | None) -> list[types.FrameType]:
    """The frames of the user's own code, innermost first."""
    return [one for one in stack_of(frame) if is_own_code(one.f_code)]


def location_of(frame: types.FrameType) -> Location:
    """The line that a frame runs."""
    return Location(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def place_of(frame: types.FrameType | None) -> Place:
    """Read a stack."""
    where: Location | None = None
    inside, module, is_optimizers, is_loading = "", None, False, False
    for one in stack_of(frame):
        code = one.f_code
        file = code.co_filename
        if where is None:
            is_optimizers = is_optimizers or _is_optimizers(one)
            if is_own_code(code):
                where = location_of(one)
            elif not inside and not is_plumbing(file):
                inside = f"{_short(file)}, {code.co_name}"
        if code is _CALL and module is None:
            module = one.f_locals.get("self")
        is_loading = is_loading or file.startswith(_LOADING)
    return Place(where, inside, module, is_optimizers, is_loading)


def is_plumbing(file: str) -> bool:
    """Whether a file only hands calls on: stepgraph's, or torch's dispatch."""
    return is_engine(file) or file.startswith(("<", *_PLUMBING))


def package_of(file: str) -> str:
    """The name of the installed library that a file belongs to, or an empty text."""
    _, installed, rest = file.rpartition(f"-packages{os.sep}")
    return rest.partition(os.sep)[0].removesuffix(".py") if installed else ""


def _is_optimizers(frame: types.FrameType) -> bool:
    code = frame.f_code
    if code.co_filename.startswith(_OPTIMIZERS) and not code.co_filename.startswith(_SCHEDULERS):
        return True
    if code.co_argcount == 0 or is_engine(code.co_filename):
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), Optimizer)


def _short(file: str) -> str:
    """A library's file by its path within the library's folder."""
    for root in (_TORCH[: -len("torch") - 1], *(f"{os.sep}{kind}-packages{os.sep}" for kind in ("site", "dist"))):
        _, found, rest = file.rpartition(root)
        if found:
            return rest
    return os.path.basename(file)
