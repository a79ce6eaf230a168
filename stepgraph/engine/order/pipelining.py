"""Orders of the schedules of `torch.distributed.pipelining`.

A schedule with several stages on a rank holds a list of actions for each rank: F (forward), B (backward), I (gradient
of the input), W (gradient of the weights), an overlapped F and B, and communication. The stages of a rank, by index,
are its chunks 1, 2, ...; F becomes c, B and I become -c, W becomes -c.5, and communication is left out. An overlapped
action becomes its parts in the order in which the schedule runs them. Each entry keeps the action's microbatch, because
backwards may come in another order than forwards (LoopedBFS), and a chunk may have both B and I (DualPipeV).

A schedule with one stage on a rank (GPipe, 1F1B) runs a loop of its own. It may hold such a list too, but does not run
it, and that of 1F1B is off by one on the last rank. So its order is made from its numbers of stages and microbatches.
Schedules are read by their attributes: torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.order.entries import Entry, Kind, Order, invalid
from stepgraph.engine.order.schedules import convert_schedule_table_to_order, get_schedule_table
from stepgraph.engine.order.validate import read_order, validate_order

_KINDS = (("F", Kind.FORWARD), ("B", Kind.BACKWARD), ("I", Kind.INPUT_GRAD), ("W", Kind.WEIGHT_GRAD))
_OVERLAPPED = "OVERLAP_F_B"
_COMMUNICATION = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
_WAITS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
"""Newer versions of torch list the end of a communication as an action of its own."""
_LOOPS = ("ScheduleGPipe", "Schedule1F1B", "_ScheduleForwardOnly")


@entry_point
def order_from_pipelining(schedule: Any, rank: int | None = None, *, forward_only: bool = False) -> Order:
    """The order in which a rank of the pipeline group runs a schedule's `step()`; without `rank`, this process.

    `forward_only=True` is the order of `schedule.eval()`, and of `step()` of a schedule without a loss.

    Example:
        >>> order = order_from_pipelining(Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn), rank=0)
        >>> list(order)
        [1, 1, -1, 1, -1, 1, -1, -1]
    """
    runs = (c for c in type(schedule).__mro__ if c.__name__ in _LOOPS or "_step_microbatches" in vars(c))
    loop = getattr(next(runs, None), "__name__", None)
    entries = _loop_entries(schedule, loop, rank) if loop in _LOOPS else _listed_entries(schedule, rank)
    kept = [entry for entry in entries if not forward_only or entry.kind is Kind.FORWARD]
    order = Order((entry.number for entry in kept), (entry.microbatch for entry in kept))
    validate_order(order)
    return order


def _loop_entries(schedule: Any, loop: str | None, rank: int | None) -> Sequence[Entry]:
    """The entries of the loops of schedules with one stage on a rank."""
    num_stages, num_microbatches = schedule._num_stages, schedule._n_microbatches
    stage = schedule._stage.stage_index if rank is None else rank
    if stage not in range(num_stages):
        raise _no_such_rank(schedule, stage, range(num_stages))
    warmup = min(num_stages - stage - 1, num_microbatches) if loop == "Schedule1F1B" else num_microbatches
    order = convert_schedule_table_to_order(warmup, 1, get_schedule_table(num_microbatches, 1, 1))
    return read_order([number for number in order if number > 0 or loop != "_ScheduleForwardOnly"])


def _listed_entries(schedule: Any, rank: int | None) -> Sequence[Entry]:
    """The computing actions of a schedule's list. The one with communication in it is the one that is run."""
    lists: Mapping[int, Any] | None = getattr(schedule, "pipeline_order_with_comms", None)
    lists = lists or getattr(schedule, "pipeline_order", None)
    if not isinstance(lists, Mapping) or not lists:
        raise invalid(
            f"{type(schedule).__name__} is not a schedule that stepgraph can read an order from",
            details=("expected  ScheduleGPipe, Schedule1F1B, or a schedule with a `pipeline_order`",),
            why="its actions are not listed, so their order is not known.",
            fix="take a schedule of torch.distributed.pipelining, or write its order as a list of numbers.",
        )
    rank = getattr(schedule, "rank", 0) if rank is None else rank
    if rank not in lists:
        raise _no_such_rank(schedule, rank, lists)
    found = list(_computing(lists[rank]))
    stages = sorted({stage for _, stage, _ in found})
    return [Entry(kind, stages.index(stage) + 1, microbatch) for kind, stage, microbatch in found]


def _computing(actions: Any) -> Iterator[tuple[Kind, int, int]]:
    kinds = dict(_KINDS)
    for action in actions:
        if action is None:  # a step in which the rank waits
            continue
        name = getattr(action.computation_type, "value", action.computation_type)
        if name in kinds and action.microbatch_index is not None:
            yield kinds[name], action.stage_index, action.microbatch_index
        elif name == _OVERLAPPED and action.sub_actions:
            yield from _computing(action.sub_actions)
        elif name not in _COMMUNICATION + _WAITS:
            raise invalid(
                f"the schedule has an action that stepgraph does not know: {action}",
                details=(
                    f"expected  {', '.join(kinds)} with a microbatch, {_OVERLAPPED} with its parts, communication",
                ),
                why="it may compute something, of an unknown microbatch.",
                fix="take a schedule of these actions, or write its order as a list of numbers.",
            )


def _no_such_rank(schedule: Any, rank: Any, ranks: Any) -> InvalidArgument:
    return invalid(
        f"{type(schedule).__name__} has no rank {rank!r}",
        details=(f"expected  one of {', '.join(map(str, ranks))}",),
        why="ranks are those of the pipeline's process group, counted from 0.",
        fix="pass the rank in the pipeline group: `stage.group_rank`.",
    )
