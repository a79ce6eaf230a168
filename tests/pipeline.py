"""torch's pipeline schedules over recording stages, for the suites that compare what runs with what an order says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from stepgraph.engine.order import Kind, Order, read_order

WIDTH = 3


@dataclass(frozen=True)
class Form:
    """How many stages a rank has, and whether they are laid out in a V."""

    stages: int
    v_shaped: bool = False

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """The stages of a rank, by index."""
        if self.v_shaped:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * i for i in range(self.stages)]


SCHEDULES = {
    "ScheduleGPipe": Form(1),
    "Schedule1F1B": Form(1),
    "ScheduleInterleaved1F1B": Form(2),
    "ScheduleLoopedBFS": Form(2),
    "ScheduleInterleavedZeroBubble": Form(2),
    "ScheduleZBVZeroBubble": Form(2, v_shaped=True),
    "ScheduleDualPipeV": Form(2, v_shaped=True),
}


class RecordingStage(PipelineStage):
    """A stage that notes what it is asked to compute, as torch writes actions: `2F0`."""

    log: list[str]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"{self.stage_index}F{fwd_chunk_id}")
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        self.log.append(f"{self.stage_index}{'B' if full_backward else 'I'}{bwd_chunk_id}")
        return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"{self.stage_index}W{bwd_chunk_id}")
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def make_schedule(name: str, num_microbatches: int) -> Any:
    """A schedule of torch over this rank's stages, in the default process group."""
    form, rank, ranks = SCHEDULES[name], dist.get_rank(), dist.get_world_size()
    log: list[str] = []
    stages = []
    for index in form.stages_of(rank, ranks):
        stage = RecordingStage(torch.nn.Linear(WIDTH, WIDTH), index, form.stages * ranks, torch.device("cpu"))
        stage.log = log
        stages.append(stage)
    build = getattr(torch_schedules, name)
    return build(stages if form.stages > 1 else stages[0], num_microbatches, loss_fn=torch.nn.functional.mse_loss)


def recorded_step(schedule: Any, num_microbatches: int, training: bool = True) -> list[str]:
    """What the stages of this rank computed in one step, in order."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    batch = torch.randn(2 * num_microbatches, WIDTH)
    stages[0].log.clear()
    run = schedule.step if training else schedule.eval
    run(
        *([batch] if any(stage.is_first for stage in stages) else []),
        target=batch if any(stage.is_last for stage in stages) else None,
    )
    return list(stages[0].log)


def actions_of(order: Order, stages: Sequence[int]) -> list[str]:
    """An order as torch writes actions, given the stages that its chunks are."""
    letters = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT_GRAD: "I", Kind.WEIGHT_GRAD: "W"}
    return [f"{stages[entry.chunk - 1]}{letters[entry.kind]}{entry.microbatch}" for entry in read_order(order)]
