"""Objects in reach whose `__class__` raises: their type decides, and no code of theirs runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.observe.finder import devices, reachable


class Lying:
    """Has a number, and no class that can be asked for."""

    scale = 2.0

    @property
    def __class__(self) -> Any:
        raise RuntimeError("nobody may ask")


def test_finder_goes_past_an_object_without_a_class(device: torch.device) -> None:
    lying, tensor = Lying(), torch.zeros(2, device=device)

    def step() -> torch.Tensor:
        return tensor * lying.scale

    assert any(value is lying for value in reachable(step))
    assert list(devices(reachable(step))) == [tensor.device]


def test_callable_that_reaches_an_object_without_a_class(device: torch.device) -> None:
    lying = Lying()

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * lying.scale

    graphed = stepgraph.make_graphed_callables(scaled, (torch.ones(2, device=device, requires_grad=True),))
    assert graphed(torch.ones(2, device=device, requires_grad=True)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("ahead", [True, False], ids=["make_graphed_callables", "graph_modules"])
def test_module_that_holds_an_object_without_a_class(device: torch.device, ahead: bool) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.lying[0].scale

    model = nn.Sequential(Scaled(2, 2)).to(device)
    model[0].lying = [Lying()]
    x = torch.ones(3, 2, device=device)
    expected = model(x)
    if ahead:
        stepgraph.make_graphed_callables(model, (x,))
    else:
        handle = stepgraph.graph_modules(model, ["0"])
    for _ in range(5):
        received = model(x)
        received.sum().backward()
    assert torch.equal(received, expected)
    assert ahead or handle.replays > 0


def test_step_that_reaches_an_object_without_a_class(device: torch.device) -> None:
    lying, x = Lying(), torch.ones(2, device=device)
    step = stepgraph.capture(lambda x: x * lying.scale)
    for _ in range(6):
        assert torch.equal(step(x), x * 2)
    assert step.report().replays > 0
