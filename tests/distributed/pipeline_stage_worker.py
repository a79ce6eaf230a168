"""One rank of a real gloo group: pipelines whose stages are graphed, against eager ones."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

import stepgraph
from tests.pipeline import SCHEDULES
from tests.stage_harness import Pipeline, assert_equal_histories, assert_graphed_equals_eager, run


def equality(name: str) -> None:
    """Training, step by step; again with few sends under way, where torch can: it then lets go of outputs early."""
    if "max_outstanding_sends" in inspect.signature(getattr(torch_schedules, name)).parameters:
        assert_graphed_equals_eager(name, 2 * dist.get_world_size(), max_outstanding_sends=1).close()
    handle = assert_graphed_equals_eager(name, 2 * dist.get_world_size())
    splits = any(row.weight_grads for row in handle.report().rows)
    assert splits == (name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"))
    handle.close()


def neighbours() -> None:
    """Each rank decides for itself: one is eager, one replays; then the other way round; evaluations in between."""
    eager, mixed = Pipeline("ScheduleInterleaved1F1B", 4), Pipeline("ScheduleInterleaved1F1B", 4)
    rank = dist.get_rank()
    handle = stepgraph.graph_stage(mixed.stages[rank:], mixed.schedule, warmup=2) if rank == 0 else None
    histories: list[list[Any]] = []
    for pipeline in (eager, mixed):
        torch.manual_seed(rank)
        history = run(pipeline, 4)
        history += run(pipeline, 2, training=False)
        if handle is not None and pipeline is mixed:
            assert handle.report().steps == {"warm-up": 2, "replay": 2, "evaluation": 2}
            handle.reset()
        if rank == 1 and pipeline is mixed:
            handle = stepgraph.graph_stage(mixed.stages[0], mixed.schedule, warmup=1)
        history += run(pipeline, 4)
        histories.append(history)
    assert handle is not None
    assert handle.report().steps["replay"] == (4 if rank == 0 else 3)
    assert_equal_histories(*histories)  # the handle is left open: the group ends before it


def killed() -> None:
    """The last rank is killed in the middle of a replayed step; the others must not wait for ever."""
    pipeline = Pipeline("Schedule1F1B", 8)
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1, strict=True)
    run(pipeline, 3)
    if dist.get_rank() == dist.get_world_size() - 1:
        before = handle.report().rows[0].forwards

        def die(*_: Any) -> None:
            if handle.report().rows[0].forwards == before + 3:
                print("killed in a replayed step", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        pipeline.blocks[0].register_forward_hook(die)  # around the graph, so that it runs at replays
    run(pipeline, 100)
    print("went on", flush=True)


def out_of_order() -> None:
    """One rank's schedule is changed after the capture: it says so, and the others end with an error too."""
    pipeline = Pipeline("ScheduleInterleavedZeroBubble", 4)
    stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1, strict=True)
    run(pipeline, 3)
    if dist.get_rank() == 1:
        actions = pipeline.schedule.pipeline_order_with_comms[1]
        first, second = [i for i, action in enumerate(actions) if str(action).startswith("3W")][:2]
        actions[first], actions[second] = actions[second], actions[first]
    run(pipeline, 1)
    print("went on", flush=True)


def every_schedule() -> None:
    for name in SCHEDULES:
        equality(name)


CASES = {"equality": every_schedule, "neighbours": neighbours, "killed": killed, "out of order": out_of_order}


def main(rank: int, world: int, store: str, *cases: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for case in cases:
        CASES[case]()
        print(f"{case}: done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
