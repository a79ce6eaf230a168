"""Orders of chunks taken apart into orders of layers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import InvalidArgument
from stepgraph.engine.order import (
    Order,
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
    get_schedule_table,
    num_warmup_microbatches,
    validate_order,
)

ROWS = [
    ("1 2 -2 1 -1 -1", [1, 2], True, "1 2 3 1 -3 -3.5 -2 -2.5 -1 -1.5 -1 -1.5"),
    ("1 2 -2 1 -1 -1", [1, 2], False, "1 2 3 1 -3 -2 -1 -1"),
    ("1 1 -1 1 -1 -1", [2], False, "1 2 1 2 1 -2 2 -1 -2 -1 -2 -1"),
    (
        "1 1 -1 1 -1 -1",
        [3],
        True,
        "1 2 3 1 2 3 1 -3 -3.5 2 -2 -2.5 3 -1 -1.5 -3 -3.5 -2 -2.5 -1 -1.5 -3 -3.5 -2 -2.5 -1 -1.5",
    ),
    ("1 2 -2 1 -1 2 -2 -1", [1, 2], False, "1 2 3 1 -3 -2 2 -1 3 -3 -2 -1"),
]


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


@pytest.mark.parametrize(("order", "layers", "wgrad", "expected"), ROWS)
def test_overlap_order_is_the_reference_order(order: str, layers: list[int], wgrad: bool, expected: str) -> None:
    assert get_overlap_moe_expert_parallel_comm_order(numbers(order), layers, wgrad)[0] == numbers(expected)


@pytest.mark.parametrize("wgrad", [True, False])
def test_overlap_ids_are_chunk_and_layer_of_forwards(wgrad: bool) -> None:
    _, ids = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, 1, -1, -1], [1, 2], wgrad)
    assert ids == [[0, 0], [1, 0], [1, 1], [0, 0]] + [None] * (8 if wgrad else 4)


@pytest.mark.parametrize("wgrad", [True, False])
def test_overlap_of_forwards_only_is_their_layers(wgrad: bool) -> None:
    order, ids = get_overlap_moe_expert_parallel_comm_order([1, 2, 1, 2], [2, 1], wgrad)
    assert order == [1, 2, 3, 1, 2, 3]
    assert ids == [[0, 0], [0, 1], [1, 0]] * 2


def test_overlap_of_a_longer_forward_puts_weight_gradient_last() -> None:
    order, _ = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, 1, -1, 2, -2, -1], [3, 1], True)
    assert order[4:9] == [1, -4, 2, 3, -4.5]


def test_overlap_leaves_out_chunks_without_layers() -> None:
    order, ids = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, -1], [0, 1], True)
    assert (order, ids) == ([1, -1, -1.5], [[1, 0], None, None])


def test_overlap_pairs_backwards_only_where_a_forward_follows() -> None:
    order, _ = get_overlap_moe_expert_parallel_comm_order([1, 1, -1, -1, 1, -1], [2], False)
    assert order == [1, 2, 1, 2, -2, -1, 1, -2, 2, -1, -2, -1]


def layer_order(
    m: int, c: int, group: int, ranks: int, rank: int, layers: list[int], wgrad: bool
) -> tuple[list[int], list[float]]:
    warmup = num_warmup_microbatches(m, c, group, ranks, rank % ranks, overlap_moe_expert_parallel_comm=True)
    chunks = convert_schedule_table_to_order(warmup, c, get_schedule_table(m, c, group))
    return chunks, get_overlap_moe_expert_parallel_comm_order(chunks, layers, wgrad)[0]


@settings(deadline=None, max_examples=50)
@given(
    m=st.integers(1, 8),
    group=st.integers(1, 4),
    ranks=st.integers(1, 5),
    rank=st.integers(0, 4),
    layers=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    wgrad=st.booleans(),
)
def test_overlap_order_is_valid_and_loses_nothing(
    m: int, group: int, ranks: int, rank: int, layers: list[int], wgrad: bool
) -> None:
    layers = layers if ranks > 1 else layers[:1]
    _, order = layer_order(m, len(layers), group, ranks, rank, layers, wgrad)
    validate_order(order, [1] * sum(layers))
    counts = Counter(order)
    for layer in range(1, sum(layers) + 1):
        assert counts[layer] == counts[-layer] == m
        assert counts[-layer - 0.5] == (m if wgrad else 0)


@settings(deadline=None, max_examples=50)
@given(
    m=st.integers(1, 8),
    group=st.integers(1, 4),
    ranks=st.integers(1, 5),
    rank=st.integers(0, 4),
    layers=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    wgrad=st.booleans(),
)
def test_overlap_order_keeps_the_turn_of_forwards_and_backwards(
    m: int, group: int, ranks: int, rank: int, layers: list[int], wgrad: bool
) -> None:
    """Taken by themselves, forwards and data gradients come as in the order of chunks, layer by layer."""
    layers = layers if ranks > 1 else layers[:1]
    chunks, order = layer_order(m, len(layers), group, ranks, rank, layers, wgrad)
    starts = [sum(layers[:chunk]) for chunk in range(len(layers))]
    ranges = [range(start + 1, start + count + 1) for start, count in zip(starts, layers, strict=True)]
    assert [n for n in order if n > 0] == [layer for c in chunks if c > 0 for layer in ranges[c - 1]]
    backwards = [-layer for c in chunks if c < 0 for layer in reversed(ranges[-c - 1])]
    assert [n for n in order if n < 0 and n == int(n)] == backwards
    assert [n + 0.5 for n in order if n != int(n)] == (backwards if wgrad else [])


@pytest.mark.parametrize(
    ("order", "entry"),
    [
        ([1, -1, -1.5], 2),
        (Order([1, 1, -1, -1], microbatches=[0, 1, 1, 0]), 2),
        (Order([1, -1, -1.5], microbatches=[0, 0, 0]), 2),
    ],
)
def test_overlap_refuses_an_order_of_more_than_whole_numbers(order: list[float], entry: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"entry {entry} of the order is the .*\[order\]"):
        get_overlap_moe_expert_parallel_comm_order(order, [1], False)


def test_overlap_reads_an_order_that_names_its_microbatches() -> None:
    named = Order([1, 1, -1, -1], microbatches=[0, 1, 0, 1])
    expected = get_overlap_moe_expert_parallel_comm_order([1, 1, -1, -1], [2], True)
    assert get_overlap_moe_expert_parallel_comm_order(named, [2], True) == expected
