"""Orders from a schedule table: 1F1B and its interleaved form, for any number of microbatches.

A rank with several model chunks runs its microbatches in groups: a group through the first chunk, the same group
through the second, and so on, then the next group. `get_schedule_table` lists that as (microbatch, chunk). A rank warms
up with some forwards (`num_warmup_microbatches`), then runs a forward and a backward in turn, then the backwards that
are left. Backwards walk the same table with the chunks reversed (`convert_schedule_table_to_order`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from stepgraph.core.errors import StepgraphWarning
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.order.entries import invalid, is_count


@entry_point
def get_schedule_table(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int | None = None,
    *,
    microbatch_group_size: int | None = None,
) -> list[tuple[int, int]]:
    """The (microbatch, chunk) of each forward of a rank, both counted from 0.

    `microbatch_group_size` is an older name of `microbatch_group_size_per_vp_stage`.

    Example:
        >>> get_schedule_table(3, 2, microbatch_group_size_per_vp_stage=2)
        [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    _at_least("num_microbatches", num_microbatches, 1)
    _at_least("num_model_chunks", num_model_chunks, 1)
    if microbatch_group_size_per_vp_stage is not None and microbatch_group_size is not None:
        raise invalid(
            "microbatch_group_size_per_vp_stage and microbatch_group_size are given",
            why="they are two names of one number.",
            fix=f"microbatch_group_size_per_vp_stage={microbatch_group_size_per_vp_stage} alone.",
        )
    if microbatch_group_size is not None:
        warnings.warn(
            "microbatch_group_size is an older name   [option]\n"
            f"Fix: microbatch_group_size_per_vp_stage={microbatch_group_size}.",
            StepgraphWarning,
            stacklevel=3,  # the caller of the entry point
        )
    group = microbatch_group_size if microbatch_group_size is not None else microbatch_group_size_per_vp_stage
    _at_least("microbatch_group_size_per_vp_stage", group, 1)
    assert group is not None
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_model_chunks)
        for microbatch in range(start, min(start + group, num_microbatches))
    ]


@entry_point
def num_warmup_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size: int,
    pipeline_parallel_size: int,
    pipeline_parallel_rank: int,
    *,
    overlap_moe_expert_parallel_comm: bool = False,
) -> int:
    """How many forwards a rank runs before it runs a forward and a backward in turn.

    A forward of one chunk counts once. With expert-parallel overlap a schedule with several chunks warms up one more,
    so that each backward has a forward to run beside. One rank alone does not warm up, and several chunks on it are no
    pipeline: `validate_order` refuses the order made from that.

    Example:
        >>> num_warmup_microbatches(8, 2, 4, pipeline_parallel_size=4, pipeline_parallel_rank=3)
        4
    """
    _at_least("num_microbatches", num_microbatches, 1)
    _at_least("num_model_chunks", num_model_chunks, 1)
    _at_least("microbatch_group_size", microbatch_group_size, 1)
    _at_least("pipeline_parallel_size", pipeline_parallel_size, 1)
    _at_least("pipeline_parallel_rank", pipeline_parallel_rank, 0)
    if pipeline_parallel_rank >= pipeline_parallel_size:
        raise invalid(
            f"pipeline_parallel_rank is {pipeline_parallel_rank} of {pipeline_parallel_size} ranks",
            why="ranks are counted from 0.",
            fix=f"pass a rank from 0 to {pipeline_parallel_size - 1}.",
        )
    later_ranks = pipeline_parallel_size - pipeline_parallel_rank - 1
    if pipeline_parallel_size == 1:
        warmup = 0
    elif num_model_chunks == 1:
        warmup = later_ranks
    else:
        warmup = 2 * later_ranks + (num_model_chunks - 1) * microbatch_group_size + overlap_moe_expert_parallel_comm
    return min(warmup, num_microbatches * num_model_chunks)


@entry_point
def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """The order of a rank: warm-up forwards, then a forward and a backward in turn, then the backwards left.

    Example:
        >>> convert_schedule_table_to_order(1, 1, get_schedule_table(3, 1, 1))
        [1, 1, -1, 1, -1, -1]
    """
    _at_least("num_warmup_microbatches", num_warmup_microbatches, 0)
    _at_least("num_model_chunks", num_model_chunks, 1)
    chunks = [chunk for _, chunk in schedule_table]
    for index, chunk in enumerate(chunks):
        if not 0 <= chunk < num_model_chunks:
            raise invalid(
                f"row {index} of the schedule table, {schedule_table[index]}, names chunk {chunk}",
                why=f"with num_model_chunks={num_model_chunks} the chunks of a table are 0 to {num_model_chunks - 1}.",
                fix=f"make the table with get_schedule_table(..., num_model_chunks={num_model_chunks}, ...).",
            )
    forwards = [chunk + 1 for chunk in chunks]
    backwards = [chunk - num_model_chunks for chunk in chunks]
    warmup = min(num_warmup_microbatches, len(chunks))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(chunks) - warmup :]


def _at_least(name: str, value: int | None, least: int) -> None:
    if not is_count(value, least):
        raise invalid(
            f"{name} is {value!r}",
            why=f"it is a whole number of at least {least}.",
            fix=f"pass an int, `{name}={least}` or more.",
        )
