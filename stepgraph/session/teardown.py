"""Sessions free their graphs before a process group shuts down.

A graph with a collective holds its communicator, and NCCL frees a communicator only after every such graph:
`destroy_process_group()` at the end of a script would hang (pytorch#115388). At the exit of the interpreter sessions
free their graphs first. torch has no event for groups that are shut down earlier. So the two methods that end a group
are wrapped as long as any session has graphs to free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_ENDS = ("shutdown", "abort")
_LISTENERS = "__stepgraph_listeners__"


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


class BeforeGroupsEnd:
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
