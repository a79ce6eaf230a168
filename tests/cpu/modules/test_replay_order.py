"""The check of replays against a recorded order."""

from __future__ import annotations

import pytest

from stepgraph.errors import CaptureError
from stepgraph.modules.replay_order import ReplayEntry, ReplayOrder


class Order:
    """Layers `a` and `b`, two microbatches in flight."""

    def __init__(self) -> None:
        self.under_way = 0
        forwards = [ReplayEntry(name, name, call, False) for call, name in enumerate("abab")]
        backwards = [ReplayEntry("ab"[call % 2], "ab"[call % 2], call, True) for call in (1, 0, 3, 2)]
        self.order = ReplayOrder([*forwards, *backwards], lambda: self.under_way > 0)

    def forward(self, name: str) -> ReplayEntry:
        entry = self.order.take_forward(name, name)
        self.under_way += 1
        return entry

    def backward(self, entry: ReplayEntry) -> None:
        self.order.take_backward(entry)
        self.under_way -= 1


def test_order_goes_round() -> None:
    order = Order()
    for _ in range(3):
        calls = [order.forward(name) for name in "abab"]
        assert [entry.call for entry in calls] == [0, 1, 2, 3]
        for index in (1, 0, 3, 2):
            order.backward(calls[index])


def test_order_names_what_it_expects_and_what_it_got() -> None:
    order = Order()
    order.forward("a")
    with pytest.raises(CaptureError) as caught:
        order.forward("a")
    error = caught.value
    assert error.rule == "replay-order"
    assert error.what == "a forward of `a` is out of order"
    assert list(error.details) == ["expected  entry 1 of 8: forward of `b` (call 1)", "received  a forward of `a`"]
    assert "handle.reset()" in error.fix


def test_order_refuses_the_backward_of_another_call() -> None:
    order = Order()
    calls = [order.forward(name) for name in "abab"]
    with pytest.raises(CaptureError, match=r"the backward of `b` \(call 3\) is out of order"):
        order.backward(calls[3])
    order.backward(calls[1])  # a refused call has changed nothing


def test_order_refuses_a_second_backward() -> None:
    order = Order()
    calls = [order.forward(name) for name in "abab"]
    order.backward(calls[1])
    with pytest.raises(CaptureError, match="expected  entry 5 of 8: backward of `a`"):
        order.backward(calls[1])


def test_order_begins_anew_when_nothing_is_under_way() -> None:
    order = Order()
    for name in "aba":
        order.forward(name)
    with pytest.raises(CaptureError):
        order.forward("a")
    order.under_way = 0
    assert order.forward("a").call == 0


def test_order_does_not_begin_with_another_entry() -> None:
    order = Order()
    order.forward("a")
    order.under_way = 0
    order.forward("b")
    order.under_way = 0
    with pytest.raises(CaptureError, match="expected  entry 0 of 8"):
        order.forward("b")
