"""A recording that reads a tensor which an earlier call has made, and which no name leads to, ends with that tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import stepgraph
from tests.harness import same_bits

EPOCHS, CALLS = 5, 6


def normed(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = parametrizations.weight_norm(nn.Linear(4, 2)).to(device)
    return module


def evaluations(device: torch.device, wrap: Callable[[Any, nn.Module], Any]) -> list[torch.Tensor]:
    model, found = normed(device), []
    x = torch.ones(3, 4, device=device)

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x)
        return result

    step = wrap(evaluate, model)
    for _ in range(EPOCHS):
        with parametrize.cached():
            found += [step(x).clone() for _ in range(CALLS)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    return found


def eager(step: Any, model: nn.Module) -> Any:
    return step


def captured(step: Any, model: nn.Module) -> Any:
    return stepgraph.capture(step)


def modules(step: Any, model: nn.Module) -> Any:
    stepgraph.graph_modules(model, ["forward"], warmup=2)
    return step


@pytest.mark.parametrize("wrap", [captured, modules])
def test_cache_that_ends_with_a_block_is_never_stale(
    wrap: Callable[[Any, nn.Module], Any], device: torch.device
) -> None:
    wanted, received = evaluations(device, eager), evaluations(device, wrap)
    assert [same_bits(one, two) for one, two in zip(wanted, received, strict=True)] == [True] * (EPOCHS * CALLS)


def test_call_after_the_end_of_a_cache_is_told(device: torch.device) -> None:
    model, x = normed(device), torch.ones(3, 4, device=device)
    step = stepgraph.capture(torch.no_grad()(lambda x: model(x)))
    with parametrize.cached():
        for _ in range(8):
            step(x)
        replays = step.report().replays
        assert replays
    with parametrize.cached():
        step(x)
    (reason,) = step.report().recapture_reasons
    assert reason == "a tensor that an earlier call has made is gone, and the graph reads its memory"
    assert step.report().replays == replays


def test_callable_whose_cache_has_ended_is_refused(device: torch.device) -> None:
    model, x = normed(device).requires_grad_(False), torch.ones(3, 4, device=device)
    with parametrize.cached():
        model(x)
        stepgraph.make_graphed_callables(model, (x,))
        model(x)
    with pytest.raises(stepgraph.StateChanged, match="a tensor that an earlier call has made is gone") as info:
        model(x)
    assert info.value.rule == "state-changed"


def test_tensor_that_a_name_leads_to_may_be_replaced(device: torch.device) -> None:
    """A view of the same memory, made at each call: the watch compares it, and an audit finds nothing."""
    memory, kept = torch.ones(8, device=device), {}
    step = stepgraph.capture(lambda x: x * kept["view"])
    for _ in range(10):
        kept["view"] = memory[:4]
        step(torch.ones(4, device=device))
    assert not step.report().recapture_reasons
