"""`order_of_rank` derives the order of a pipeline's rank from a training's config.

From the config's pipeline fields (`pipeline_model_parallel_size` and so on) follows in which order the rank runs
forwards and backwards, and how many microbatches need graphs of their own:

- With one stage, a microbatch is over before the next one begins. One is captured, and its graphs serve all.
- With several, each microbatch is captured, and memory is shared by lifetime in the order.
- With expert-parallel overlap the layers of two microbatches take turns, so the order is one of layers; with delayed
  weight gradients these are entries of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.order import (
    convert_schedule_table_to_order,
    count_microbatches,
    get_overlap_moe_expert_parallel_comm_order,
    get_schedule_table,
    num_warmup_microbatches,
    read_order,
)


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A field of a config that may be missing, or None."""
    value = getattr(config, name, None)
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The order of a rank, and where its graphs are found."""

    order: Sequence[float]
    num_layers_per_chunk: tuple[int, ...]
    """Of the order: in an order of layers, 1 for each of them."""
    layers_of_chunk: tuple[int, ...]
    """Of the model."""
    num_microbatches: int
    """Microbatches that have graphs."""
    one_for_all: bool
    """Whether the graphs of one microbatch serve all: each is over before the next one begins."""

    def sample(self, chunk: int, layer: int, microbatch: int) -> int:
        """The sample number of a layer's microbatch, all counted from 0."""
        before = sum(self.layers_of_chunk[:chunk])
        if self.num_layers_per_chunk != self.layers_of_chunk:
            return (before + layer) * self.num_microbatches + microbatch
        return before * self.num_microbatches + microbatch * self.layers_of_chunk[chunk] + layer


def order_of_rank(
    config: Any,
    layers_of_chunk: Sequence[int],
    *,
    num_microbatches: int | None = None,
    pipeline_parallel_rank: int | None = None,
    order: Sequence[float] | None = None,
    may_overlap: bool = True,
) -> RankOrder:
    """The order of this rank. `order` is taken as it is; else it is made from the config.

    Without `may_overlap` it stays one of chunks, whatever the config says of the layers.

    Example:
        >>> order_of_rank(SimpleNamespace(pipeline_model_parallel_size=1), [4]).order
        [1, -1]
    """
    layers, size = tuple(layers_of_chunk), int(setting(config, "pipeline_model_parallel_size", 1))
    if order is not None:
        read_order(order, layers)
        count = count_microbatches(order)
        return RankOrder(order, layers, layers, count, one_for_all=size == 1 and count == 1)
    chunks = range(1, len(layers) + 1)
    count = 1
    made: Sequence[float] = [*chunks, *(-chunk for chunk in reversed(chunks))]
    overlaps = bool(setting(config, "overlap_moe_expert_parallel_comm", False))
    if size > 1:
        count = _count(config, num_microbatches, size)
        group = int(setting(config, "microbatch_group_size_per_vp_stage", size))
        warmup = num_warmup_microbatches(
            count,
            len(layers),
            group,
            size,
            _rank(config, pipeline_parallel_rank, size),
            overlap_moe_expert_parallel_comm=overlaps,
        )
        made = convert_schedule_table_to_order(warmup, len(layers), get_schedule_table(count, len(layers), group))
    if not overlaps or not may_overlap:
        return RankOrder(made, layers, layers, count, one_for_all=size == 1)
    splits = bool(setting(config, "delay_wgrad_compute", False))
    of_layers, _ = get_overlap_moe_expert_parallel_comm_order(made, layers, capture_wgrad_graph=splits)
    return RankOrder(of_layers, (1,) * sum(layers), layers, count, one_for_all=size == 1)


def _count(config: Any, given: int | None, size: int) -> int:
    count = given if given is not None else setting(config, "num_microbatches")
    if count is None:
        raise InvalidArgument(
            f"a pipeline of {size} stages, and the number of microbatches is not given",
            rule="option",
            why="several microbatches are in flight at a time, and each has graphs of its own.",
            fix="pass num_microbatches=, or have it in the config.",
        )
    return int(count)


def _rank(config: Any, given: int | None, size: int) -> int:
    rank = given if given is not None else setting(config, "pipeline_model_parallel_rank")
    if rank is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() == size:
        rank = dist.get_rank()
    if rank is None:
        raise InvalidArgument(
            f"a pipeline of {size} stages, and this rank's place in it is not known",
            rule="option",
            why="each stage runs forwards and backwards in its own order.",
            fix="pass pipeline_parallel_rank=, counted from 0.",
        )
    return int(rank)
