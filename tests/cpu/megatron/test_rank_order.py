"""A rank's order from a training's config: the reference orders, and where each layer's graphs are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.order import read_order, samples_of
from stepgraph.megatron.rank_order import order_of_rank


def config(size: int, microbatches: int | None = None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(pipeline_model_parallel_size=size, num_microbatches=microbatches, **fields)


@pytest.mark.parametrize(
    ("size", "rank", "microbatches", "layers", "group", "order"),
    [
        (2, 0, 4, [3], None, "1 1 -1 1 -1 1 -1 -1"),
        (4, 0, 4, [1], None, "1 1 1 1 -1 -1 -1 -1"),
        (2, 0, 4, [1, 2], None, "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"),
        (2, 0, 5, [1, 1], 3, "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"),
        (
            *(4, 3, 8, [1, 1], None),
            "1 1 1 1 2 -2 2 -2 2 -2 2 -2 1 -1 1 -1 1 -1 1 -1 2 -2 2 -2 2 -2 2 -2 -1 -1 -1 -1",
        ),
    ],
)
def test_order_of_rank_is_the_reference(
    size: int, rank: int, microbatches: int, layers: list[int], group: int | None, order: str
) -> None:
    found = order_of_rank(
        config(size, microbatches, microbatch_group_size_per_vp_stage=group), layers, pipeline_parallel_rank=rank
    )
    assert list(found.order) == [int(word) for word in order.split()]
    assert found.num_microbatches == microbatches
    assert not found.one_for_all


@pytest.mark.parametrize("layers", [[2], [2, 1], [1, 0, 3]])
def test_order_of_one_stage_has_one_microbatch_for_all(layers: list[int]) -> None:
    found = order_of_rank(config(1, 8), layers)
    chunks = range(1, len(layers) + 1)
    assert found.order == [*chunks, *(-c for c in reversed(chunks))]
    assert found.num_microbatches == 1
    assert found.one_for_all


def test_order_of_a_config_without_a_pipeline_has_one_microbatch() -> None:
    assert order_of_rank(None, [4]).order == [1, -1]
    assert order_of_rank(SimpleNamespace(), [4]).one_for_all


@pytest.mark.parametrize("splits", [False, True])
def test_order_with_overlap_is_one_of_layers(splits: bool) -> None:
    fields = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": splits}
    found = order_of_rank(config(2, 2, **fields), [1, 2], pipeline_parallel_rank=1)
    assert found.num_layers_per_chunk == (1, 1, 1)
    assert any(number % 1 for number in found.order) is splits
    # without overlap 2 * 0 + 1 * 2 chunks would be warm-up, and the first backward would come after 1 1 2 3
    forwards = [number for number in found.order if number > 0]
    before = list(found.order).index(next(number for number in found.order if number < 0))
    assert forwards[:before] == [1, 1, 2, 3, 2, 3]


def test_order_without_overlap_stays_one_of_chunks_where_it_must() -> None:
    fields = config(2, 2, overlap_moe_expert_parallel_comm=True)
    found = order_of_rank(fields, [3], pipeline_parallel_rank=0, may_overlap=False)
    assert found.num_layers_per_chunk == (3,)
    assert set(found.order) == {1, -1}


@pytest.mark.parametrize("overlap", [False, True])
def test_sample_numbers_are_those_of_the_order(overlap: bool) -> None:
    layers = [2, 0, 3]
    found = order_of_rank(config(2, 4, overlap_moe_expert_parallel_comm=overlap), layers, pipeline_parallel_rank=0)
    numbers = [found.sample(c, i, m) for c, count in enumerate(layers) for m in range(4) for i in range(count)]
    assert sorted(numbers) == list(range(20))
    per_chunk = found.num_layers_per_chunk
    for entry in read_order(found.order, per_chunk):
        expected = list(samples_of(entry, per_chunk, 4))
        if overlap:
            chunk, layer = [(c, i) for c, count in enumerate(layers) for i in range(count)][entry.chunk - 1]
            assert expected == [found.sample(chunk, layer, entry.microbatch)]
        else:
            chunk = entry.chunk - 1
            assert expected == [found.sample(chunk, i, entry.microbatch) for i in range(layers[chunk])]


def test_order_that_is_given_is_checked() -> None:
    found = order_of_rank(config(2), [1], order=[1, 1, -1, -1])
    assert (list(found.order), found.num_microbatches) == ([1, 1, -1, -1], 2)
    with pytest.raises(InvalidArgument, match="without a forward"):
        order_of_rank(config(2), [1], order=[1, -1, -1])
    with pytest.raises(InvalidArgument, match="num_layers_per_chunk"):
        order_of_rank(config(2), [1, 1], order=[1, -1])


@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({}, {"pipeline_parallel_rank": 0}, "num_microbatches"),
        ({"num_microbatches": 4}, {}, "pipeline_parallel_rank"),
        ({"num_microbatches": 4}, {"pipeline_parallel_rank": 2}, "pipeline_parallel_rank"),
        ({"num_microbatches": 0}, {"pipeline_parallel_rank": 0}, "num_microbatches"),
    ],
)
def test_order_of_rank_names_what_is_missing(fields: dict[str, int], options: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        order_of_rank(SimpleNamespace(pipeline_model_parallel_size=2, **fields), [1], **options)
