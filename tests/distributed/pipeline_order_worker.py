"""One rank of a real gloo group: each of torch's pipeline schedules runs, and must do what its order says."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from stepgraph.engine.order import order_from_pipelining
from tests.distributed.ranks import end_together
from tests.pipeline import SCHEDULES, actions_of, make_schedule, recorded_step


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name, form in SCHEDULES.items():
        stages = form.stages_of(rank, world)
        schedule = make_schedule(name, 2 * world)
        ran, order = recorded_step(schedule, 2 * world), order_from_pipelining(schedule)
        assert ran == actions_of(order, stages), (name, ran, order)
        if form.v_shaped:  # torch's eval() cannot run with neighbouring stages on one rank
            continue
        ran = [action for action in recorded_step(schedule, 2 * world, training=False) if "F" in action]
        assert ran == actions_of(order_from_pipelining(schedule, forward_only=True), stages), (name, ran)
    end_together()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
