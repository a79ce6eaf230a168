"""A number of an optimizer that the step itself reads is a host value like any other: noticed, told, never frozen."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import stepgraph
from tests.contract.test_live_numbers import SCHEDULES, Advance, assigned, build
from tests.harness import Program, assert_captured_equals_eager

READS: dict[str, Callable[..., torch.Tensor]] = {
    "in the loss": lambda loss, optimizer, scheduler: loss * optimizer.param_groups[1]["lr"],
    "of all groups": lambda loss, optimizer, scheduler: loss * sum(g.get("lr") for g in optimizer.param_groups),
    "from the scheduler": lambda loss, optimizer, scheduler: loss + scheduler.get_last_lr()[0],
}
"""What a step makes of a number that it reads by itself."""


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("optimizer", ["adamw fused", "adamw foreach"])
def test_live_number_that_the_step_itself_reads_is_never_frozen(
    optimizer: str, read: str, device: torch.device
) -> None:
    """It is baked into the graph like any host value, so it is watched like one: told by name, never stale."""

    def build_reading(device: torch.device) -> Program:
        made: list[Any] = []

        def schedule(optimizer: torch.optim.Optimizer) -> Advance:
            made.append(lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5))
            return lambda index, loss: made[0].step()

        program = build(device, optimizer, schedule)
        (scheduler,), (chosen,) = made, program.optimizers

        def step(x: torch.Tensor) -> torch.Tensor:
            return READS[read](program.step(x), chosen, scheduler)

        return dataclasses.replace(program, step=step)

    with pytest.warns(stepgraph.StepgraphWarning, match=r"param_groups\[\d\]\['lr'\]: |StepLR.get_last_lr\(\): "):
        report = assert_captured_equals_eager(build_reading, device)
    assert report.recaptures == 2


@pytest.mark.parametrize("deep", [False, True])
def test_live_number_read_through_aliased_groups_is_not_frozen(deep: bool, device: torch.device) -> None:
    def build_reading(device: torch.device) -> Program:
        program = build(device, "adamw foreach", assigned("lr", lambda index: 0.5 if index < 10 else 0.25))
        groups = program.optimizers[0].param_groups
        held = {"optimizer": {"groups": groups}}

        def step(x: torch.Tensor) -> torch.Tensor:
            return program.step(x) * (held["optimizer"]["groups"] if deep else groups)[0]["lr"]

        return dataclasses.replace(program, step=step)

    with pytest.warns(stepgraph.StepgraphWarning, match=r"param_groups\[0\]\['lr'\]: "):
        assert_captured_equals_eager(build_reading, device)


def test_live_learning_rate_in_the_result_is_never_frozen(device: torch.device) -> None:
    program = build(device, "adamw foreach", assigned("lr", lambda index: 0.5 if index < 10 else 0.25))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return program.step(x), program.optimizers[0].param_groups[0]["lr"]

    with stepgraph.capture(step) as captured, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, batch in enumerate(program.batches):
            program.before_call(index)
            assert captured(*batch)[1] == program.optimizers[0].param_groups[0]["lr"]


def test_live_schedule_keeps_the_graph_of_a_loop_over_groups(device: torch.device) -> None:
    """A step that reads no number of a group, only its parameters, is captured once."""

    def build_clipping(device: torch.device) -> Program:
        program = build(device, "adamw foreach", SCHEDULES["cosine"])
        (optimizer,) = program.optimizers

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = program.step(x)
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.clamp_(-1.0, 1.0)
            return loss

        return dataclasses.replace(program, step=step)

    assert assert_captured_equals_eager(build_clipping, device).recaptures == 0
