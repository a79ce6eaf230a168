"""Hooks for saved tensors that may change them belong to the call: no graph replays where they are set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from tests.harness import same_bits

CALLS = 14


def pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def compressed() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def model_on(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def gradients(
    device: torch.device, wrap: Callable[[nn.Module], Any], around: Callable[[int], Any]
) -> list[list[torch.Tensor]]:
    model, found = model_on(device), []
    wrap(model)
    for call in range(CALLS):
        model.zero_grad()
        with around(call):
            loss = model(torch.full((3, 4), float(call), device=device).sin()).square().sum()
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def graphed_modules(model: nn.Module) -> None:
    stepgraph.graph_modules(model, ["forward"], warmup=2)


def graphed_callable(model: nn.Module) -> None:
    stepgraph.make_graphed_callables(model, (torch.randn(3, 4, device=next(model.parameters()).device),))


@pytest.mark.parametrize("wrap", [graphed_modules, graphed_callable])
@pytest.mark.parametrize("first", [0, 7])
def test_hooks_that_change_saved_tensors_work_as_in_eager(
    wrap: Callable[[nn.Module], Any], first: int, device: torch.device
) -> None:
    def around(call: int) -> Any:
        return compressed() if first <= call < first + 5 else contextlib.nullcontext()

    eager, graphed = gradients(device, lambda model: None, around), gradients(device, wrap, around)
    assert [all(map(same_bits, one, two)) for one, two in zip(eager, graphed, strict=True)] == [True] * CALLS


def test_hooks_inside_a_graphed_part_are_recorded(device: torch.device) -> None:
    class Compressed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with compressed():
                result: torch.Tensor = self.inner(x)
                return result

    found = []
    for graphs in (False, True):
        model = Compressed(model_on(device))
        manager = stepgraph.graph_modules(model, ["forward"], warmup=2) if graphs else None
        found.append([])
        for call in range(CALLS):
            model.zero_grad()
            model(torch.full((3, 4), float(call), device=device).sin()).square().sum().backward()
            found[-1].append([p.grad.clone() for p in model.parameters()])
        assert manager is None or manager.report().replays
    assert all(all(map(same_bits, one, two)) for one, two in zip(*found, strict=True))


def test_calls_under_hooks_are_counted_with_their_rule(device: torch.device) -> None:
    model = model_on(device)
    manager = stepgraph.graph_modules(model, ["forward"], warmup=2)
    x = torch.randn(3, 4, device=device)
    with compressed():
        for _ in range(3):
            model(x)
    reasons = manager.report().rows[0].eager_reasons
    assert [(reason, count) for reason, count in reasons.items() if "saved-tensor-hooks" in reason and "pack" in reason]


def test_calls_under_hooks_raise_when_strict(device: torch.device) -> None:
    model = model_on(device)
    stepgraph.graph_modules(model, ["forward"], warmup=2, strict=True)
    with compressed(), pytest.raises(stepgraph.CaptureError, match="saved-tensor hooks, `pack`") as info:
        model(torch.randn(3, 4, device=device))
    assert info.value.rule == "eager-module"


def test_callable_is_not_captured_under_hooks(device: torch.device) -> None:
    with compressed(), pytest.raises(stepgraph.CaptureError) as info:
        graphed_callable(model_on(device))
    assert info.value.rule == "saved-tensor-hooks"


def test_ordered_callable_under_hooks_is_refused(device: torch.device) -> None:
    model = model_on(device)
    sample = (torch.randn(3, 4, device=device),)
    (layer,) = stepgraph.make_graphed_callables((model,), (sample,), order=[1, -1])
    layer(*sample).sum().backward()
    with compressed(), pytest.raises(stepgraph.SignatureMismatch, match="saved-tensor hooks"):
        layer(*sample)


@pytest.mark.parametrize("own", ["checkpoint", "save_on_cpu"])
def test_hooks_of_torch_are_no_obstacle(own: str, device: torch.device) -> None:
    model = model_on(device)
    manager = stepgraph.graph_modules(model, ["forward"], warmup=2)
    x = torch.randn(3, 4, device=device)
    for _ in range(6):
        if own == "checkpoint":
            result = checkpoint(model, x, use_reentrant=False)
        else:
            with torch.autograd.graph.save_on_cpu():
                result = model(x)
        result.sum().backward()
    assert manager.report().replays >= 3
