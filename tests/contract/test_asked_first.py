"""Changes that the row must see: what is asked in one go, before the guards, once a few calls have found no change.

Audits write the row again. So there are none here, and changes come after calls that the row alone has let pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

import stepgraph
from tests.harness import same_bits

BEFORE, AFTER = 8, 4
Change = Callable[[nn.Module, torch.optim.Optimizer, contextlib.ExitStack], object]


class Marked(nn.Parameter):
    """A parameter of the user's own class, which torch's guards do not take."""


class Squared(nn.Module):
    def __init__(self, kind: type[nn.Parameter]) -> None:
        super().__init__()
        self.weight = kind(torch.arange(9.0).view(3, 3).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def swap_rate(model: nn.Module, optimizer: torch.optim.Optimizer, _: contextlib.ExitStack) -> None:
    rate = optimizer.param_groups[0]["lr"]
    optimizer.backup = rate.data  # type: ignore[attr-defined]
    rate.data = rate.data * 0.1


def swap_state(model: nn.Module, optimizer: torch.optim.Optimizer, _: contextlib.ExitStack) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"].data * 0.5


def hook_all_steps(model: nn.Module, optimizer: torch.optim.Optimizer, held: contextlib.ExitStack) -> None:
    def shrink(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    held.callback(register_optimizer_step_post_hook(shrink).remove)


CHANGES: dict[str, tuple[Change, str]] = {
    "rate with other data": (swap_rate, "['lr'] is a new tensor"),
    "state with other data": (swap_state, "a tensor moved to another address"),
    "hook on all steps": (hook_all_steps, "a step hook of all optimizers was added"),
}


def trained(change: Change, device: torch.device, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The weights after each call. All that the change does comes after `BEFORE` calls."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    rate = torch.tensor(0.1, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    wrapped, found = wrap(step), []
    with contextlib.ExitStack() as held:
        for call in range(BEFORE + AFTER):
            if call == BEFORE:
                change(model, optimizer, held)
            wrapped(torch.full((3, 4), float(call), device=device).sin())
            found.append(model.weight.detach().clone())
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_change_after_calls_that_the_row_let_pass(name: str, device: torch.device) -> None:
    change, told = CHANGES[name]
    wanted = trained(change, device, lambda step: step)
    made: list[Any] = []

    def wrap(step: Any) -> Any:
        made.append(stepgraph.capture(step, audit=False))
        return made[0]

    received = trained(change, device, wrap)
    assert [same_bits(one, two) for one, two in zip(wanted, received, strict=True)] == [True] * (BEFORE + AFTER)
    report = made[0].report()
    assert report.replays >= BEFORE - 3
    assert told in next(iter(report.recapture_reasons))


@pytest.mark.parametrize("kind", [nn.Parameter, Marked])
@pytest.mark.parametrize("before", [1, BEFORE])
def test_parameter_turned_in_place_is_never_stale(kind: type[nn.Parameter], before: int, device: torch.device) -> None:
    """The address stays, and with it the shape: only the strides tell. `before`: replays before the change."""
    model = Squared(kind).to(device)
    model.weight = kind(model.weight.detach())
    x = torch.eye(3, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.weight.grad = None
        result: torch.Tensor = model(x)
        result.square().sum().backward()
        return result.detach()

    with stepgraph.capture(step, audit=False) as captured:
        for _ in range(3 + before):
            captured(x)
        assert captured.report().replays == before
        model.weight.data = model.weight.data.t()
        for _ in range(3):
            assert same_bits(captured(x), model(x).detach())
        assert len(captured.report().recapture_reasons) == 1


@pytest.mark.parametrize("before", [1, 2, BEFORE])
def test_cache_that_ends_after_calls_that_the_row_let_pass(before: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = parametrizations.weight_norm(nn.Linear(4, 2)).to(device)
    x = torch.ones(3, 4, device=device)
    step = stepgraph.capture(torch.no_grad()(lambda x: model(x)), audit=False)
    with parametrize.cached():
        for _ in range(3 + before):
            step(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    with parametrize.cached(), torch.no_grad():
        assert same_bits(step(x), model(x))
