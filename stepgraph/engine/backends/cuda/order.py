"""Replays on several streams wait for each other where they share memory.

Graphs of one session share a pool and gradients, and each graph has one place for its arguments and results. So a call
on another stream than the last one is queued behind all that the last one's stream has. Calls on one stream cost one
comparison and no event. Sessions share no memory, with one exception: all graphs of a generator read its position from
one tensor on the device, which each drawing replay fills. So drawing replays wait for each other across sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def _raw_stream(device_index: int) -> int:
    return int(torch.cuda.current_stream(device_index).cuda_stream)


class StreamOrder:
    """The stream of the last replay; other streams queue behind it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index or 0
        self._current: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
        self._handle = -1
        self._last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Queue the caller's stream behind the last replay, if that was on another stream."""
        if self._current(self._index) != self._handle:
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self._handle = stream, int(stream.cuda_stream)

    def queue_behind(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """Queue these streams behind the last replay, because they are about to get memory that it uses."""
        last = self._last
        for stream in streams:
            if last is not None and stream != last:
                stream.wait_stream(last)


_DRAWN: dict[int, StreamOrder] = {}
"""For each device, the replays that draw random numbers."""


def order_of_draws(device: torch.device) -> StreamOrder:
    """The order of all replays of the process that draw random numbers on a device."""
    return _DRAWN.setdefault(device.index or 0, StreamOrder(device))
