"""An exception of the program's own comes out of a captured step as it does in eager, whenever it is raised."""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph


class Diverged(Exception):
    """What the loop expects."""


CALLS = 14


def train(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    raises: set[int],
    unseen: Path | None,
    device: torch.device,
) -> tuple[list[int], list[torch.Tensor]]:
    """Train with a loop that catches the step's exception. Return the calls that raised, and the state after each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = types.SimpleNamespace(stops=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if trainer.stops is True or (unseen is not None and unseen.exists()):
            raise Diverged
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call, caught, states = wrap(step), [], []
    for index in range(CALLS):
        if unseen is None:
            trainer.stops = index in raises
        elif index in raises:
            unseen.touch()
        elif unseen.exists():
            os.remove(unseen)
        try:
            call(torch.full((3, 4), index + 1.0, device=device).sin())
        except Diverged:
            caught.append(index)
        grads = [torch.zeros(1) if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
        states += [p.detach().clone() for p in model.parameters()] + grads
    return caught, states


@pytest.mark.parametrize("raises", [(3,), (4,), (5,), (8,), (4, 5, 9)], ids=str)
@pytest.mark.parametrize("is_seen", [True, False], ids=["watched", "a file"])
def test_exception_of_the_program_comes_out_as_in_eager(
    raises: tuple[int, ...], is_seen: bool, tmp_path: Path, device: torch.device
) -> None:
    """`audit=1` records every call again, so that each exception falls on a recording."""
    unseen = None if is_seen else tmp_path / "stop"
    expected, states = train(lambda step: step, raises, unseen, device)
    assert tuple(expected) == raises
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        caught, received = train(lambda step: stepgraph.capture(step, audit=1), raises, unseen, device)
    assert caught == expected
    assert all(map(torch.equal, received, states))


def test_exception_under_capture_only_is_named_and_stays_eager(device: torch.device) -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        if stepgraph.is_graph_capturing():
            raise Diverged
        return x * 2

    step, x = stepgraph.capture(asks), torch.ones(2, device=device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            assert torch.equal(step(x), x * 2)
    assert [str(one.message) for one in told if "step-raised" in str(one.message)] != []
    assert step.report().replays == 0
