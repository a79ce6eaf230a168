"""A lane is a set of graphs that share memory; it knows the orders in which they can be replayed.

Memory that is free at the end of a graph is used by graphs that are captured later. So a replay of an earlier graph may
overwrite the activations and results of a later one. Nothing is overwritten if calls come in the order of the capture:
a call may take a runner if, for each call in flight in the same lane, the runner's forward was captured after theirs
and before their backwards. That is a comparison of two numbers. A call in another order takes a runner in another lane,
which has its own memory. The calls of one microbatch usually come in the recorded order, so a lane serves a microbatch,
and microbatches may come in any order.

Where weight gradients come later than the backward, the call keeps its memory until then. In the meantime no other call
of its lane may begin: its graphs were captured between forward and weight gradients, or reuse the memory of either.

A caller may hold a result after its call is over, or a gradient that it got without a copy. So each forward checks,
before its replay, those that it could overwrite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from stepgraph.core.executed_code import in_a_backward
from stepgraph.engine.memory.outputs import StaticOutputs


class CaptureSpan:
    """The places of a runner's graphs in the capture order of the lane."""

    __slots__ = ("backward_at", "forward_at", "last_at")

    def __init__(self, forward_at: int) -> None:
        self.forward_at = self.last_at = forward_at
        self.backward_at: float = math.inf
        """The number of its first backward."""

    def add_backward(self, captured_at: int) -> None:
        """Note a captured backward."""
        self.backward_at = min(self.backward_at, captured_at)
        self.last_at = max(self.last_at, captured_at)


class Tenant(Protocol):
    """The part of a runner that a lane uses."""

    span: CaptureSpan
    held_up: set[int]
    """Runners, by id, that could not run because results of this one were held."""

    @property
    def is_freed(self) -> bool:
        """True if its graphs were freed."""

    @property
    def result(self) -> StaticOutputs:
        """The results of its forward."""

    def has_held_grads(self) -> bool:
        """True if a caller holds a gradient that it got without a copy."""


class CallCount:
    """The number of calls in flight in all lanes, and of calls begun in the present round."""

    __slots__ = ("begun", "num")

    def __init__(self) -> None:
        self.num = self.begun = 0


class PoolLane:
    """One part of the pool, the calls in flight in it, and the calls whose results may still be held."""

    def __init__(self, number: int, calls: CallCount | None = None) -> None:
        self.number = number
        """Its number in the session's pool."""
        self._calls = calls if calls is not None else CallCount()
        self._captured = 0
        self._under_way: list[Tenant] = []  # by the order of the capture, since no other order is admitted
        self._first_backward: float = math.inf
        self._waiting: list[Tenant] = []
        self._ended: dict[Tenant, None] = {}
        self._runners: weakref.WeakSet[Tenant] = weakref.WeakSet()

    @property
    def is_busy(self) -> bool:
        """True if a call is in flight."""
        return bool(self._under_way or self._waiting)

    @property
    def is_empty(self) -> bool:
        """True if it has no runner."""
        return all(runner.is_freed for runner in self._runners)

    def next_number(self) -> int:
        """Return the next place in the capture order."""
        self._captured += 1
        return self._captured

    def add(self, runner: Tenant) -> None:
        """Add a runner."""
        self._runners.add(runner)

    def admits(self, runner: Tenant) -> bool:
        """True if a runner's forward overwrites nothing of the calls in flight, and their backwards nothing of it."""
        if self._waiting:
            return False
        if not self._under_way:
            return True
        forward_at = runner.span.forward_at
        return self._under_way[-1].span.forward_at < forward_at < self._earliest_backward(forward_at)

    def _earliest_backward(self, sought: float) -> float:
        if self._first_backward <= sought:  # perhaps that of a call that is over
            self._first_backward = min((r.span.backward_at for r in self._under_way), default=math.inf)
        return self._first_backward

    def begin(self, runner: Tenant) -> None:
        """Note that a call is in flight."""
        self._under_way.append(runner)
        self._calls.num += 1
        self._calls.begun += 1
        self._first_backward = min(self._first_backward, runner.span.backward_at)

    def wait(self, runner: Tenant) -> None:
        """Note that the backward of a call is over, and its weight gradients wait."""
        self._under_way.remove(runner)
        self._waiting.append(runner)

    def end(self, runner: Tenant) -> None:
        """Note that a call is over; its results may still be held."""
        if self._under_way and self._under_way[-1] is runner:
            self._under_way.pop()
            self._calls.num -= 1
        elif runner in self._under_way or runner in self._waiting:
            (self._under_way if runner in self._under_way else self._waiting).remove(runner)
            self._calls.num -= 1
        self._ended[runner] = None

    def is_first_backward(self, number: float) -> bool:
        """True if no call in flight has a backward that was captured before this one."""
        return number <= self._earliest_backward(number - 1)

    def held_results(self, runner: Tenant) -> list[Tenant]:
        """The runners whose results, or gradients, are held by a caller and would be overwritten."""
        if not self._ended:
            return []
        found, forward_at = [], runner.span.forward_at
        for ended in tuple(self._ended):
            results_in_reach = ended.span.forward_at >= forward_at
            grads_in_reach = ended.span.last_at >= forward_at
            if (results_in_reach and ended.result.is_held()) or (grads_in_reach and ended.has_held_grads()):
                found.append(ended)
            elif results_in_reach:
                del self._ended[ended]
        return found

    def forget(self, runner: Tenant) -> None:
        """Forget a freed runner, unless its results are held and a graph could overwrite them."""
        if not any(r.span.forward_at < runner.span.forward_at and not r.is_freed for r in self._runners):
            self._ended.pop(runner, None)


class PoolLanes:
    """The lanes of one model's graphs."""

    def __init__(self, new_number: Iterator[int]) -> None:
        self._new_number = new_number
        self.calls = CallCount()
        self._lanes: list[PoolLane] = []
        self._exclusive: PoolLane | None = None

    def at(self, index: int) -> PoolLane:
        """Return the lane for calls that find `index` other calls in flight."""
        while len(self._lanes) <= index:
            self._lanes.append(PoolLane(next(self._new_number), self.calls))
        return self._lanes[index]

    def spare(self) -> PoolLane:
        """Return a lane without any graph."""
        found = next((i for i, lane in enumerate(self._lanes) if lane.is_empty), len(self._lanes))
        return self.at(found)

    def exclusive(self) -> PoolLane:
        """Return an empty lane apart from the others, for graphs in a fixed order."""
        if self._exclusive is None or not self._exclusive.is_empty:
            self._exclusive = PoolLane(next(self._new_number), self.calls)
        return self._exclusive

    def busy(self) -> set[int]:
        """The lanes with a replayed call in flight."""
        return {index for index, lane in enumerate(self._lanes) if lane.is_busy}


def under_way(lane: PoolLane, device: torch.device) -> Callable[[], bool]:
    """Return a function that tells whether a call of a lane may still need its memory.

    An order asks it before it refuses a new round. After a backward that failed on a GPU, autograd's thread for that
    device drops the failed call a moment after the caller has received the error. A backward without work in that
    thread ends after it.
    """

    def is_under_way() -> bool:
        if lane.is_busy:
            in_a_backward(device, lambda: None)
        return lane.is_busy

    return is_under_way
