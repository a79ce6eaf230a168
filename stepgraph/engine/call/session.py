"""A session owns what captures share: one pool, one capture stream, the addresses of gradients, all graphs.

Nothing is global: one process may have several sessions. Closing a session, also by `with`, by an exception or at the
exit of the interpreter, frees its graphs and then its pool. Steps with the same session share its memory. A session
also drops its graphs, and its steps capture again, before something goes away that they use: the communicators of a
process group, the buckets of a DDP.

A graph with a collective holds its communicator, and NCCL frees a communicator only after every such graph:
`destroy_process_group()` at the end of a script would hang (pytorch#115388). At the exit of the interpreter sessions
free their graphs first. torch has no event for groups that are shut down earlier. So the two methods that end a group
are wrapped as long as any session has graphs to free (`_BeforeGroupsEnd`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.core.errors import ClosedError, InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.backends import Backend, Graph, Workspace, backend_for, backend_named
from stepgraph.engine.grads.step_grads import GradBuffers


class _Listeners:
    """Methods to call when something happens, each as long as its object lives."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, method: Callable[[], None]) -> None:
        living = [known for known in self._methods if known() is not None]
        self._methods = [*living, weakref.WeakMethod(method)]

    def living(self) -> list[Callable[[], None]]:
        return [call for known in self._methods if (call := known()) is not None]


class _Resources:
    """The resources to free. They are kept apart from the session, so that a finalizer can hold them."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.workspace: Workspace | None = None
        self.grads = GradBuffers()
        self.when_dropped = _Listeners()
        self.groups: _BeforeGroupsEnd | None = None

    def adopt(self, graph: Graph) -> None:
        self.graphs.append(graph)
        if self.groups is None and _is_distributed():
            self.groups = _BeforeGroupsEnd(self.drop_graphs)

    def free_graphs(self) -> None:
        graphs, self.graphs = self.graphs, []
        for graph in graphs:
            graph.free()

    def drop_graphs(self) -> None:
        self.free_graphs()
        for call in self.when_dropped.living():
            call()

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
    """One pool and one capture stream, shared by every step with this session.

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
        self._when_closed = _Listeners()
        self._closed = False
        self.calling = threading.RLock()
        """Held by the thread that is in a call, or in a replayed backward. A second thread is refused, and never waits
        (`messages.refuse_second_thread`): it might wait for a thread that waits for it."""
        self._finalizer = weakref.finalize(self, self._resources.release)

    @property
    def backend(self) -> Backend:
        """The backend, chosen on first use: a GPU if there is one."""
        if self._backend is None:
            self._backend = backend_for("cuda" if torch.cuda.is_available() else "cpu")
        return self._backend

    @property
    def has_backend(self) -> bool:
        """True once the backend is chosen."""
        return self._backend is not None

    def settle(self, backend: Backend) -> None:
        """Use this backend; raise if the session already uses another one."""
        if self._backend is None:
            self._backend = backend
        elif (self._backend.name, self._backend.device) != (backend.name, backend.device):
            raise InvalidArgument(
                f"the session is on {self._backend.device} ({self._backend.name}), "
                f"the step on {backend.device} ({backend.name})",
                rule="backend",
                why="one session has one pool, on one device.",
                fix="give each device its own stepgraph.Session, or name the backend: Session(backend=...).",
            )

    @property
    def workspace(self) -> Workspace:
        """The pool and the stream."""
        if self._closed:
            raise ClosedError(
                "this session was closed",
                rule="closed",
                why="close() freed its pool.",
                fix="make a new stepgraph.Session().",
            )
        if self._resources.workspace is None:
            self._resources.workspace = self.backend.workspace()
        return self._resources.workspace

    @property
    def grads(self) -> GradBuffers:
        """The memory of gradients."""
        return self._resources.grads

    @property
    def closed(self) -> bool:
        return self._closed

    @entry_point
    def stream(self) -> AbstractContextManager[None]:
        """Run on the capture stream. Build DDP, and other objects that remember their stream, inside this context."""
        return self.workspace.stream()

    @property
    def lane_numbers(self) -> Iterator[int]:
        """Numbers for lanes of the pool, each given out once. Steps are captured in lane 0."""
        return self._lane_numbers

    def adopt(self, graph: Graph) -> None:
        """Own a graph until it is released."""
        self._resources.adopt(graph)

    def when_dropped(self, method: Callable[[], None]) -> None:
        """Call a method, as long as its object lives, when all graphs are dropped at once."""
        self._resources.when_dropped.add(method)

    def drop_graphs(self) -> None:
        """Free all graphs, because something that they use goes away. Steps capture again."""
        self._resources.drop_graphs()

    def release(self, graph: Graph) -> None:
        if graph in self._resources.graphs:
            self._resources.graphs.remove(graph)
            graph.free()

    @property
    def num_graphs(self) -> int:
        return len(self._resources.graphs)

    def pool_bytes(self) -> int:
        return self._resources.workspace.pool_bytes() if self._resources.workspace is not None else 0

    def when_closed(self, method: Callable[[], None]) -> None:
        """Call a method, as long as its object lives, after the session was closed. The method may raise."""
        self._when_closed.add(method)

    def close(self, *, tell: bool = True) -> None:
        """Free all graphs and the pool; with `tell`, call the methods of `when_closed`. A second call frees nothing."""
        self._closed = True
        self._finalizer()
        with contextlib.ExitStack() as stack:
            for call in reversed(self._when_closed.living()) if tell else ():
                stack.callback(call)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(tell=error is None)  # do not hide an error that is being raised


_ENDS = ("shutdown", "abort")
_LISTENERS = "__stepgraph_listeners__"


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


class _BeforeGroupsEnd:
    """Calls a function before any process group is shut down, until closed. Instances may be closed in any order."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        for name in _ENDS:
            end = vars(dist.ProcessGroup).get(name)
            if end is None:
                continue
            if not hasattr(end, _LISTENERS):
                end = _announcing(end)
                setattr(dist.ProcessGroup, name, end)
            getattr(end, _LISTENERS).append(call)

    def close(self) -> None:
        """Stop to call. The last instance to be closed restores torch's own methods."""
        for name in _ENDS:
            end = vars(dist.ProcessGroup).get(name)
            listeners = getattr(end, _LISTENERS, [])
            if self._call in listeners:
                listeners.remove(self._call)
                if not listeners:
                    setattr(dist.ProcessGroup, name, end.__wrapped__)  # type: ignore[union-attr]


def _announcing(end: Any) -> Any:
    listeners: list[Callable[[], None]] = []

    @functools.wraps(end)
    def announced(group: Any, *args: Any, **kwargs: Any) -> Any:
        for call in tuple(listeners):
            call()
        return end.__get__(group)(*args, **kwargs)

    setattr(announced, _LISTENERS, listeners)
    return announced
