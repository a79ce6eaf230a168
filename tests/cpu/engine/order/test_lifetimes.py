"""Buffers by lifetime: the reference plans, and properties checked against liveness worked out by brute force."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import InvalidArgument
from stepgraph.engine.order import (
    Entry,
    Kind,
    Order,
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
    get_schedule_table,
    num_warmup_microbatches,
    plan_buffers,
    samples_of,
)
from tests.cpu.engine.order.drawn import Drawn, clashes, most_live, orders, spans

TWENTY = "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"
SIXTEEN = "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"
ROWS: list[tuple[str, list[int], list[Hashable] | None, str, int]] = [
    ("1 1 -1 1 -1 1 -1 -1", [2], None, "0 1 2 3 0 1 2 3", 4),
    ("1 -1 1 -1 1 -1 1 -1", [2], None, "0 1 0 1 0 1 0 1", 2),
    (TWENTY, [1, 1], None, "0 1 2 3 4 3 4 5 5 0", 6),
    (TWENTY, [1, 1], ["a", "b"], "0 1 2 3 4 5 6 7 5 6", 8),
    (TWENTY, [1, 1], ["a"] * 5 + ["b"] * 5, "0 1 2 3 4 5 6 7 5 6", 8),
    (SIXTEEN, [1, 2], None, "0 1 2 3 3 4 5 6 4 5 6 0", 7),
]


@pytest.mark.parametrize(("order", "layers", "signatures", "expected", "unique"), ROWS)
def test_plan_is_the_reference_plan(
    order: str, layers: list[int], signatures: list[Hashable] | None, expected: str, unique: int
) -> None:
    plan = plan_buffers([int(word) for word in order.split()], layers, signatures)
    assert plan == [int(word) for word in expected.split()]
    assert len(set(plan)) == unique


def schedule(m: int, c: int, group: int, ranks: int, rank: int, overlap: bool = False) -> list[int]:
    warmup = num_warmup_microbatches(m, c, group, ranks, rank, overlap_moe_expert_parallel_comm=overlap)
    return convert_schedule_table_to_order(warmup, c, get_schedule_table(m, c, group))


def unique(order: list[float] | list[int], layers: list[int]) -> int:
    return len(set(plan_buffers(order, layers)))


@pytest.mark.parametrize(("rank", "expected"), list(enumerate([8, 6, 4, 2])))
def test_plan_of_1f1b_needs_the_pipeline_depth_for_any_batch(rank: int, expected: int) -> None:
    assert [unique(schedule(m, 1, 4, 4, rank), [2]) for m in (16, 64, 256)] == [expected] * 3


@settings(deadline=None, max_examples=50)
@given(
    layers=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    group=st.integers(1, 4),
    ranks=st.integers(1, 4),
    rank=st.integers(0, 3),
    more=st.integers(1, 4),
    form=st.sampled_from(["chunks", "layers", "layers and weight gradients"]),
)
def test_plan_does_not_grow_with_the_microbatches_of_a_schedule(
    layers: list[int], group: int, ranks: int, rank: int, more: int, form: str
) -> None:
    """From one full pipeline on: as many groups as fill the warm-up, and one for each part of the pattern."""

    def buffers(num_groups: int) -> int:
        order: list[float] = [*schedule(num_groups * group, len(layers), group, ranks, rank % ranks, form != "chunks")]
        if form == "chunks":
            return unique(order, layers)
        expanded, _ = get_overlap_moe_expert_parallel_comm_order(order, layers, form != "layers")
        return unique(expanded, [1] * sum(layers)) if expanded else 0

    if ranks == 1:  # without a pipeline there is one chunk
        layers = layers[:1]
    warmup = 2 * ranks + len(layers) * group + 1
    full = 2 + -(-warmup // group)
    assert buffers(full) == buffers(full + more) == buffers(2 * full)


@settings(deadline=None, max_examples=50)
@given(orders(), st.data())
def test_plan_shares_no_live_buffer_and_has_the_fewest_buffers(drawn: Drawn, data: st.DataObject) -> None:
    live = spans(drawn)
    signatures = data.draw(st.lists(st.sampled_from("abc"), min_size=len(live), max_size=len(live)))
    plan = plan_buffers(drawn.order, drawn.layers, signatures)
    assert clashes(plan, live) == []
    assert list(dict.fromkeys(plan)) == list(range(len(set(plan)))), "not numbered by first appearance"
    found = {s: len({b for b, own in zip(plan, signatures, strict=True) if own == s}) for s in signatures}
    assert found == most_live(live, signatures)
    assert len(set(plan)) == sum(found.values()), "two signatures share a buffer"


@settings(deadline=None, max_examples=50)
@given(orders(backward=False))
def test_plan_of_an_order_without_backwards_frees_nothing(drawn: Drawn) -> None:
    assert plan_buffers(drawn.order, drawn.layers) == list(range(sum(drawn.layers) * drawn.num_microbatches))


@settings(deadline=None, max_examples=50)
@given(orders(named=False))
def test_plan_is_the_same_with_named_and_counted_microbatches(drawn: Drawn) -> None:
    microbatches = [list(drawn.order[:i]).count(n) for i, n in enumerate(drawn.order)]
    named = Order(drawn.order, microbatches)
    assert plan_buffers(named, drawn.layers) == plan_buffers(drawn.order, drawn.layers)


def test_plan_holds_a_buffer_until_the_weight_gradient() -> None:
    assert plan_buffers([1, -1, 1, -1], [1]) == [0, 0]
    assert plan_buffers([1, -1, 1, -1.5, -1, -1.5], [1]) == [0, 1]
    assert plan_buffers([1, -1, -1.5, 1, -1, -1.5], [1]) == [0, 0]


def test_plan_of_split_weights_is_safe_in_every_small_schedule() -> None:
    """Every schedule of up to 4 ranks and 4 microbatches with 1 to 3 layers in each of 2 chunks, taken apart."""
    held_longer = 0
    for m, group, ranks, layers in product(range(1, 5), (1, 2, 4), (2, 3, 4), product((1, 2, 3), repeat=2)):
        for rank in range(ranks):
            chunks = schedule(m, 2, group, ranks, rank, overlap=True)
            order, _ = get_overlap_moe_expert_parallel_comm_order(chunks, layers, True)
            drawn = Drawn(order, [1] * sum(layers), m)
            assert clashes(plan_buffers(order, drawn.layers), spans(drawn)) == []
            unsplit = [number for number in order if number == int(number)]
            held_longer += bool(clashes(plan_buffers(unsplit, drawn.layers), spans(drawn)))
    assert held_longer > 0, "no schedule in which it would matter"


def test_plan_frees_the_microbatch_that_an_order_names() -> None:
    backwards_reversed = Order([1, 1, -1, 1, -1, -1], microbatches=[0, 1, 1, 2, 2, 0])
    assert plan_buffers(backwards_reversed, [1]) == [0, 1, 1]
    assert plan_buffers([1, 1, -1, 1, -1, -1], [1]) == [0, 1, 0]


def test_plan_holds_only_microbatches_with_split_weights() -> None:
    order = Order([1, -1, 1, -1, 1, -1.5, -1], microbatches=[0, 0, 1, 1, 2, 0, 2])
    assert plan_buffers(order, [1]) == [0, 1, 1]


def test_samples_are_numbered_by_chunk_microbatch_and_layer() -> None:
    layers, m = [2, 3], 4
    numbers = [
        sample
        for chunk in (1, 2)
        for microbatch in range(m)
        for sample in samples_of(Entry(Kind.FORWARD, chunk, microbatch), layers, m)
    ]
    assert numbers == list(range(sum(layers) * m))
    assert samples_of(Entry(Kind.BACKWARD, 2, 1), layers, m) == range(2 * m + 3, 2 * m + 6)


@pytest.mark.parametrize(
    ("order", "layers", "signatures", "message"),
    [
        ([1, -1], [2], ["a"] * 3, "3 signatures for 2 samples"),
        ([1, -1], [1], [["a"]], "signatures[0] is a list"),
        ([1, -1], [1, 1], None, "entry 0 of the order is the forward of chunk 1, microbatch 0, and num_layers_per"),
        ([1, 2, -2, -1], [2], None, "entry 1 of the order is the forward of chunk 2, microbatch 0, and num_layers_per"),
        ([1, -1], [-1], None, "num_layers_per_chunk is [-1]"),
        ([1, -1], 1, None, "num_layers_per_chunk is 1"),
        (
            [1, 1, 2, -2, -1, -1],
            [1, 1],
            None,
            "entry 1 of the order is the forward of chunk 1, microbatch 1, and chunk",
        ),
    ],
)
def test_plan_of_what_does_not_fit_is_an_error_that_says_so(
    order: list[float], layers: Any, signatures: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan_buffers(order, layers, signatures)
    assert caught.value.rule == "order"
    assert caught.value.what.startswith(message)


def test_plan_of_an_order_of_layers_asks_for_one_layer_a_chunk() -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan_buffers([1, 2, 3, -3, -2, -1], [1, 2])
    assert "num_layers_per_chunk=[1] * 3" in caught.value.fix
