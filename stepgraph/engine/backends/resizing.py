"""A storage that is resized changes its memory, and no dispatch mode sees it: `UntypedStorage.resize_` is no operator.

`tensor.untyped_storage().resize_(0)` frees the memory of every tensor over the storage, and `resize_(n)` gives them
other memory. FSDP does both to its parameters in each step. A graph replays fixed addresses, and code that looks at
such a tensor reads freed memory, which ends the process. So resizes are seen by one patch of the method, in force while
a call warms up or is recorded, and at no other time. Whoever sees a resize makes it: warm-up notes it and lets it pass,
a recording refuses it before anything has happened. `Tensor.resize_`, an operator, is seen by dispatch modes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import CaptureRefused
from stepgraph.core.frames import user_location
from stepgraph.engine.backends.base import Graph
from stepgraph.engine.backends.threads import replaced

Resize: TypeAlias = Callable[[torch.UntypedStorage, int], Any]


@contextlib.contextmanager
def resized_by(see: Callable[[Resize, torch.UntypedStorage, int], Any]) -> Iterator[None]:
    """In this block let `see` resize storages for this thread's step. It is given torch's method, storage and bytes.

    A patch, because torch has no event and no operator for it; torch's own `MemTracker` replaces the same method
    (torch/distributed/_tools/mem_tracker.py; access to freed memory: pytorch#196019).
    """
    with replaced(torch.UntypedStorage, "resize_", see):
        yield


@contextlib.contextmanager
def refusing_resizes(recording: Callable[[], Graph | None]) -> Iterator[None]:
    """In this block refuse each resize while a graph is being recorded. The storage stays as it is."""

    def see(resize: Resize, storage: torch.UntypedStorage, num_bytes: int) -> Any:
        graph = recording()
        if graph is not None:
            what = described(storage, num_bytes)
            graph.refuse(CaptureRefused(entry("storage-resize"), what, user_location()))
        return resize(storage, num_bytes)

    with resized_by(see):
        yield


def described(storage: torch.UntypedStorage, num_bytes: int) -> str:
    """A resize in words."""
    return f"resize_({num_bytes}) of a storage of {storage.nbytes()} bytes"
