"""Malformed orders are errors that point at the entry; valid ones are read into entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import InvalidArgument
from stepgraph.engine.order import Entry, Kind, Order, count_microbatches, read_order, validate_order
from tests.cpu.engine.order.drawn import Drawn, orders

NAN, INFINITY = float("nan"), float("inf")
MALFORMED: list[tuple[list[Any], int, str, str]] = [
    # order, the entry at fault, what is said of it, what is expected
    (
        [-1, 1],
        0,
        "a backward of chunk 1 without a forward",
        "`1` before it: chunk 1 has had 0 forwards and 0 backwards",
    ),
    ([1, -1, -1, 1], 2, "a backward of chunk 1 without a forward", "`1` before it: chunk 1 has had 1 forward and 1"),
    ([1, -2, 2, -1], 1, "a backward of chunk 2 without a forward", "`2` before it"),
    (
        [1, 1, -1],
        1,
        "the forward of chunk 1, microbatch 1, without a backward",
        "`-1` after it: chunk 1 has 2 forwards",
    ),
    ([1, 2, -1], 1, "the forward of chunk 2, microbatch 0, without a backward", "`-2` after it"),
    ([0], 0, "of chunk 0 (0)", "c (forward of chunk c), -c (its backward) or -c.5 (its weight gradient)"),
    ([1, -0.5, -1], 1, "of chunk 0 (-0.5)", "chunks counted from 1"),
    ([1, -1.5, -1], 1, "a weight gradient of chunk 1 without a backward", "`-1` before it"),
    ([1, -1, -1.5, -1.5], 3, "a weight gradient of chunk 1 without a backward", "has had 1 backward and 1 weight"),
    ([1, -1, -2.5], 2, "a weight gradient of chunk 2 without a backward", "`-2` before it"),
    ([-1.5], 0, "a weight gradient of chunk 1 without a backward", "`-1` before it"),
    ([1, 1, -1, -1, -1.5], 3, "the backward of chunk 1, microbatch 1, without a weight gradient", "`-1.5` after it"),
    ([1.5, -1], 0, "1.5", "c (forward of chunk c)"),
    ([1, -1.25], 1, "-1.25", "-c.5 (its weight gradient)"),
    ([1, NAN], 1, "nan", "c (forward"),
    ([INFINITY], 0, "inf", "c (forward"),
    ([1, -INFINITY], 1, "-inf", "c (forward"),
    ([1, "-1"], 1, "of type str", "a number"),
    ([1, None], 1, "of type NoneType", "a number"),
    ([True, -1], 0, "of type bool", "a number"),
    ([1, [-1]], 1, "of type list", "a number"),
    ([1, 3, -3, -1], 1, "the forward of chunk 3, microbatch 0, and there is no chunk 2", "chunk 2, too"),
    ([2, -2], 0, "the forward of chunk 2, microbatch 0, and there is no chunk 1", "chunk 1, too"),
]


@pytest.mark.parametrize(("order", "index", "what", "expected"), MALFORMED)
def test_malformed_order_is_an_error_that_points_at_the_entry(
    order: list[Any], index: int, what: str, expected: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_order(order)
    error = caught.value
    assert error.rule == "order"
    assert error.what == f"entry {index} of the order is {what}"
    line, mark, wanted = error.details
    start, length = mark.index("^"), mark.count("^")
    assert line[start : start + length] in (f"{order[index]}", repr(order[index])), "the mark is elsewhere"
    assert line[len("order     ") : start].split() == [
        str(v) if not isinstance(v, str) else repr(v) for v in order[:index]
    ]
    assert wanted.startswith("expected  ")
    assert expected in wanted
    assert error.why
    assert error.fix


NAMED: list[tuple[list[float], list[Any], int, str]] = [
    ([1, -1], [0, 1], 1, "a backward of chunk 1, microbatch 1, without a forward"),
    ([1, 1, -1, -1], [0, 0, 0, 1], 1, "a second forward of chunk 1, microbatch 0"),
    ([1, 1, -1, -1], [0, 1, 1, 1], 3, "a second backward of chunk 1, microbatch 1"),
    ([1, 1, -1, -1, -1.5], [0, 1, 0, 1, 2], 4, "a weight gradient of chunk 1, microbatch 2, without a backward"),
    ([1, 1, -1, -1], [0, 2, 0, 2], 1, "the forward of chunk 1, microbatch 2, and there is no microbatch 1 of chunk 1"),
    ([1, 1, -1], [0, 1, 1], 0, "the forward of chunk 1, microbatch 0, without a backward"),
    ([1, -1], [0, -1], 1, "of microbatch -1"),
    ([1, -1], [0, 0.0], 1, "of microbatch 0.0"),
    ([1, -1], [False, 0], 0, "of microbatch False"),
]


@pytest.mark.parametrize(("numbers", "microbatches", "index", "what"), NAMED)
def test_malformed_order_with_microbatches_is_refused_by_entry(
    numbers: list[float], microbatches: list[Any], index: int, what: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_order(Order(numbers, microbatches))
    assert caught.value.what == f"entry {index} of the order is {what}"


@pytest.mark.parametrize("order", [None, "1 -1", 3, {1: -1}, {1, -1}, np.array([1, -1]), iter([1, -1])])
def test_order_that_is_no_list_is_an_error(order: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"the order is of type {type(order).__name__}"):
        validate_order(order)


def test_empty_order_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="the order is empty"):
        validate_order([])


def test_error_of_a_long_order_shows_the_entries_around() -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_order([1] * 40 + [-2] + [-1] * 40)
    line, mark, _ = caught.value.details
    assert line.split() == ["order", "...", *["1"] * 10, "-2", *["-1"] * 10, "..."]
    assert mark.index("^") == line.index("-2")


@pytest.mark.parametrize(
    "order",
    [
        [1, 2, 1, 2, 1, 2, -2, -1, -2, -1, -2, -1],
        [1, 2, -2, 1, -1, -1],
        [1, 1, 1],
        [1.0, -1.0],
        (1, -1, -1.5),
        [np.int64(1), np.float64(-1), np.float32(-1.5)],
        [1, 2, -2, -1, -2.5],
    ],
)
def test_valid_order_passes(order: Any) -> None:
    validate_order(order)


def test_order_is_read_into_entries() -> None:
    assert read_order([1, 1, -1, -1, -1.5, -1.5]) == (
        Entry(Kind.FORWARD, 1, 0),
        Entry(Kind.FORWARD, 1, 1),
        Entry(Kind.INPUT_GRAD, 1, 0),
        Entry(Kind.INPUT_GRAD, 1, 1),
        Entry(Kind.WEIGHT_GRAD, 1, 0),
        Entry(Kind.WEIGHT_GRAD, 1, 1),
    )


def test_order_with_microbatches_is_read_as_it_says() -> None:
    order = Order([1, 1, -1, -1, -1.5], microbatches=[0, 1, 1, 0, 0])
    assert [(e.kind, e.microbatch) for e in read_order(order)[2:]] == [
        (Kind.BACKWARD, 1),
        (Kind.INPUT_GRAD, 0),
        (Kind.WEIGHT_GRAD, 0),
    ]


@settings(deadline=None, max_examples=50)
@given(orders())
def test_entries_say_the_numbers_they_were_read_from(drawn: Drawn) -> None:
    entries = read_order(drawn.order, drawn.layers)
    assert [entry.number for entry in entries] == list(drawn.order)
    assert read_order(Order([e.number for e in entries], [e.microbatch for e in entries])) == entries
    assert count_microbatches(drawn.order) == drawn.num_microbatches


@settings(deadline=None, max_examples=50)
@given(orders(named=False), st.data())
def test_order_that_lost_an_entry_is_an_error(drawn: Drawn, data: st.DataObject) -> None:
    """Except for a chunk's only weight gradient (its backward is whole then) and for the only backward (inference)."""
    index = data.draw(st.integers(0, len(drawn.order) - 1))
    lost = drawn.order[index]
    order = [*drawn.order[:index], *drawn.order[index + 1 :]]
    if order and ((lost != int(lost) and lost not in order) or min(order) > 0):
        validate_order(order)
    else:
        with pytest.raises(InvalidArgument):
            validate_order(order)


def test_count_microbatches_points_at_the_extra_one_of_a_chunk() -> None:
    with pytest.raises(InvalidArgument) as caught:
        count_microbatches([1, 2, -2, 1, -1, -1])
    assert caught.value.details[1] == "          " + " " * len("1 2 -2 ") + "^"
    assert caught.value.details[2] == "expected  2 forwards of each chunk; chunk 2 has 1"


def test_order_reads_like_its_numbers() -> None:
    order = Order([1, 1, -1, -1], microbatches=[0, 1, 1, 0])
    assert order == [1, 1, -1, -1] == order
    assert order == (1, 1, -1, -1)
    assert order != [1, -1, 1, -1]
    assert (len(order), order[2], list(order), -1 in order) == (4, -1, [1, 1, -1, -1], True)
    assert order[1:3] == Order([1, -1], microbatches=[1, 1])
    assert order != Order([1, 1, -1, -1], microbatches=[0, 1, 0, 1])
    assert order != "1 1 -1 -1"
    assert eval(repr(order)) == order


def test_order_with_other_microbatches_than_numbers_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="an order of 2 entries and 1 microbatch"):
        Order([1, -1], [0])
