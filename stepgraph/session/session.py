"""A session owns what captures share: one pool, one capture stream, the gradients' addresses, all graphs.

Nothing is global: two sessions live side by side in one process. Closing one, also by `with`, by an exception or at
the interpreter's exit, frees its graphs and then its pool. Steps that are given the same session share its memory.
A session also drops its graphs, and lets its steps capture anew, when what they hold on to is about to go: the
communicators of a process group, the buckets of a DDP.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from stepgraph.backends import Backend, Graph, Workspace, backend_for, backend_named
from stepgraph.errors import ClosedError, InvalidArgument
from stepgraph.grads.step_grads import GradBuffers
from stepgraph.session.teardown import BeforeGroupsEnd, is_distributed
from stepgraph.tracebacks import entry_point


class _Resources:
    """What must be given back, apart from the session so that a finalizer can hold it."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.workspace: Workspace | None = None
        self.grads = GradBuffers()
        self.listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.groups: BeforeGroupsEnd | None = None

    def adopt(self, graph: Graph) -> None:
        self.graphs.append(graph)
        if self.groups is None and is_distributed():
            self.groups = BeforeGroupsEnd(self.drop_graphs)

    def free_graphs(self) -> None:
        graphs, self.graphs = self.graphs, []
        for graph in graphs:
            graph.free()

    def drop_graphs(self) -> None:
        self.free_graphs()
        for listener in self.listeners:
            tell = listener()
            if tell is not None:
                tell()

    def release(self) -> None:
        self.free_graphs()
        if self.groups is not None:
            self.groups.close()
            self.groups = None
        self.grads.clear()
        if self.workspace is not None:
            self.workspace.close()
            self.workspace = None


class Session:
    """One pool and one capture stream, shared by every step that is given it.

    Example:
        >>> with stepgraph.Session() as session:
        ...     train = stepgraph.capture(train_step, session=session)
        ...     evaluate = stepgraph.capture(eval_step, session=session)
    """

    @entry_point
    def __init__(self, backend: Backend | str | None = None) -> None:
        self._backend = backend_named(backend) if isinstance(backend, str) else backend
        self._resources = _Resources()
        self._lane_numbers = itertools.count(1)
        self._when_closed: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._closed = False
        self._finalizer = weakref.finalize(self, self._resources.release)

    @property
    def backend(self) -> Backend:
        """The backend, chosen on first use: a GPU where there is one."""
        if self._backend is None:
            self._backend = backend_for("cuda" if torch.cuda.is_available() else "cpu")
        return self._backend

    @property
    def has_backend(self) -> bool:
        """Whether the backend is chosen."""
        return self._backend is not None

    def settle(self, backend: Backend) -> None:
        """Use this backend, or make sure that it is the one in use."""
        if self._backend is None:
            self._backend = backend
        elif (self._backend.name, self._backend.device) != (backend.name, backend.device):
            raise InvalidArgument(
                f"the session is on {self._backend.device} ({self._backend.name}), "
                f"the step on {backend.device} ({backend.name})",
                rule="backend",
                why="one session has one pool, on one device.",
                fix="give each device a stepgraph.Session of its own, or name the backend: Session(backend=...).",
            )

    @property
    def workspace(self) -> Workspace:
        """The pool and the stream."""
        if self._closed:
            raise ClosedError(
                "this session was closed", rule="closed", why="its pool is gone.", fix="make a new stepgraph.Session()."
            )
        if self._resources.workspace is None:
            self._resources.workspace = self.backend.workspace()
        return self._resources.workspace

    @property
    def grads(self) -> GradBuffers:
        """Where gradients live."""
        return self._resources.grads

    @property
    def closed(self) -> bool:
        return self._closed

    @entry_point
    def stream(self) -> AbstractContextManager[None]:
        """Run on the capture stream: build DDP and anything else that remembers its stream under it."""
        return self.workspace.stream()

    @property
    def lane_numbers(self) -> Iterator[int]:
        """Numbers for lanes of the pool beside 0, which steps are captured in; none is given out twice."""
        return self._lane_numbers

    def adopt(self, graph: Graph) -> None:
        """Own a graph until it is released."""
        self._resources.adopt(graph)

    def when_dropped(self, tell: Callable[[], None]) -> None:
        """Call a method, for as long as its object lives, when all graphs are gone at once."""
        living = [listener for listener in self._resources.listeners if listener() is not None]
        self._resources.listeners = [*living, weakref.WeakMethod(tell)]

    def drop_graphs(self) -> None:
        """Free all graphs, because what they use is going away; steps capture anew."""
        self._resources.drop_graphs()

    def release(self, graph: Graph) -> None:
        """Free one graph."""
        if graph in self._resources.graphs:
            self._resources.graphs.remove(graph)
            graph.free()

    @property
    def num_graphs(self) -> int:
        return len(self._resources.graphs)

    def pool_bytes(self) -> int:
        return self._resources.workspace.pool_bytes() if self._resources.workspace is not None else 0

    def when_closed(self, tell: Callable[[], None]) -> None:
        """Call a method, for as long as its object lives, when the session has been closed: it may raise."""
        living = [listener for listener in self._when_closed if listener() is not None]
        self._when_closed = [*living, weakref.WeakMethod(tell)]

    def close(self, *, tell: bool = True) -> None:
        """Free all graphs and the pool; `tell` those who asked for it. Closing twice is fine."""
        self._closed = True
        self._finalizer()
        with contextlib.ExitStack() as stack:
            for found in [listener() for listener in reversed(self._when_closed)] if tell else ():
                if found is not None:
                    stack.callback(found)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(tell=error is None)  # an error under way is the one to see
