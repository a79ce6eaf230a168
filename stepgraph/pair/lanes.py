"""A lane is a set of graphs that share memory; it knows the orders in which they can be replayed.

What dies inside a graph is given to graphs that are captured later. So the activations and results of a later graph may
lie where an earlier one puts what it needs while it runs, and to replay the earlier one overwrites them. Nothing is
overwritten as long as calls come in the order of the capture: a call may take a runner if, for each call under way in
the same lane, the runner's forward was captured after theirs and before their backwards. That is a comparison of two
numbers. A call that comes in another order takes a runner in another lane, which has memory of its own. Calls of one
microbatch mostly come as they came when they were recorded, so that a lane serves a microbatch, and any order of
microbatches is right.

A result may be held for longer than its call is under way, and so may a gradient that was handed out as it lies. Before
a forward is replayed, those that it could overwrite are therefore looked at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from stepgraph.buffers.outputs import StaticOutputs


class CaptureSpan:
    """When a runner's graphs were captured, by their numbers in the order of the lane."""

    __slots__ = ("backward_at", "forward_at", "last_at")

    def __init__(self, forward_at: int) -> None:
        self.forward_at = self.last_at = forward_at
        self.backward_at: float = math.inf
        """The number of its first backward."""

    def add_backward(self, captured_at: int) -> None:
        """A backward was captured."""
        self.backward_at = min(self.backward_at, captured_at)
        self.last_at = max(self.last_at, captured_at)


class Tenant(Protocol):
    """A runner, as far as a lane knows it."""

    span: CaptureSpan

    @property
    def is_freed(self) -> bool:
        """Whether its graphs are gone."""

    @property
    def result(self) -> StaticOutputs:
        """What its forward hands out."""

    def has_held_grads(self) -> bool:
        """Whether a caller holds a gradient that was handed out as it lies."""


T = TypeVar("T", bound=Tenant)


class CallCount:
    """How many calls are under way in all lanes, and how many have begun since a round has."""

    __slots__ = ("begun", "num")

    def __init__(self) -> None:
        self.num = self.begun = 0


class PoolLane(Generic[T]):
    """One part of the pool, the calls under way in it, and those whose results may still be held."""

    def __init__(self, number: int, calls: CallCount | None = None) -> None:
        self.number = number
        """Which part of the session's pool it is."""
        self._calls = calls if calls is not None else CallCount()
        self._captured = 0
        self._under_way: list[T] = []  # by the order of the capture, since no other order is admitted
        self._first_backward: float = math.inf
        self._ended: dict[T, None] = {}
        self._runners: weakref.WeakSet[T] = weakref.WeakSet()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._under_way)

    @property
    def is_empty(self) -> bool:
        """Whether there is no runner here."""
        return all(runner.is_freed for runner in self._runners)

    def next_number(self) -> int:
        """The place of a graph in the order of the capture."""
        self._captured += 1
        return self._captured

    def add(self, runner: T) -> None:
        """Take a runner in."""
        self._runners.add(runner)

    def admits(self, runner: T) -> bool:
        """Whether a runner's forward harms no call under way, and the backwards of those do not harm it."""
        if not self._under_way:
            return True
        forward_at = runner.span.forward_at
        return self._under_way[-1].span.forward_at < forward_at < self._earliest_backward(forward_at)

    def _earliest_backward(self, sought: float) -> float:
        if self._first_backward <= sought:  # perhaps that of a call that is over
            self._first_backward = min((r.span.backward_at for r in self._under_way), default=math.inf)
        return self._first_backward

    def begin(self, runner: T) -> None:
        """A call is under way."""
        self._under_way.append(runner)
        self._calls.num += 1
        self._calls.begun += 1
        self._first_backward = min(self._first_backward, runner.span.backward_at)

    def end(self, runner: T) -> None:
        """A call is over; its results may still be held."""
        if self._under_way and self._under_way[-1] is runner:
            self._under_way.pop()
            self._calls.num -= 1
        elif runner in self._under_way:
            self._under_way.remove(runner)
            self._calls.num -= 1
        self._ended[runner] = None

    def is_first_backward(self, number: float) -> bool:
        """Whether no call under way has a backward that was captured before this one."""
        return number <= self._earliest_backward(number - 1)

    def held_results(self, runner: T) -> list[T]:
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

    def forget(self, runner: T) -> None:
        """A runner is gone: its results need no care, unless they are held and a graph could overwrite them."""
        if not any(r.span.forward_at < runner.span.forward_at and not r.is_freed for r in self._runners):
            self._ended.pop(runner, None)


class PoolLanes(Generic[T]):
    """The lanes of one model's graphs."""

    def __init__(self, new_number: Iterator[int]) -> None:
        self._new_number = new_number
        self.calls = CallCount()
        self._lanes: list[PoolLane[T]] = []
        self._exclusive: PoolLane[T] | None = None

    def at(self, index: int) -> PoolLane[T]:
        """The lane for calls that find so many others under way."""
        while len(self._lanes) <= index:
            self._lanes.append(PoolLane(next(self._new_number), self.calls))
        return self._lanes[index]

    def spare(self) -> PoolLane[T]:
        """A lane without any graph."""
        found = next((i for i, lane in enumerate(self._lanes) if lane.is_empty), len(self._lanes))
        return self.at(found)

    def exclusive(self) -> PoolLane[T]:
        """An empty lane that is none of the others, for graphs that ask for no admission."""
        if self._exclusive is None or not self._exclusive.is_empty:
            self._exclusive = PoolLane(next(self._new_number), self.calls)
        return self._exclusive

    def busy(self) -> set[int]:
        """The lanes that a replayed call is under way in."""
        return {index for index, lane in enumerate(self._lanes) if lane.is_busy}
