"""The protocol of a backend: what everything above needs from a device, and nothing more.

Three things make one up. A `Backend` stands for a device. A `Workspace` is what one session owns on it: one memory
pool and one capture stream, in which all of the session's graphs are recorded, because graphs that share a pool must
also share a stream and an order. A `Graph` is one recording. `tests/contract` is this page as a test suite: whatever
passes it is a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch


class Graph(ABC):
    """One recording of device work.

    `begin` and `end` are separate calls, not a `with` block, because a step may be cut into several graphs from inside
    the user's code. Between them nothing takes effect: memory and random generators are as before once it has ended.
    """

    @abstractmethod
    def begin(self) -> None:
        """Start to record. The workspace must be inside `capturing()`."""

    @abstractmethod
    def end(self) -> None:
        """Stop recording and make the graph ready to replay; raises if the recording is broken."""

    @abstractmethod
    def abort(self) -> None:
        """Drop a recording under way, whatever state it is in. Never raises; eager code works afterwards."""

    @abstractmethod
    def replay(self) -> None:
        """Run the recorded work once, on the caller's stream."""

    @abstractmethod
    def free(self) -> None:
        """Give the graph and what it holds back."""

    @property
    @abstractmethod
    def recorded_anything(self) -> bool:
        """Whether any device work was recorded so far; True where that cannot be told."""

    @property
    @abstractmethod
    def nodes(self) -> int | None:
        """How many nodes an ended graph has, or None where that cannot be told."""


class Workspace(ABC):
    """One session's pool and capture stream."""

    @abstractmethod
    def graph(self, generators: Sequence[torch.Generator] = ()) -> Graph:
        """A new, empty graph in this pool; replays advance `generators` besides the default one."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[None]:
        """Run on the capture stream, after all the caller's stream has queued and before what it queues next."""

    @abstractmethod
    def warming_up(self) -> AbstractContextManager[None]:
        """Run eagerly as a capture would: on its stream, with its memory, with its view of compiled code."""

    @abstractmethod
    def keeping(self) -> AbstractContextManager[None]:
        """Inside `warming_up`: what is made here lives on (optimizer state) and is not for the pool."""

    @abstractmethod
    def capturing(self) -> AbstractContextManager[None]:
        """The surroundings of a capture: its stream, a drained queue, the garbage collector held off."""

    @abstractmethod
    def pool_bytes(self) -> int:
        """How much memory the pool holds."""

    @abstractmethod
    def close(self) -> None:
        """Give the pool back. Graphs must have been freed."""


class Backend(ABC):
    """A device on which steps are captured and replayed."""

    name: ClassVar[str]
    """The word for it: `cuda` or `tape`."""
    device: torch.device

    @abstractmethod
    def workspace(self) -> Workspace:
        """A new pool and capture stream."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread records a graph right now."""

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is this device's, so that a graph can use it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """The most memory held since `reset_peak_memory`, or None where nobody counts."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start counting the peak anew."""
