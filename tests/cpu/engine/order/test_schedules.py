"""Schedule tables, warm-up counts and the orders made of them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import InvalidArgument, StepgraphWarning
from stepgraph.engine.order import (
    convert_schedule_table_to_order,
    get_schedule_table,
    num_warmup_microbatches,
    validate_order,
)

ROWS = [
    # microbatches, chunks, group, ranks, rank, warm-up, order
    (1, 1, 1, 1, 0, 0, "1 -1"),
    (4, 1, 2, 2, 0, 1, "1 1 -1 1 -1 1 -1 -1"),
    (4, 1, 4, 4, 0, 3, "1 1 1 1 -1 -1 -1 -1"),
    (4, 2, 2, 2, 0, 4, "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"),
    (5, 2, 3, 2, 0, 5, "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"),
    (8, 2, 4, 4, 3, 4, "1 1 1 1 2 -2 2 -2 2 -2 2 -2 1 -1 1 -1 1 -1 1 -1 2 -2 2 -2 2 -2 2 -2 -1 -1 -1 -1"),
]


@pytest.mark.parametrize(("m", "c", "group", "ranks", "rank", "warmup", "order"), ROWS)
def test_order_of_schedule_is_the_reference_order(
    m: int, c: int, group: int, ranks: int, rank: int, warmup: int, order: str
) -> None:
    assert num_warmup_microbatches(m, c, group, ranks, rank) == warmup
    assert convert_schedule_table_to_order(warmup, c, get_schedule_table(m, c, group)) == [
        int(word) for word in order.split()
    ]


def test_schedule_table_runs_groups_through_the_chunks() -> None:
    first, second = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)], [(3, 0), (4, 0), (3, 1), (4, 1)]
    assert get_schedule_table(5, 2, 3) == first + second


def test_schedule_table_of_an_oversized_group_is_one_group() -> None:
    assert get_schedule_table(2, 2, 7) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    with pytest.warns(StepgraphWarning, match="microbatch_group_size_per_vp_stage=7") as caught:
        assert get_schedule_table(2, 2, microbatch_group_size=7) == get_schedule_table(2, 2, 7)
    assert caught[0].filename == __file__
    assert get_schedule_table(5, 2, microbatch_group_size_per_vp_stage=3) == get_schedule_table(5, 2, 3)


@pytest.mark.parametrize(("ranks", "chunks", "expected"), [(1, 1, 0), (1, 2, 0), (4, 1, 2), (4, 2, 9)])
def test_warmup_counts_one_more_with_expert_parallel_overlap(ranks: int, chunks: int, expected: int) -> None:
    rank = min(1, ranks - 1)
    assert num_warmup_microbatches(8, chunks, 4, ranks, rank, overlap_moe_expert_parallel_comm=True) == expected


def test_warmup_is_never_more_than_all_forwards() -> None:
    assert num_warmup_microbatches(2, 2, 2, 8, 0, overlap_moe_expert_parallel_comm=True) == 4
    assert num_warmup_microbatches(2, 1, 1, 8, 0) == 2


@pytest.mark.parametrize("warmup", [2, 3, 9])
def test_order_with_more_warmup_than_forwards_is_forwards_first(warmup: int) -> None:
    assert convert_schedule_table_to_order(warmup, 1, get_schedule_table(2, 1, 1)) == [1, 1, -1, -1]


def test_order_of_several_chunks_on_one_rank_is_not_valid() -> None:
    order = convert_schedule_table_to_order(num_warmup_microbatches(2, 2, 2, 1, 0), 2, get_schedule_table(2, 2, 2))
    with pytest.raises(InvalidArgument, match="entry 1 of the order is a backward of chunk 2 without a forward"):
        validate_order(order)


def test_order_of_an_empty_table_is_empty() -> None:
    assert convert_schedule_table_to_order(0, 1, []) == []


@settings(deadline=None, max_examples=50)
@given(
    m=st.integers(1, 12),
    c=st.integers(1, 4),
    group=st.integers(1, 6),
    ranks=st.integers(1, 6),
    rank=st.integers(0, 5),
    overlap=st.booleans(),
)
def test_order_has_the_invariants_of_a_schedule(
    m: int, c: int, group: int, ranks: int, rank: int, overlap: bool
) -> None:
    rank, c = rank % ranks, c if ranks > 1 else 1
    warmup = num_warmup_microbatches(m, c, group, ranks, rank, overlap_moe_expert_parallel_comm=overlap)
    order = convert_schedule_table_to_order(warmup, c, get_schedule_table(m, c, group))
    assert len(order) == 2 * m * c
    assert max(order) == c == -min(order)
    assert 0 not in order
    for chunk in range(1, c + 1):
        live = list(accumulate((entry == chunk) - (entry == -chunk) for entry in order))
        assert min(live) == 0 == live[-1]
    in_flight = list(accumulate(1 if entry > 0 else -1 for entry in order))
    assert max(in_flight) == min(warmup + 1, m * c)
    validate_order(order, [1] * c)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: get_schedule_table(0, 1, 1), "num_microbatches is 0"),
        (lambda: get_schedule_table(1, 0, 1), "num_model_chunks is 0"),
        (lambda: get_schedule_table(1, 1, 0), "microbatch_group_size_per_vp_stage is 0"),
        (lambda: get_schedule_table(1, 1), "microbatch_group_size_per_vp_stage is None"),
        (lambda: get_schedule_table(1, 1, 1, microbatch_group_size=1), "microbatch_group_size_per_vp_stage and micro"),
        (lambda: get_schedule_table(2.0, 1, 1), "num_microbatches is 2.0"),  # type: ignore[arg-type]
        (lambda: get_schedule_table(True, 1, 1), "num_microbatches is True"),
        (lambda: num_warmup_microbatches(1, 1, 1, 0, 0), "pipeline_parallel_size is 0"),
        (lambda: num_warmup_microbatches(1, 1, 1, 2, 2), "pipeline_parallel_rank is 2 of 2 ranks"),
        (lambda: num_warmup_microbatches(1, 1, 1, 2, -1), "pipeline_parallel_rank is -1"),
        (lambda: convert_schedule_table_to_order(-1, 1, [(0, 0)]), "num_warmup_microbatches is -1"),
        (lambda: convert_schedule_table_to_order(0, 1, [(0, 0), (0, 1)]), "row 1 of the schedule table, (0, 1)"),
    ],
)
def test_schedule_of_impossible_numbers_is_refused_by_name(call: Any, named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert caught.value.rule == "order"
    assert caught.value.what.startswith(named)
