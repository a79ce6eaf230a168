"""Whose turn it is: a cursor takes the calls of an order and refuses all others."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.core.errors import CaptureError
from stepgraph.engine.order.cursor import Cursor, Turn


def turns_of(keys: str, **flags: bool) -> list[Turn]:
    return [Turn(key, f"call of {key}", index, **flags) for index, key in enumerate(keys)]


class Round:
    """A cursor whose round is under way as long as the test says so."""

    def __init__(self, turns: list[Turn], order: tuple[float, ...] = ()) -> None:
        self.under_way = True
        self.cursor = Cursor(turns, "call in order.", order, lambda: self.under_way)

    def refused(self, key: Hashable) -> CaptureError:
        with pytest.raises(CaptureError) as caught:
            self.cursor.take(key)
        return caught.value


KEYS = st.text("abc", min_size=1, max_size=8)


@given(KEYS, st.integers(1, 3))
def test_cursor_takes_the_turns_of_round_after_round(keys: str, rounds: int) -> None:
    cursor = Round(turns_of(keys)).cursor
    for _ in range(rounds):
        assert cursor.is_at_start
        assert [cursor.take(key) for key in keys] == list(range(len(keys)))
    assert cursor.is_at_start


@given(KEYS, st.lists(st.sampled_from("abcd"), max_size=20))
def test_cursor_refuses_all_but_the_next_turn(keys: str, calls: list[str]) -> None:
    """Under way: any sequence of calls, of which those in their turn are taken and the others change nothing."""
    round_, position = Round(turns_of(keys)), 0
    for key in calls:
        expected = keys[position % len(keys)]
        if key == expected:
            assert round_.cursor.take(key) == position % len(keys)
            position += 1
        else:
            error = round_.refused(key)
            assert f"expected  entry {position % len(keys)} of {len(keys)}: call of {expected}" in error.details
            assert f"received  call of {key}" in str(error) or key not in keys


@given(KEYS, st.data())
def test_cursor_begins_again_when_a_round_is_given_up(keys: str, data: st.DataObject) -> None:
    by_itself = data.draw(st.booleans())
    round_ = Round(turns_of(keys))
    for key in keys[: data.draw(st.integers(0, len(keys)))]:
        round_.cursor.take(key)
    if by_itself:
        round_.under_way = False
    else:
        round_.cursor.begin()
        assert round_.cursor.is_at_start
    if not by_itself or keys.count(keys[0]) == 1:  # else the first key may be the next turn's
        assert [round_.cursor.take(key) for key in keys] == list(range(len(keys)))


@given(st.permutations("abcd"), st.permutations("abcd"))
def test_cursor_takes_free_turns_of_an_entry_in_any_order(first: list[str], second: list[str]) -> None:
    free = [Turn(key, key, 1, any_order=True) for key in "abcd"]
    round_ = Round([Turn("x", "x", 0), *free, Turn("y", "y", 2), Turn("e", "e", 3, any_order=True)])
    for keys in (first, second):
        round_.cursor.take("x")
        for key in keys:
            round_.refused("e")  # of another entry
            round_.cursor.take(key)
            round_.refused(key)
        round_.cursor.take("y")
        round_.cursor.take("e")


@given(st.lists(st.sampled_from("bcd"), max_size=6), st.integers(1, 4))  # the first turn begins a round
def test_cursor_takes_turns_again_that_repeat(again: list[str], taken: int) -> None:
    keys = "abcd"
    round_ = Round(turns_of(keys, repeats=True))
    for _ in range(2):  # rounds
        for key in keys[:taken]:
            round_.cursor.take(key)
        for key in again:
            if key in keys[:taken]:
                assert round_.cursor.take(key) == keys.index(key)
            elif key != keys[taken]:
                round_.refused(key)
        for key in keys[taken:]:
            round_.cursor.take(key)


@given(st.sets(st.sampled_from("bcd")), st.sets(st.sampled_from("bcd")))
def test_cursor_goes_past_turns_in_one_round(first: set[str], second: set[str]) -> None:
    cursor = Round(turns_of("abcd")).cursor
    for absent in (first, second, set()):
        assert cursor.is_at_start
        cursor.take("a")
        cursor.pass_over("a key that the order does not have")
        for key in sorted(absent, reverse=True):
            cursor.pass_over(key)
        for key in "bcd":
            if key not in absent:
                cursor.take(key)
    assert cursor.is_at_start


def test_cursor_forgets_passed_over_turns_of_a_round_given_up() -> None:
    round_ = Round(turns_of("abcd"))
    round_.cursor.take("a")
    round_.cursor.pass_over("c")
    round_.under_way = False
    for key in "abcd":
        round_.cursor.take(key)


def test_cursor_says_what_it_expected_and_what_came() -> None:
    round_ = Round([Turn("f", "forward", 0), Turn("b", "backward", 1), Turn("e", "end of the step", None)])
    round_.cursor.take("f")
    error = round_.refused("f")
    assert (error.rule, error.what) == ("replay-order", "the forward is out of order")
    assert error.details == ("expected  entry 1 of 2: backward", "received  forward")
    assert "share memory by the order" in error.why
    assert error.fix == "call in order."
    round_.cursor.take("b")
    error = round_.refused("z")
    assert error.details == ("expected  end of the step", "received  z, which the order does not have")
    pointing = Round([Turn("f", "forward", 0), Turn("b", "backward", 1)], order=(1, -1)).refused("b")
    assert pointing.details == (
        "order     1 -1",
        "          ^",
        "expected  entry 0 of 2: forward",
        "received  backward",
    )
