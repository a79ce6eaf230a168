"""The backend protocol lists all that the rest of the package needs from a device.

A `Backend` stands for a device. A `Workspace` is what one session owns on it: one memory pool and one capture stream,
because graphs that share a pool must also share a stream and an order. A `Graph` is one recording. Whatever passes
`tests/contract` is a backend.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from stepgraph.core.errors import CaptureRefused
from stepgraph.engine.backends.nodes import Nodes


@dataclass(slots=True)
class RandomUse:
    """How recorded code used generators' states, apart from drawing."""

    reads: bool = False
    """Whether it read a state, perhaps to go back to it in a later graph."""
    rewinds_to: set[Graph | None] = field(default_factory=set)
    """The graphs whose states it went back to; None for a state of unknown origin."""
    moved: list[torch.Generator] = field(default_factory=list)
    """The generators that a replay moves."""

    @property
    def draws(self) -> bool:
        """Whether a replay moves any generator."""
        return bool(self.moved)


class Graph(ABC):
    """One recording of device work.

    `begin` and `end` are separate calls, not a `with` block, because a step may be cut into several graphs from inside
    the user's code. Between them nothing takes effect: memory and random generators are as before once it has ended.
    """

    random: RandomUse

    note_loaded: Callable[[torch.Tensor], None] | None = None
    """Where a backend watches for overwritten memory: note that eager code has written a tensor in the pool."""

    follow: Callable[[], None] | None = None
    """Where calls may come on several streams: queue the caller's stream behind the session's last replay. To be called
    first at each replay, before arguments are copied in."""

    @abstractmethod
    def refuse(self, error: CaptureRefused) -> None:
        """Raise this error and break the recording: it stays broken even if the step catches the error."""

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

    @property
    def launch(self) -> Callable[[], None]:
        """The fastest form of `replay`, once the graph has ended."""
        return self.replay

    def will_replay_from(self) -> None:
        """Before `end`: the graph goes back to an earlier graph's random states, and `replay_from` will replay it."""
        return

    def random_origin(self) -> Any:
        """Where the generators are now, if a later graph that goes back to this one's random states needs to know."""
        return None

    def replay_from(self, origin: Any) -> None:
        """Replay a graph that goes back to an earlier one's random states, for the run of that one from `origin`.

        The generators are left as they are now.
        """
        self.replay()

    @abstractmethod
    def free(self) -> None:
        """Free the graph and what it holds."""

    @property
    @abstractmethod
    def recorded_anything(self) -> bool:
        """Whether any device work was recorded so far; True where that is unknown."""

    @property
    @abstractmethod
    def nodes(self) -> int | None:
        """How many nodes an ended graph has, or None where that is unknown."""

    def read_nodes(self) -> Nodes | None:
        """The nodes of an ended graph with the bytes that they were given, or None where they cannot be read."""
        return None


class Workspace(ABC):
    """One session's pool and capture stream."""

    @abstractmethod
    def graph(self, generators: Sequence[torch.Generator] = (), lane: int = 0) -> Graph:
        """A new, empty graph in this pool; replays advance `generators` besides the default one.

        A lane is a part of the pool: graphs of one lane share memory, so that one may overwrite what another has left;
        graphs of different lanes never touch each other's.
        """

    def stream(self) -> AbstractContextManager[None]:
        """Run on the capture stream, after all the caller's stream has queued and before what it queues next."""
        return contextlib.nullcontext()

    @abstractmethod
    def warming_up(self) -> AbstractContextManager[None]:
        """Run eagerly as a capture would: on its stream, with its memory, with its view of compiled code."""

    def keeping(self) -> AbstractContextManager[None]:
        """Inside `warming_up`: what is made here lives on (optimizer state) and is not for the pool."""
        return contextlib.nullcontext()

    @abstractmethod
    def capturing(self) -> AbstractContextManager[None]:
        """The surroundings of a capture: its stream, a drained queue, the garbage collector held off."""

    def renew(self) -> None:
        """Where no graph is left: give back the memory that steps were captured in, except what is in use."""
        return

    @abstractmethod
    def pool_bytes(self) -> int:
        """How much memory the pool holds."""

    @abstractmethod
    def held(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of these tensors that are in the pool's memory."""

    @abstractmethod
    def close(self) -> None:
        """Give the pool back. Graphs must have been freed."""

    def note_named(self, tensors: Iterable[torch.Tensor], writers: Iterable[Graph]) -> None:
        """Where a backend watches for overwritten memory: Python can reach these tensors between calls.

        Only the `writers`, and graphs that write to these very tensors, may write to their memory.
        """
        return


class CopyStream:
    """A stream for copies into static buffers, beside the caller's. This one is for a device without streams."""

    def copying(self, *, after_caller: bool) -> AbstractContextManager[None]:
        """Run on this stream, after the work that `mark_used` saw and before what the caller's stream queues next.

        `after_caller`: also after all that the caller's stream has queued by now, which may still make what is copied.
        """
        return contextlib.nullcontext()

    def mark_used(self) -> None:
        """The work that the caller's stream has queued by now reads the buffers: later copies wait for it."""
        return


class Reading:
    """A small tensor on its way to the host. This one is for a device whose memory is the host's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor.clone()

    def is_ready(self) -> bool:
        """Whether it has arrived. Never waits."""
        return True

    def value(self) -> torch.Tensor:
        """The tensor in host memory; waits for it if it has not arrived."""
        return self._host


class Backend(ABC):
    """A device on which steps are captured and replayed."""

    runs_while_recording: ClassVar[bool] = False
    """Whether work is executed while it is recorded, so that arguments need values that it can work with."""
    name: ClassVar[str]
    """`cuda` or `tape`."""
    device: torch.device

    @abstractmethod
    def workspace(self) -> Workspace:
        """A new pool and capture stream."""

    def copy_stream(self) -> CopyStream:
        """A new stream for copies."""
        return CopyStream()

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread records a graph right now."""

    @property
    def capture_probe(self) -> Callable[[], bool]:
        """The fastest form of `is_capturing`, for code that asks at each call."""
        return self.is_capturing

    @property
    @abstractmethod
    def default_generator(self) -> torch.Generator:
        """The generator that random work on this device draws from when none is given."""

    @abstractmethod
    def swap_random_state(self, generator: torch.Generator) -> None:
        """Swap the states of a generator and the default one, in eager code and in the graph being recorded.

        Recorded, what follows draws at every replay from the state that this generator has then, and advances it. The
        graph must know the generator, and the swap must be undone before the graph ends.
        """

    def get_random_state(self, generator: torch.Generator) -> torch.Tensor:
        """A generator's state; inside a recording it is valid only until that recording ends."""
        return generator.get_state()

    def set_random_state(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Set a generator's state; inside a recording, to one that was read in the same recording."""
        generator.set_state(state)

    def can_record_here(self) -> bool:
        """Whether a graph could record work on the calling thread's stream: CUDA cannot on its default one."""
        return True

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is this device's, so that a graph can use it."""

    def read_later(self, tensor: torch.Tensor) -> Reading:
        """Send a tensor to the host, behind what the caller's stream has queued, without waiting."""
        return Reading(tensor)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        return

    def peak_memory_bytes(self) -> int | None:
        """The most memory held since `reset_peak_memory`, or None where it is not counted."""
        return None

    def reset_peak_memory(self) -> None:
        """Start counting the peak again."""
        return
