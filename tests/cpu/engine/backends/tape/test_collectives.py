"""Collectives in a recording, in a process group of one rank; tests/distributed has several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stepgraph
from stepgraph.engine.backends.tape.mode import TapeBackend
from tests.cpu.engine.backends.tape.recording import record, refused


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def all_reduce(x: torch.Tensor) -> Any:
    return dist.all_reduce(x, async_op=True)


def all_gather(x: torch.Tensor) -> Any:
    return dist.all_gather([torch.empty_like(x)], x, async_op=True)


def send(x: torch.Tensor) -> Any:
    return dist.isend(x, 1)  # there is no rank 1: only a recording can call it


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "send": send,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_work_of_a_recorded_collective_is_complete(name: str) -> None:
    before, works = dist.group.WORLD._get_sequence_number_for_group(), []

    def step(x: torch.Tensor) -> None:
        works.append(OPERATIONS[name](x))
        assert works[0].is_completed()
        assert works[0].wait()

    graph, _ = record(TapeBackend().workspace(), step, torch.ones(2))
    assert graph.nodes == 1
    assert dist.group.WORLD._get_sequence_number_for_group() == before, "it has communicated"


def test_memory_filled_by_a_collective_has_values_in_a_recording() -> None:
    """Numbers of a shape and a range that kernels accept: `gather` checks each index, `bernoulli` each probability."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index, chances = torch.empty(4, dtype=torch.int64), torch.empty(8)
        dist.broadcast(index, src=0)
        dist.all_gather_into_tensor(chances[:4], x)
        name = dist.group.WORLD.group_name
        doubled = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, name)
        return x.gather(0, index), torch.bernoulli(chances) + torch.bernoulli(doubled)

    _, (gathered, drawn) = record(TapeBackend().workspace(), step, torch.full((4,), 0.5))
    assert (gathered.shape, drawn.shape) == ((4,), (8,))


def test_receive_from_any_rank_is_refused() -> None:
    error = refused(lambda x: dist.recv(x), torch.ones(2))
    assert (error.row.id, error.operation) == ("tape-limit", "the collective c10d::recv_any_source_")


def test_hook_of_ddp_that_wants_the_numbers_in_cpp_is_refused() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    with (
        stepgraph.capture(step) as captured,
        pytest.raises(stepgraph.CaptureError, match="FP16_COMPRESS") as caught,
    ):
        for _ in range(12):
            captured(torch.ones(3, 4))
    assert caught.value.rule == "tape-limit"
