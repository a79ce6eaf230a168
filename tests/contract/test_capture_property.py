"""Any step made of these pieces, with anything done between its calls, equals eager after every call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.harness import Program, assert_captured_equals_eager

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}
PIECES = ("zero to none", "zero in place", "backward", "backward", "clip", "optimizer", "average", "noise")
ACTIONS = (
    "nothing",
    "nothing",
    "zero to none",
    "zero in place",
    "own grad",
    "drop one grad",
    "lr",
    "mode",
    "size",
    "optimizer",
)
RARE = ("freeze", "unfreeze", "swap data", "swap back", "value", "same value", "buffer", "load", "load optimizer")
RARE_CALLS = (6, 9, 12)
"""The calls before which something is done that makes the step be captured anew."""


def build(device: torch.device, optimizer_name: str, pieces: list[str], actions: list[str], rare: list[str]) -> Program:
    weight = {"of the loss": 1.25}
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2)).to(device)
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), device=device)
        for piece in pieces:
            if piece == "zero to none":
                optimizer.zero_grad(set_to_none=True)
            elif piece == "zero in place":
                optimizer.zero_grad(set_to_none=False)
            elif piece == "backward":
                loss = model(x).pow(2).mean() * weight["of the loss"]
                loss.backward()
            elif piece == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif piece == "optimizer":
                optimizer.step()
            elif piece == "average":
                with torch.no_grad():
                    torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            else:
                with torch.no_grad():
                    model[0].bias.add_(torch.randn(6, device=device), alpha=1e-3)
        return loss

    first = model[0].weight.data

    def do_rarely(action: str) -> None:
        if action in ("freeze", "unfreeze"):
            model[3].requires_grad_(action == "unfreeze")
        elif action in ("swap data", "swap back"):
            model[0].weight.data = model[0].weight.data.clone() if action == "swap data" else first
        elif action in ("value", "same value"):
            weight["of the loss"] = weight["of the loss"] * (1.5 if action == "value" else 1.0)
        elif action == "buffer":
            model[1].running_mean = torch.zeros(6, device=device)
        elif action == "load":
            model.load_state_dict(
                {k: v.mul(0.5) if v.is_floating_point() else v for k, v in model.state_dict().items()}
            )
        else:
            optimizer.load_state_dict(optimizer.state_dict())

    def before_call(index: int) -> None:
        if index in RARE_CALLS and rare:
            do_rarely(rare[RARE_CALLS.index(index) % len(rare)])
        action = actions[index % len(actions)]
        parameters = list(model.parameters())
        if action == "zero to none":
            optimizer.zero_grad(set_to_none=True)
        elif action == "zero in place":
            optimizer.zero_grad(set_to_none=False)
        elif action == "own grad":
            for p in parameters:
                p.grad = torch.full_like(p, 0.1)
        elif action == "drop one grad":
            parameters[0].grad = None
        elif action == "lr":
            optimizer.param_groups[0]["lr"] *= 0.9
        elif action == "mode":
            model.train(not model.training)
        elif action == "optimizer":
            optimizer.step()

    sizes = [3 if actions[i % len(actions)] == "size" else 5 for i in range(15)]
    batches = [(torch.randn(size, 4, device=device),) for size in sizes]
    return Program(step, batches, [model], [optimizer], tensors=average, before_call=before_call)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
    st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=5),
    st.lists(st.sampled_from(RARE), max_size=3),
)
@example("adamw", ["zero to none"], ["own grad"], [])  # parameters that only zero_grad touches
@example("adamw fused", ["optimizer"], ["nothing", "nothing", "own grad"], [])  # state born in the capture, if let
@example("adamw", ["optimizer", "zero to none", "optimizer", "backward"], ["nothing"], [])  # nothing but Python between
@example("sgd", ["zero to none", "backward", "optimizer"], ["nothing"], ["swap data", "value", "swap back"])
@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_any_step_with_anything_between_its_calls_equals_eager(
    device: torch.device, optimizer: str, pieces: list[str], actions: list[str], rare: list[str]
) -> None:
    assert_captured_equals_eager(
        lambda device: build(device, optimizer, pieces, actions, rare), device, warmup=2, max_graphs=16
    )
