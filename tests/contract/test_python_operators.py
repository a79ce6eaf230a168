"""Operators that are written in Python run with log, watch and tape inside them: a graph has the kernels they call."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import same_bits

CONFIG = types.SimpleNamespace(scale=2.0, slope=3.0)
RAN: list[str] = []
Operator = Callable[[torch.Tensor], torch.Tensor]


@torch.library.custom_op("stepgraph_contract::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    RAN.append("scaled")
    return x * CONFIG.scale


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, grad: grad * CONFIG.slope)


@torch.library.custom_op("stepgraph_contract::scale_in_place", mutates_args=("x",))
def scale_in_place(x: torch.Tensor) -> None:
    x.mul_(CONFIG.scale)


@torch.library.custom_op("stepgraph_contract::read", mutates_args=())
def read(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@torch.library.custom_op("stepgraph_contract::product", mutates_args=())
def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * CONFIG.scale


def outer(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.stepgraph_contract.plain(x) + 1


LIBRARY = torch.library.Library("stepgraph_contract", "FRAGMENT")
for kernel in (plain, outer):
    LIBRARY.define(f"{kernel.__name__}(Tensor x) -> Tensor")
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(kernel.__name__, kernel, key)


def written_over(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    scale_in_place(y)
    return y


OPERATORS: dict[str, Operator] = {
    "custom_op": scaled,
    "library": lambda x: torch.ops.stepgraph_contract.plain(x),
    "one_in_another": lambda x: torch.ops.stepgraph_contract.outer(x),
    "in_place": written_over,
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(vars(CONFIG))
    yield
    vars(CONFIG).update(before)
    RAN.clear()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operator_in_python_shows_its_host_value(device: torch.device, operator: Operator) -> None:
    x = torch.arange(4.0, device=device)
    step = stepgraph.capture(lambda x: operator(x) + 1, audit=False, ignore=["len(RAN)"])
    for _ in range(6):
        step(x)
    CONFIG.scale = 5.0
    with pytest.warns(stepgraph.StepgraphWarning, match=r"CONFIG\.scale"):
        result = step(x)
    assert same_bits(result, operator(x) + 1)


def test_operator_in_python_is_replayed_by_its_kernels(device: torch.device) -> None:
    step, x = stepgraph.capture(scaled, audit=False, ignore=["len(RAN)"]), torch.arange(4.0, device=device)
    for _ in range(4):
        step(x)
    RAN.clear()
    for factor in range(3):
        assert same_bits(step(x * factor), x * factor * CONFIG.scale)
    assert RAN == []


def test_host_change_in_an_operator_is_refused(device: torch.device) -> None:
    step, x = stepgraph.capture(scaled), torch.ones(2, device=device)
    with pytest.raises(stepgraph.CaptureError, match=r"len\(RAN\)") as info:
        for _ in range(8):
            step(x)
    assert info.value.rule == "host-value"


def test_formula_of_a_gradient_shows_its_host_value(device: torch.device) -> None:
    weight = nn.Parameter(torch.arange(4.0, device=device))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        scaled(weight * x).sum().backward()
        return weight.grad.clone()

    captured, x = stepgraph.capture(step, audit=False, ignore=["len(RAN)"]), torch.ones(4, device=device)
    for _ in range(6):
        captured(x)
    CONFIG.slope = 7.0
    with pytest.warns(stepgraph.StepgraphWarning, match=r"CONFIG\.slope"):
        assert captured(x).tolist() == [7.0] * 4


def test_operator_that_reads_its_tensor_is_refused(device: torch.device) -> None:
    step, x = stepgraph.capture(read), torch.ones(2, device=device)
    with pytest.raises(stepgraph.CaptureError) as info:
        for _ in range(8):
            step(x)
    assert info.value.rule == "host-read"


def test_operator_in_python_under_autocast_equals_eager(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return product(x)

    captured, x = stepgraph.capture(step), torch.randn(4, 4, device=device)
    wanted = step(x)
    assert wanted.dtype is torch.bfloat16
    for _ in range(6):
        assert same_bits(captured(x), wanted)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.stepgraph_contract.plain(self.linear(x))


@pytest.mark.parametrize("engine", ["modules", "callables"])
def test_part_with_an_operator_in_python_is_never_stale(device: torch.device, engine: str) -> None:
    model, x = Scaled().to(device), torch.randn(2, 4, device=device)
    if engine == "modules":
        stepgraph.graph_modules(model, ["forward"], warmup=2)
    else:
        stepgraph.make_graphed_callables(model, (torch.randn(2, 4, device=device),))
    with torch.no_grad():
        if engine == "modules":
            for _ in range(5):
                model(x)
        CONFIG.scale = 5.0
        wanted = model.linear(x) * 5.0
        if engine == "modules":
            assert same_bits(model(x), wanted)
            return
    with pytest.raises(stepgraph.StateChanged, match=r"CONFIG\.scale"):
        model(x)
