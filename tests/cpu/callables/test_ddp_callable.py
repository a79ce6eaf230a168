"""Graphed callables and DDP, in a process group of one rank: refused by name, on both ways in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stepgraph


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_callable_inside_ddp_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stepgraph.make_graphed_callables(model[0], (torch.randn(2, 4, requires_grad=True),))
    wrapped = DistributedDataParallel(model)
    with pytest.raises(stepgraph.CaptureError, match=r"callables\[0\] \(Linear\) is called inside") as caught:
        wrapped(torch.randn(2, 4))
    assert caught.value.rule == "ddp-callable"


def test_a_ddp_is_no_callable() -> None:
    wrapped = DistributedDataParallel(nn.Linear(4, 4))
    for each in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(stepgraph.CaptureError, match="DistributedDataParallel") as caught:
            stepgraph.make_graphed_callables(each, (torch.randn(2, 4),))
        assert caught.value.rule == "ddp-callable"
    assert "forward" not in vars(wrapped)


def test_graphs_go_with_the_process_group() -> None:
    layer = nn.Linear(4, 4)
    stepgraph.make_graphed_callables(layer, (torch.randn(2, 4),))
    layer(torch.randn(2, 4)).sum().backward()
    dist.destroy_process_group()
    assert "forward" not in vars(layer)
    layer(torch.randn(2, 4)).sum().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
