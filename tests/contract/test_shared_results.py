"""Results that share memory with each other share it after a replay, too, as copies and as lent tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import stepgraph

Results = tuple[torch.Tensor, ...]


def twice(x: torch.Tensor) -> Results:
    y = x * 2
    return y, y


def whole_and_part(x: torch.Tensor) -> Results:
    y = x * 2
    return y, y[1:]


def overlapping(x: torch.Tensor) -> Results:
    y = x * 2
    return y[3:], y[:5], x + 1


def other_dtype(x: torch.Tensor) -> Results:
    y = x * 2
    return y, y.view(torch.int32)[2:], y.view(2, 4).t()


class Part(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Results]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Results:
        return self.function(x)


def calls(function: Callable[[torch.Tensor], Results], engine: str, device: torch.device) -> list[list[list[float]]]:
    part = Part(function)
    step: Callable[[torch.Tensor], Results] = part
    if engine == "capture":
        step = stepgraph.capture(function)
    elif engine == "modules":
        stepgraph.graph_modules(part, ["forward"], warmup=2)
    elif engine == "callables":
        stepgraph.make_graphed_callables(part, (torch.zeros(8, device=device),))
    found, kept = [], []
    with torch.no_grad():
        for call in range(8):
            results = step(torch.arange(8.0, device=device) + call)
            results[0].add_(1)  # the others see it, as in eager
            found.append([result.tolist() for result in results])
            kept = [*kept[-1:], results]
    return found


@pytest.mark.parametrize("engine", ["capture", "modules", "callables"])
@pytest.mark.parametrize("function", [twice, whole_and_part, overlapping, other_dtype])
def test_results_in_one_memory_stay_in_one(
    function: Callable[[torch.Tensor], Results], engine: str, device: torch.device
) -> None:
    assert calls(function, engine, device) == calls(function, "eager", device)
