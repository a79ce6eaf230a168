"""Which parameters an optimizer has is baked into a step that zeroes, clips or sums over them, wherever the optimizer
itself runs: a change is noticed at the next call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from tests.harness import Program, assert_captured_equals_eager

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "between graphs": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "inside": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
}


def join(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})


def leave(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(), None)


def another(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    optimizer.state.clear()


CHANGES = {"a group joins": join, "a parameter leaves": leave, "others are put there": another}
USES = ("zero", "clip", "sum", "zeroed only")


def built(device: torch.device, make: Make, change: str, use: str) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = make(list(model[2].parameters()))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if use == "sum":
            loss = loss + 0.1 * sum(p.abs().sum() for group in optimizer.param_groups for p in group["params"])
        loss.backward()
        if use == "clip":
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
        if use != "zeroed only":
            optimizer.step()
        return loss

    def before_call(index: int) -> None:
        if use == "zeroed only" and index:
            optimizer.step()
        if index == 5:
            CHANGES[change](optimizer, model)

    draw = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(6, 8, generator=draw).to(device), torch.randint(4, (6,), generator=draw).to(device))
        for _ in range(10)
    ]
    return Program(step, batches, [model], [optimizer], before_call=before_call)


@pytest.mark.pairwise
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("placed", OPTIMIZERS)
def test_parameters_of_an_optimizer_change(placed: str, change: str, use: str, device: torch.device) -> None:
    report = assert_captured_equals_eager(lambda device: built(device, OPTIMIZERS[placed], change, use), device)
    assert any("param_groups" in reason for reason in report.recapture_reasons), report.recapture_reasons
    assert report.replays >= 4


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("placed", OPTIMIZERS)
def test_parameters_of_an_optimizer_change_under_strict(placed: str, use: str, device: torch.device) -> None:
    program = built(device, OPTIMIZERS[placed], "a group joins", use)
    with stepgraph.capture(program.step, strict=True) as step, pytest.raises(stepgraph.StateChanged, match="group"):
        for index, batch in enumerate(program.batches):
            program.before_call(index)
            step(*batch)
