"""A result that could be differentiated comes back detached: told where the step runs no backward, and only there."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import stepgraph

Step = Callable[[torch.Tensor], object]


def with_backward(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        loss.backward()
        return loss

    return step


def with_grad(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        torch.autograd.grad(loss, list(model.parameters()))
        return loss

    return step


QUIET: dict[str, Callable[[nn.Module], Step]] = {
    "backward": with_backward,
    "grad": with_grad,
    "no grad": lambda model: torch.no_grad()(lambda x: model(x)),
    "detached": lambda model: lambda x: model(x).detach(),
    "no parameters": lambda model: lambda x: x * 2,
    "a parameter": lambda model: lambda x: next(model.parameters()),
}


def told(step: Step, device: torch.device) -> list[str]:
    with warnings.catch_warnings(record=True) as found, stepgraph.capture(step) as captured:
        warnings.simplefilter("always")
        for _ in range(5):
            captured(torch.ones(2, 2, device=device))
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("kind", QUIET)
def test_result_that_needs_no_gradient_is_not_reported(kind: str, device: torch.device) -> None:
    assert told(QUIET[kind](nn.Linear(2, 2).to(device)), device) == []


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: {"out": [y]}], ids=["plain", "in a dict"])
def test_result_that_could_be_differentiated_is_reported_once(wrap: Callable, device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    (message,) = told(lambda x: wrap(model(x)), device)
    assert "is returned detached" in message
    assert "graph_modules" in message
