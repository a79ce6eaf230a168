"""A learning rate in a tensor: the one number that stays inside a graph and is live there, changed in place.

Fused and capturable optimizers read it on the device, so a schedule needs no cut and no recapture. What must be noticed
is a tensor in its place: the graph reads the old one's address.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import stepgraph
from stepgraph.engine.optim.optimizer import capturable_on_cpu
from tests.harness import Program, assert_captured_equals_eager

CALLS, WARM = 16, 3


def adamw_with_tensor_lr(device: torch.device, **kwargs: Any) -> tuple[Program, torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    lr = torch.tensor(0.01, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **kwargs)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(4, 6, device=device),) for _ in range(CALLS)]
    return Program(step, batches, [model], [optimizer]), lr


def test_live_tensor_learning_rate_changed_in_place_is_replayed(device: torch.device) -> None:
    """The one way to a live learning rate inside a graph: a fused optimizer reads it from the device."""

    def build_tensor(device: torch.device) -> Program:
        program, lr = adamw_with_tensor_lr(device, fused=True)
        program.before_call = lambda index: lr.fill_(0.1 / (index + 1)) and None
        return program

    report = assert_captured_equals_eager(build_tensor, device)
    assert (report.segments, report.recaptures) == (1, 0)


def test_live_tensor_learning_rate_replaced_is_noticed(device: torch.device) -> None:
    def build_tensor(device: torch.device) -> Program:
        program, _ = adamw_with_tensor_lr(device, fused=True)

        def before_call(index: int) -> None:
            if index > 6:
                program.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1 / index, device=device)

        program.before_call = before_call
        return program

    report = assert_captured_equals_eager(build_tensor, device)
    assert report.recapture_reasons == {"AdamW.param_groups[0]['lr'] is a new tensor": 1}


def test_live_capturable_optimizer_follows_schedules_in_a_graph(device: torch.device) -> None:
    """Schedulers of torch change a learning rate that is a tensor in place, and the graph reads it."""

    def build_capturable(device: torch.device) -> Program:
        program, _ = adamw_with_tensor_lr(device, capturable=True)
        scheduler = lr_scheduler.CosineAnnealingLR(program.optimizers[0], T_max=10)

        def step(x: torch.Tensor) -> torch.Tensor:
            with capturable_on_cpu() if device.type == "cpu" else contextlib.nullcontext():  # eager refuses it there
                return program.step(x)

        return dataclasses.replace(program, step=step, before_call=lambda index: scheduler.step() if index else None)

    report = assert_captured_equals_eager(build_capturable, device, optimizer="capturable")
    assert (report.segments, report.recaptures, report.replays) == (1, 0, CALLS - WARM)


def test_live_capturable_option_keeps_a_tensor_rate_live(device: torch.device) -> None:
    """A plain AdamW switched by the option: a changed tensor acts at the next replay, with no recapture."""
    torch.manual_seed(7)
    model = nn.Linear(6, 3).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    with stepgraph.capture(step, optimizer="capturable") as captured:
        x = torch.randn(4, 6, device=device)
        for _ in range(6):
            captured(x)
        lr = optimizer.param_groups[0]["lr"]
        assert isinstance(lr, torch.Tensor)
        before = model.weight.detach().clone()
        lr.zero_()
        captured(x)
        assert torch.equal(model.weight, before)
        lr.fill_(0.1)
        captured(x)
        assert not torch.equal(model.weight, before)
        report = captured.report()
    assert (report.segments, report.captures, report.recaptures, report.replays) == (1, 1, 0, 5)
