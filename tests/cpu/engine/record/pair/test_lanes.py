"""Lanes: which orders of replays overwrite nothing that is still needed."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepgraph.engine.record.pair.lanes import CaptureSpan, PoolLane, PoolLanes


class Result:
    """What somebody may hold."""

    def __init__(self) -> None:
        self.held = False

    def is_held(self) -> bool:
        return self.held


class Pair:
    """What a lane knows of a runner."""

    def __init__(self, lane: PoolLane, forward_at: int, backward_at: float = math.inf) -> None:
        self.span, self.is_freed, self.result, self.grads = CaptureSpan(forward_at), False, Result(), Result()
        if backward_at != math.inf:
            self.span.add_backward(int(backward_at))
        lane.add(self)  # type: ignore[arg-type]

    def has_held_grads(self) -> bool:
        return self.grads.is_held()


def lane_of(*numbers: tuple[int, float]) -> tuple[Any, list[Any]]:
    lane = PoolLane(1)
    return lane, [Pair(lane, *pair) for pair in numbers]


def test_lane_admits_the_order_of_the_capture() -> None:
    lane, (first, second, third) = lane_of((1, 6), (2, 5), (3, 4))
    for pair in (first, second, third):
        assert lane.admits(pair)
        lane.begin(pair)
    for pair in (third, second, first):
        lane.end(pair)
    assert not lane.is_busy
    assert lane.admits(first)


def test_lane_admits_nothing_while_weight_gradients_wait() -> None:
    lane, (first, second, third) = lane_of((1, 4), (2, 3), (9, 10))
    for pair in (first, second):
        lane.begin(pair)
    lane.wait(second)
    assert lane.is_first_backward(4), "no other backward comes before that of the first"
    lane.wait(first)
    assert lane.is_busy
    assert not lane.admits(third)
    lane.end(first)
    lane.end(second)
    assert not lane.is_busy
    assert lane.admits(third)


def test_lane_refuses_an_earlier_forward_during_a_later_call() -> None:
    lane, (first, second) = lane_of((1, 4), (2, 3))
    lane.begin(second)
    assert not lane.admits(first)
    lane.end(second)
    assert lane.admits(first)


def test_lane_refuses_a_forward_from_after_a_pending_backward() -> None:
    lane, (first, second) = lane_of((1, 2), (3, 4))  # one after the other in the capture
    lane.begin(first)
    assert not lane.admits(second)
    lane.end(first)
    assert lane.admits(second)


def test_lane_knows_a_backward_that_was_captured_later() -> None:
    lane, (first, second) = lane_of((1, math.inf), (2, 3))
    lane.begin(first)
    assert lane.admits(second)
    first.span.add_backward(4)
    assert lane.admits(second)


def test_gradients_are_read_in_place_after_all_earlier_backwards() -> None:
    lane, (first, second) = lane_of((1, 3), (2, 4))
    lane.begin(first)
    lane.begin(second)
    assert lane.is_first_backward(3)
    assert not lane.is_first_backward(4)
    lane.end(first)
    assert lane.is_first_backward(4)


def test_held_results_are_those_that_a_forward_could_overwrite() -> None:
    lane, (first, second, third) = lane_of((1, 6), (2, 5), (3, 4))
    for pair in (first, second, third):
        lane.begin(pair)
    for pair in (third, second, first):
        lane.end(pair)
    second.result.held = True
    assert lane.held_results(third) == []
    assert lane.held_results(second) == [second]
    assert lane.held_results(first) == [second]
    second.result.held = False
    assert lane.held_results(first) == []


def test_held_gradients_are_those_that_a_forward_could_overwrite() -> None:
    """A gradient is born in the backward, after all forwards, each of which may use its memory."""
    lane, (first, second) = lane_of((1, 4), (2, 3))
    first.grads.held = True
    for pair in (first, second):
        lane.begin(pair)
    for pair in (second, first):
        lane.end(pair)
    assert lane.held_results(second) == [first]
    assert lane.held_results(first) == [first]
    first.grads.held = False
    assert lane.held_results(first) == []


def test_results_of_a_freed_runner_are_still_cared_for() -> None:
    lane, (first, second) = lane_of((1, 4), (2, 3))
    second.result.held = True
    lane.begin(second)
    lane.end(second)
    second.is_freed = True
    lane.forget(second)
    assert lane.held_results(first) == [second]
    first.is_freed = True
    lane.forget(second)
    assert lane.held_results(first) == []


def test_lanes_are_made_as_needed_and_used_again_when_empty() -> None:
    lanes = PoolLanes(itertools.count(1))
    assert [lanes.at(0).number, lanes.at(2).number] == [1, 3]
    assert lanes.spare() is lanes.at(0)
    pair = Pair(lanes.at(0), 1)
    assert lanes.spare() is lanes.at(1)
    exclusive = lanes.exclusive()
    assert exclusive.number == 4
    assert lanes.exclusive() is exclusive
    lanes.at(0).begin(pair)  # type: ignore[arg-type]
    assert lanes.busy() == {0}
    pair.is_freed = True
    assert lanes.spare() is lanes.at(0)


@given(st.permutations(range(8)), st.lists(st.integers(0, 3), max_size=24))
def test_whatever_is_admitted_overwrites_nothing(capture: list[int], calls: list[int]) -> None:
    """A model of memory: a graph may overwrite all that was captured after it and is still needed."""
    place = {event: number for number, event in enumerate(capture)}
    events = [(min(place[i], place[i + 4]), max(place[i], place[i + 4])) for i in range(4)]
    lane, pairs = lane_of(*events)
    under_way: list[Any] = []

    def run(number: float, needed: list[Any]) -> None:
        assert all(pair.span.forward_at < number for pair in needed)

    for index in calls:
        pair = pairs[index]
        if pair in under_way:
            under_way.remove(pair)
            run(pair.span.backward_at, under_way)
            lane.end(pair)
        elif lane.admits(pair):
            run(pair.span.forward_at, under_way)
            under_way.append(pair)
            lane.begin(pair)
    assert lane.is_busy == bool(under_way)
