"""A backend records and replays work on one kind of device; `backend_for` picks CUDA graphs or the CPU tape."""

from __future__ import annotations

import os

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.backends.base import Backend, CopyStream, Graph, Reading, Workspace

__all__ = [
    "Backend",
    "CopyStream",
    "Graph",
    "Reading",
    "Workspace",
    "backend_for",
    "backend_named",
    "is_capturing",
    "refuse_unknown_backend",
]

NAMES = {"cuda": "cuda", "tape": "cpu"}
"""Each backend's name and the type of device it records."""


@entry_point
def backend_for(device: torch.device | str) -> Backend:
    """The backend for a device: CUDA graphs for a GPU, the tape for the CPU. STEPGRAPH_BACKEND overrides.

    Example:
        >>> stepgraph.backend_for("cpu").name
        'tape'
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_backend(device) from error
    forced = os.environ.get("STEPGRAPH_BACKEND")
    if forced:
        return backend_named(forced, device)
    for name, kind in NAMES.items():
        if kind == device.type:
            return backend_named(name, device)
    raise _no_backend(device.type)


def _no_backend(device: object) -> InvalidArgument:
    return InvalidArgument(
        f"no backend records work on {device!r} devices",
        rule="backend",
        why="there are two: cuda (CUDA graphs) and tape (the CPU).",
        fix="move the model and the batch to 'cuda' or 'cpu'.",
    )


def is_capturing() -> bool:
    """Whether the calling thread records a graph now, on any backend."""
    from stepgraph.engine.backends.tape.mode import TapeBackend

    if TapeBackend().is_capturing():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_unknown_backend(name: str) -> None:
    """Refuse a name that no backend has."""
    if name not in NAMES:
        raise InvalidArgument(
            f"unknown backend {name!r}",
            rule="backend",
            why="backend= and STEPGRAPH_BACKEND take the name of a backend.",
            fix="use " + " or ".join(repr(n) for n in NAMES) + ".",
        )


def backend_named(name: str, device: torch.device | None = None) -> Backend:
    """The backend of that name."""
    refuse_unknown_backend(name)
    if name == "tape":
        from stepgraph.engine.backends.tape.mode import TapeBackend

        return TapeBackend()
    if not torch.cuda.is_available():
        raise InvalidArgument(
            "the cuda backend was asked for, and torch sees no GPU",
            rule="backend",
            why="CUDA graphs need one.",
            fix="use backend='tape' with tensors on the CPU.",
        )
    from stepgraph.engine.backends.cuda.backend import CudaBackend

    return CudaBackend(device if device is not None and device.type == "cuda" else None)
