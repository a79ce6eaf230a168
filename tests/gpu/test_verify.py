"""`stepgraph.verify` on a GPU: what is equal, what torch's own make_graphed_callables breaks, and kernel counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.tools.program import Program
from stepgraph.tools.verification.compare import compare

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def made() -> nn.Sequential:
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)]
    return nn.Sequential(*layers).to(DEVICE)


def inputs(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(16, 64, device=DEVICE) for _ in range(count)]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, functools.partial(torch.optim.AdamW, fused=True)])
def test_verify_passes_a_whole_step(optimizer: Any) -> None:
    model = made()
    opt = optimizer(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    before = [p.detach().clone() for p in model.parameters()]
    report = stepgraph.verify(stepgraph.capture(step), inputs())
    assert report.equal, report
    eager, graphed = report.comparison.costs
    assert eager.launches is not None
    assert eager.launches > 20, "kernels, one by one"
    assert graphed.launches is not None
    assert graphed.launches < eager.launches
    assert (graphed.replays or 0) >= 1
    assert eager.replays == 0
    assert eager.busy is not None
    assert 0 < eager.busy <= 1
    assert eager.peak_bytes is not None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_verify_passes_graphed_modules() -> None:
    model = made()
    with stepgraph.graph_modules(model, ["0", "3", "5"]) as handle:
        report = stepgraph.verify(handle, inputs())
    assert report.equal, report


def test_verify_passes_graphed_callables() -> None:
    layer = nn.Linear(64, 32).to(DEVICE)
    graphed = stepgraph.make_graphed_callables(layer, (inputs(1)[0],))
    report = stepgraph.verify(graphed, inputs())
    assert report.equal, report


def test_torch_callables_without_gradients_are_named() -> None:
    """Autograd takes the static gradient as `.grad`, and the second replay overwrites the first one's part of it."""
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(DEVICE)
    forward = plain.forward
    graphed = torch.cuda.make_graphed_callables(plain, (inputs(1)[0],))
    replay = graphed.forward
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)

    def step(call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=DEVICE)
        for part in (x, x * 2):
            loss = call(part).square().mean()
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    state = Program({"model": plain}, {"optimizer": optimizer})
    eager, with_graphs = functools.partial(step, forward), functools.partial(step, replay)
    found = compare(eager, with_graphs, inputs(), state)
    assert found.cause is not None
    assert found.cause.rule == "aliased-gradient", found
    assert found.first is not None
    assert found.first.kind == "gradients"


def test_verify_compares_the_random_state_of_the_device() -> None:
    generator = torch.Generator(DEVICE)

    def step(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) * torch.rand(x.shape, device=DEVICE, generator=generator)

    report = stepgraph.verify(stepgraph.capture(step, generators=[generator]), inputs())
    assert report.equal, report
    states = next(row for row in report.comparison.rows if row.kind == "random state")
    assert states.num_values == 3
