"""A step gets the backend that the user named, else that of its session, else one for the tensors that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.backends import Backend, backend_for, backend_named
from stepgraph.engine.call.session import Session
from stepgraph.engine.observe.finder import devices


def choose_backend(
    objects: Sequence[Any], leaves: Sequence[Any], wanted: Backend | str | None, session: Session
) -> Backend:
    """Choose the backend for a step from the leaves of its first call and from the objects that it can reach."""
    if wanted is not None:
        return backend_named(wanted) if isinstance(wanted, str) else wanted
    if session.has_backend:
        return session.backend
    return backend_of(devices(chain(leaves, objects)))


def backend_of(found: Iterable[torch.device]) -> Backend:
    """Return the backend for work on these devices; a GPU is preferred."""
    known = list(found)
    cuda = next((d for d in known if d.type == "cuda"), None)
    fallback = "cuda" if not known and torch.cuda.is_available() else "cpu"
    return backend_for(cuda or (known[0] if known else fallback))


def refuse_other_devices(name: str, objects: Sequence[Any], leaves: Sequence[Any], backend: Backend) -> None:
    """Refuse tensors on a GPU with the tape, which would record only a part of the step."""
    if backend.device.type != "cpu":
        return
    for device in devices(chain(leaves, objects)):
        if device.type != "cpu":
            raise InvalidArgument(
                f"{name}: the backend is the tape, but the step uses tensors on {device}",
                rule="backend",
                why="the tape records work on CPU tensors only.",
                fix="move the model and the batch to the CPU, or leave backend= and STEPGRAPH_BACKEND unset.",
            )


def refuse_elsewhere(module: torch.nn.Module, leaves: Sequence[Any], backend: Backend) -> None:
    """Refuse a module on another device than its session, which would not record its work."""
    own = backend.device
    for device in devices(chain([module], leaves if own.type == "cpu" else ())):
        if device.type != own.type or (None not in (device.index, own.index) and device.index != own.index):
            raise InvalidArgument(
                f"the module works on {device}, but the graphs of its session are on {own}",
                rule="backend",
                why="one session has one pool, on one device.",
                fix="leave the module out of the scope, or give it its own stepgraph.Session.",
            )
