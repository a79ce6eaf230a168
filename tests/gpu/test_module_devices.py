"""Graphed modules of a model that is not on the GPU as a whole: equal to eager, and never recorded where nothing is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stepgraph

pytestmark = pytest.mark.gpu


class Halves(nn.Module):
    """A layer on the host, then layers on the GPU, one of them without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.host = nn.Linear(4, 4)
        self.gelu = nn.GELU().cuda()
        self.device = nn.Linear(4, 4).cuda()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.device(self.gelu(self.host(x).cuda()))


def trained(model: Halves, steps: int = 8) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        loss = model(torch.randn(3, 4, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("scope", [["host"], ["gelu"], ["device"], ["host", "gelu", "device"], ["device", "gelu"]])
def test_model_on_two_devices_equals_eager(scope: list[str]) -> None:
    model = Halves()
    handle = stepgraph.graph_modules(model, scope)
    for one, two in zip(trained(Halves()), trained(model), strict=True):
        assert torch.equal(one, two)
    for row in handle.report().rows:
        is_graphed = row.path != "host"
        assert bool(row.forwards) == is_graphed, row
        assert is_graphed or any("[backend]" in reason for reason in row.eager_reasons), row


def test_model_moved_to_the_gpu_is_not_recorded_on_the_tape() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    handle = stepgraph.graph_modules(model, ["0"])
    for _ in range(5):
        model(torch.ones(2, 4))
    model.cuda()
    x = torch.randn(2, 4, device="cuda")
    for _ in range(5):
        assert torch.equal(model(x), nn.functional.gelu(nn.functional.linear(x, model[0].weight, model[0].bias)))
    assert any("[backend]" in reason for reason in handle.report().rows[0].eager_reasons)
