"""Arguments in the memory of the step's own tensors: each is copied in, so neither may be written to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.step.arguments import StepArguments


def noted(
    arguments: list[torch.Tensor],
    state: dict[str, torch.Tensor],
    step: Callable[..., object],
    rewritten: tuple[torch.Tensor, ...] = (),
) -> None:
    """What a recording does with its inputs."""
    inputs = StepArguments(arguments, stepgraph.backend_for(arguments[0].device))
    inputs.load(arguments)
    inputs.watch()
    inputs.watch_state(arguments, [(f"`{name}`", tensor) for name, tensor in state.items()])
    with torch.no_grad():
        step(*inputs.leaves)
    names = [f"x{i}" for i in range(len(arguments))]
    inputs.note_use(arguments, names)
    inputs.refuse_shared_state(arguments, names, {id(tensor) for tensor in rewritten})


def test_shared_state_written_through_the_argument_is_refused(device: torch.device) -> None:
    bank = torch.zeros(4, 8, device=device)
    with pytest.raises(stepgraph.CaptureError, match="`x0` shares memory with `bank`") as caught:
        noted([bank], {"bank": bank}, lambda rows: rows.add_(1))
    assert caught.value.rule == "shared-input"
    assert "the step writes to argument `x0`" in caught.value.what
    assert "x0.clone()" in caught.value.fix


def test_shared_state_that_the_step_writes_itself_is_refused(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 8, device=device))
    with pytest.raises(stepgraph.CaptureError, match="shares memory with `weight`, and the step writes to `weight`"):
        noted([torch.ones(2, device=device), weight.detach()[1:]], {"weight": weight}, lambda a, b: weight.add_(1))


def test_shared_state_written_by_an_optimizer_is_refused(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 8, device=device))
    with pytest.raises(stepgraph.CaptureError, match="shares memory with `weight`, and the step writes to `weight`"):
        noted([weight.detach()], {"weight": weight}, lambda w: w.sum(), (weight,))


def test_shared_state_that_is_never_written_is_let_through(device: torch.device) -> None:
    weight, other = torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device)
    noted([weight[1:], other.clone()], {"weight": weight, "other": other}, lambda w, o: other.add_(w.sum()))


def test_shared_state_beside_the_argument_is_let_through(device: torch.device) -> None:
    """One flat memory for many tensors, as some optimizers have it."""
    flat = torch.zeros(32, device=device)
    noted([flat[:8]], {"piece": flat[8:16]}, lambda x: (x.add_(1), flat[8:16].add_(1)))
    with pytest.raises(stepgraph.CaptureError, match="shared-input"):
        noted([flat[:9]], {"piece": flat[8:16]}, lambda x: x.add_(1))


def bank_written_by_the_argument(device: torch.device) -> tuple[Any, Any]:
    bank = torch.zeros(4, 8, device=device)

    def step(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows[0] = x[0]
        return bank.sum() + x.sum()

    return step, lambda: bank


def buffer_written_by_the_argument(device: torch.device) -> tuple[Any, Any]:
    norm = nn.BatchNorm1d(8).to(device)

    def step(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mean.mul_(0.5)
        return norm(x).sum()

    return step, lambda: norm.running_mean


def weight_read_behind_the_update(device: torch.device, make: Any = torch.optim.SGD) -> tuple[Any, Any]:
    model = nn.Linear(8, 4).to(device)
    optimizer = make(model.parameters(), lr=0.1)

    def step(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return (model.weight - weight).norm()

    return step, lambda: model.weight.detach()


@pytest.mark.parametrize(
    "build",
    [
        bank_written_by_the_argument,
        buffer_written_by_the_argument,
        weight_read_behind_the_update,
        functools.partial(weight_read_behind_the_update, make=torch.optim.AdamW),
    ],
    ids=["closure", "buffer", "weight", "weight of an optimizer outside"],
)
def test_shared_state_is_refused_at_capture_and_a_clone_is_not(build: Any, device: torch.device) -> None:
    function, argument = build(device)
    refused = pytest.raises(stepgraph.CaptureError, match="shared-input")
    with stepgraph.capture(function, warmup=1) as step, refused:
        for _ in range(3):
            step(argument(), torch.randn(4, 8, device=device))
    function, argument = build(device)
    with stepgraph.capture(function, warmup=1) as step:
        for _ in range(5):
            step(argument().clone(), torch.randn(4, 8, device=device))
        assert step.report().replays >= 3
