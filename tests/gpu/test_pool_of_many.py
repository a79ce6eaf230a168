"""Many signatures in one pool take little more than the largest alone, in whichever order they come."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.step import eviction

pytestmark = pytest.mark.gpu
SIZES = [64, 128, 192, 256]


def pool_of(warm_up: list[int], captures: list[int]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with stepgraph.capture(train_step) as step:
        for size in [*warm_up * 3, *captures * 3]:
            step(torch.ones(size * 100, 256, device="cuda"))
        report = step.report()
    assert report.graphs == len(captures)
    return report.pool_bytes


@pytest.mark.parametrize("captures", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
@pytest.mark.parametrize("warm_up", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
def test_pool_of_many_signatures_is_that_of_the_largest(
    warm_up: list[int], captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_WORTH_BYTES", 0)
    alone = pool_of(SIZES[-1:], SIZES[-1:])
    assert pool_of([SIZES[i] for i in warm_up], [SIZES[i] for i in captures]) < 1.3 * alone
