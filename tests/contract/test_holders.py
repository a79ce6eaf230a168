"""A number that the step reads changes between calls, wherever the program keeps it.

Where the watch reaches it, the call in which it is another is right. Where it does not, the next audit finds it, and
every call from that one on is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.holders import CASES, HOLDERS, Net
from tests.seeding import seed

CALLS, CHANGED_AT = 14, 8
HELD = [
    pytest.param(holder, depth, marks=[pytest.mark.slow] if depth in (2, 3) else [], id=f"{holder}, {depth} deep")
    for holder, depth in CASES
]


def weights_of(
    holder: str, depth: int, device: torch.device, api: str, *, follow: bool = True, **options: Any
) -> list[list[torch.Tensor]]:
    """Train, and give the weights after each call; without `follow` each call begins with the same weights."""
    seed(5)
    held = HOLDERS[holder](depth, 2.0)
    model = nn.Sequential(Net(held)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphed: Callable[[torch.Tensor], torch.Tensor] = model

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = graphed(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    run: Callable[[torch.Tensor], torch.Tensor] = step
    if api == "capture":
        run = stepgraph.capture(step, **options)
    elif api == "graph_modules":
        stepgraph.graph_modules(model, ["0"], **options)
    elif api == "make_graphed_callables":
        graphed = stepgraph.make_graphed_callables(model, (torch.ones(2, 3, device=device),), **options)
    seed(6)
    history = []
    for index in range(CALLS):
        if index == CHANGED_AT:
            held.write(3.0)
        if not follow:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.25)
        run(torch.randn(2, 3).to(device))
        history.append([parameter.detach().clone() for parameter in model.parameters()])
    return history


def wrong_calls(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> list[int]:
    return [index for index in range(CALLS) if not all(map(torch.equal, one[index], other[index]))]


@pytest.mark.pairwise
@pytest.mark.parametrize("api", ["capture", "graph_modules"])
@pytest.mark.parametrize(("holder", "depth"), HELD)
def test_changed_number_is_right_in_the_same_call(holder: str, depth: int, api: str, device: torch.device) -> None:
    expected = weights_of(holder, depth, device, "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        in_reach = HOLDERS[holder](depth, 2.0).in_reach
        found = weights_of(holder, depth, device, api, **({} if in_reach else {"audit": 1}))
    assert wrong_calls(expected, found) == []


@pytest.mark.parametrize("api", ["capture", "graph_modules"])
def test_number_out_of_reach_is_right_from_the_next_audit(api: str, device: torch.device) -> None:
    expected = weights_of("file", 1, device, "eager", follow=False)
    with pytest.warns(stepgraph.StepgraphWarning, match="changed-operations"):
        found = weights_of("file", 1, device, api, follow=False, audit=4)
    wrong = wrong_calls(expected, found)
    assert wrong == list(range(CHANGED_AT, CHANGED_AT + len(wrong)))
    assert len(wrong) < 4


@pytest.mark.parametrize(("holder", "depth"), HELD)
def test_callable_with_a_changed_number_refuses_the_call(holder: str, depth: int, device: torch.device) -> None:
    in_reach = HOLDERS[holder](depth, 2.0).in_reach
    with pytest.raises(stepgraph.StateChanged):
        weights_of(holder, depth, device, "make_graphed_callables", **({} if in_reach else {"audit": 1}))
