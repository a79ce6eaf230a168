"""Graphed callables and DDP, in a process group of one rank; tests/distributed has the equality over several ranks."""

from __future__ import annotations

import copy
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


def sample(**options: bool) -> tuple[torch.Tensor]:
    return (torch.randn(2, 4, **options),)


def test_ddp_is_graphed_by_the_module_inside() -> None:
    wrapped = DistributedDataParallel(nn.Linear(4, 4))
    plain = DistributedDataParallel(copy.deepcopy(wrapped.module))
    assert stepgraph.make_graphed_callables(wrapped, sample(), num_warmup_iters=11) is wrapped
    for _ in range(3):
        x = torch.randn(2, 4)
        for model in (wrapped, plain):
            model(x).square().sum().backward()
    assert torch.equal(wrapped.module.weight.grad, plain.module.weight.grad)
    report = stepgraph.engine.parts.callables.report(wrapped)
    assert (report.forwards, report.backwards) == (3, 3)
    wrapped.reset()
    assert "forward" not in vars(wrapped.module)
    assert not hasattr(wrapped, "reset")


def test_no_sync_leaves_gradients_to_this_rank() -> None:
    """A hook of the reducer counts its buckets: none under no_sync."""
    wrapped, reduced = DistributedDataParallel(nn.Linear(4, 4)), []

    def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and no strings
        reduced.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, count)
    stepgraph.make_graphed_callables(wrapped, sample())
    with wrapped.no_sync():
        wrapped(torch.randn(2, 4)).sum().backward()
    assert reduced == []
    wrapped(torch.randn(2, 4)).sum().backward()
    assert reduced == [0]


def test_unused_parameter_is_missed_by_ddp_as_in_eager() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    wrapped = stepgraph.make_graphed_callables(DistributedDataParallel(Half()), sample(), allow_unused_input=True)
    wrapped(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        wrapped(torch.randn(2, 4))


def test_layer_inside_ddp_is_graphed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = DistributedDataParallel(model)
    stepgraph.make_graphed_callables(model[0], sample(requires_grad=True))
    for _ in range(2):
        wrapped(torch.randn(2, 4)).sum().backward()
    assert stepgraph.engine.parts.callables.report(model[0]).backwards == 2


def test_a_callable_of_before_ddp_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stepgraph.make_graphed_callables(model[0], sample(requires_grad=True))
    wrapped = DistributedDataParallel(model)
    with pytest.raises(stepgraph.CaptureError, match=r"callables\[0\] \(Linear\) is called inside") as caught:
        wrapped(torch.randn(2, 4))
    assert caught.value.rule == "ddp-callable"
    assert "wrap the model first" in str(caught.value)


def test_ddp_that_would_not_run_is_refused() -> None:
    wrapped = DistributedDataParallel(nn.Linear(4, 4))
    precise = DistributedDataParallel(nn.Linear(4, 4))
    precise.mixed_precision = object()  # what DDP sets on a GPU
    cases = [
        (nn.Sequential(wrapped), sample(), {}),
        (wrapped, (sample(),), {"order": [1, -1]}),
        (precise, sample(), {}),
    ]
    for each, samples, options in cases:
        with pytest.raises(stepgraph.CaptureError, match="DistributedDataParallel") as caught:
            stepgraph.make_graphed_callables(each, samples, **options)
        assert caught.value.rule == "ddp-callable"
    assert "forward" not in vars(wrapped)


def test_graphs_go_with_the_process_group() -> None:
    layer = nn.Linear(4, 4)
    stepgraph.make_graphed_callables(layer, sample())
    layer(torch.randn(2, 4)).sum().backward()
    dist.destroy_process_group()
    assert "forward" not in vars(layer)
    layer(torch.randn(2, 4)).sum().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
