"""Which gradient is whose between calls: exchanged or shared gradients get what eager adds to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.grads.step_grads import are_exchanged
from tests.harness import Program, assert_captured_equals_eager, same_bits


def exchange(one: nn.Parameter, two: nn.Parameter) -> None:
    one.grad, two.grad = two.grad, one.grad


def share(one: nn.Parameter, two: nn.Parameter) -> None:
    two.grad = one.grad


@pytest.mark.parametrize("zeroed", [False, True], ids=["accumulates", "zeroed by the step"])
@pytest.mark.parametrize("change", [exchange, share])
def test_exchanged_gradients_are_added_to_as_in_eager(
    change: Callable[[nn.Parameter, nn.Parameter], None], zeroed: bool, device: torch.device
) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            if zeroed:
                model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        def before_call(call: int) -> None:
            if call == 8:
                change(model[0].weight, model[2].weight)
            elif call == 11:
                model.zero_grad()

        batches = [(torch.randn(3, 4, device=device),) for _ in range(16)]
        return Program(step, batches, [model], before_call=before_call)

    report = assert_captured_equals_eager(build, device)
    assert report.replays >= 8
    assert ("a parameter has the gradient of another one" in report.eager_reasons) is not zeroed


@pytest.mark.parametrize("first", [0, 2], ids=["to the later", "to the earlier"])
@pytest.mark.parametrize("seen_as", [lambda grad: grad, torch.Tensor.detach, torch.Tensor.t], ids=["", "detached", "t"])
@pytest.mark.parametrize("every", [1, 2])
def test_gradient_that_the_step_shares_stays_shared(
    every: int, seen_as: Callable[[torch.Tensor], torch.Tensor], first: int, device: torch.device
) -> None:
    """As in `shared.grad = local.grad`: whoever writes to the one after the call writes to the other."""

    def gradients(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> tuple[list[torch.Tensor], object]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
        giver, taker = model[first].weight, model[2 - first].weight

        def train(x: torch.Tensor, shares: bool) -> None:
            model(x).square().mean().backward()
            if shares:
                taker.grad = seen_as(giver.grad)

        step, found = wrap(train), []
        for i in range(24):
            step(torch.full((3, 4), float(i), device=device).sin(), i % every == every - 1)
            giver.grad.mul_(0.5)
            found += [giver.grad.clone(), taker.grad.clone()]
            if i % every == every - 1:
                model.zero_grad()
        return found, step

    (eager, _), (graphed, step) = gradients(lambda f: f), gradients(stepgraph.capture)
    assert same_bits(eager, graphed)
    assert step.report().replays >= 12


def test_refused_number_leaves_gradients_as_they_were(device: torch.device) -> None:
    """The recording is over when the refusal is known: it must have no effect all the same."""
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        return loss.detach()

    x = torch.ones(2, 4, device=device)
    with stepgraph.capture(train) as step:
        for _ in range(3):
            step(x)
        before = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
        kept = {name: grad.clone() for name, (_, grad) in before.items() if grad is not None}
        del before
        with pytest.raises(stepgraph.CaptureError, match="host-value"):
            step(x)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert same_bits(parameter.grad, kept[name])


def test_are_exchanged_compares_addresses() -> None:
    a, b, c = (torch.zeros(2) for _ in range(3))
    assert not are_exchanged([(a, a), (b, None), (None, c)])
    assert not are_exchanged([(a, b), (c, None)])
    assert are_exchanged([(a, None), (a, None)])
    assert are_exchanged([(b, a), (a, b)])
    assert are_exchanged([(b, a), (None, b)])
    assert not are_exchanged([(torch.zeros(0), None), (torch.zeros(0), None)])
