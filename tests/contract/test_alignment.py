"""An argument that begins at an unusual address gets a buffer that begins at such a one: kernels see the address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.harness import same_bits

CALLS = 12
ROWS, COLUMNS = 3, 17
ENGINES = ["capture", "modules"]


class Normed(nn.Module):
    """What it computes depends on the alignment: matrix products and sums start at the first whole vector."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(self.linear(x), (8,)).sum(0)


def slices(device: torch.device, offset: int) -> list[torch.Tensor]:
    memory = torch.randn(4096, device=device)
    return [memory[call * 64 + offset :][: ROWS * COLUMNS].view(ROWS, COLUMNS) for call in range(CALLS)]


def results(device: torch.device, engine: str, offsets: list[int]) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = Normed().to(device)
    step: Callable[[torch.Tensor], torch.Tensor] = model
    report: Any = None
    if engine == "capture":
        step = stepgraph.capture(lambda x: model(x).detach())
        report = step
    elif engine == "modules":
        report = stepgraph.graph_modules(model, ["forward"], warmup=2)
    batches = [slices(device, offset) for offset in offsets]
    found = []
    for call in range(CALLS):
        for batch in batches:
            result = step(batch[call])
            if engine != "capture":
                result.sum().backward()
            found.append(result.detach().clone())
    return found, report


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_argument_of_any_alignment_equals_eager(engine: str, offset: int, device: torch.device) -> None:
    eager, _ = results(device, "eager", [offset])
    graphed, report = results(device, engine, [offset])
    assert [same_bits(one, two) for one, two in zip(eager, graphed, strict=True)] == [True] * CALLS
    assert report.report().replays >= CALLS - 4


@pytest.mark.parametrize("engine", ENGINES)
def test_each_alignment_is_a_kind_of_call(engine: str, device: torch.device) -> None:
    eager, _ = results(device, "eager", [0, 1])
    graphed, report = results(device, engine, [0, 1])
    assert all(same_bits(one, two) for one, two in zip(eager, graphed, strict=True))
    assert report.report().graphs >= 2


def test_alignment_of_integers_and_single_numbers_is_none(device: torch.device) -> None:
    step = stepgraph.capture(lambda i, s: (i * 2 + s).sum())
    memory, numbers = torch.arange(4096, device=device), torch.randn(64, device=device)
    for call in range(CALLS):
        step(memory[call : call + 16], numbers[call])
    assert step.report().captures == 1


def test_callable_refuses_another_alignment(device: torch.device) -> None:
    model = Normed().to(device)
    graphed = stepgraph.make_graphed_callables(model, (torch.randn(ROWS, COLUMNS, device=device),))
    aligned, moved = slices(device, 0)[0], slices(device, 1)[0]
    graphed(aligned).sum().backward()
    with pytest.raises(stepgraph.SignatureMismatch, match=r"alignment changed .*4 bytes past a multiple of") as info:
        graphed(moved)
    assert info.value.rule == "sample-mismatch"


def test_callable_of_an_unusual_sample_equals_eager(device: torch.device) -> None:
    model = Normed().to(device)
    batches = slices(device, 1)
    wanted = [model(batch).detach().clone() for batch in batches]
    graphed = stepgraph.make_graphed_callables(model, (batches[0].clone().new_empty(64)[1:52].view(ROWS, COLUMNS),))
    for batch, result in zip(batches, wanted, strict=True):
        received = graphed(batch)
        received.sum().backward()
        assert same_bits(received.detach(), result)


class Moved(torch.autograd.Function):
    """Its gradient begins at an unusual address, as a part of a larger one may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(grad.numel() + 16, device=grad.device)[1 : 1 + grad.numel()]
        return memory.view(grad.shape).copy_(grad)


class Aligned(torch.autograd.Function):
    """A backward that takes its way by the address, as kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (3 if grad.data_ptr() % 16 else 2)


class Choosing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Aligned.apply(super().forward(x))
        return result


def test_gradient_of_any_alignment_equals_eager(device: torch.device) -> None:
    def gradients(graphs: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(Choosing(17, 8)).to(device), []
        if graphs:
            stepgraph.graph_modules(model, ["forward"], warmup=2)
        for call in range(CALLS):
            model.zero_grad()
            x = torch.randn(ROWS, 17, generator=torch.Generator().manual_seed(call)).to(device)
            result = model(x)
            (Moved.apply(result) if call % 2 else result).pow(2).sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    assert all(same_bits(one, two) for one, two in zip(gradients(False), gradients(True), strict=True))
