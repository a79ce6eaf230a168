"""Several steps in one session: what one leaves behind while it warms up, another one's replays must not touch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import stepgraph

Step = Callable[[torch.Tensor], torch.Tensor]


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def in_one_session(steps: list[Step], *, captured: bool) -> list[Step]:
    session = stepgraph.Session()
    return [stepgraph.capture(step, session=session) for step in steps] if captured else steps


def results_of(device: torch.device, *, captured: bool) -> list[torch.Tensor]:
    """Train, and evaluate now and then; the results are kept as they were handed out, the first of them eager."""
    model, optimizer = build(device)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2

    training, evaluation = in_one_session([train, evaluate], captured=captured)
    generator = torch.Generator().manual_seed(5)
    kept = []
    for round_number in range(8):
        for _ in range(4):
            kept.append(training(torch.randn(8, 64, generator=generator).to(device)).detach())
        if round_number >= 2:
            kept.append(evaluation(torch.randn(8, 64, generator=generator).to(device)).detach())
    return kept


def test_results_of_warm_up_survive_replays_of_other_graphs(device: torch.device) -> None:
    pairs = zip(results_of(device, captured=False), results_of(device, captured=True), strict=True)
    assert [i for i, (one, two) in enumerate(pairs) if not torch.equal(one, two)] == []


def gradients_of(device: torch.device, *, captured: bool) -> list[torch.Tensor | None]:
    """Accumulate gradients, with replays of another step between one call and the next that adds to them."""
    model, _ = build(device)
    other, _ = build(device)

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    @torch.no_grad()
    def infer(x: torch.Tensor) -> torch.Tensor:
        return other(x)

    accumulation, inference = in_one_session([accumulate, infer], captured=captured)
    generator = torch.Generator().manual_seed(5)
    for round_number in range(9):
        for _ in range(3):
            inference(torch.randn(32, 64, generator=generator).to(device))
        if round_number >= 2:
            accumulation(torch.randn(8, 64, generator=generator).to(device))
    return [p.grad for p in model.parameters()]


def test_gradients_of_warm_up_survive_replays_of_other_graphs(device: torch.device) -> None:
    pairs = zip(gradients_of(device, captured=False), gradients_of(device, captured=True), strict=True)
    assert all(one is not None and two is not None and torch.equal(one, two) for one, two in pairs)
