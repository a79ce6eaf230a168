"""Weights that autocast casts once for several uses: a graphed part has eager's numbers, or is eager and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.order import Order
from tests.harness import same_bits
from tests.module_harness import quiet

WIDTH = 32


class Tied(nn.Module):
    """Uses a weight of another module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Twice(nn.Module):
    """Uses its weight twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = inner, nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.drop(self.norm(self.inner(x))))


def a_model(device: torch.device) -> nn.ModuleDict:
    torch.manual_seed(7)
    linear = nn.Linear(WIDTH, WIDTH)
    return nn.ModuleDict({"one": linear, "tied": Tied(linear.weight), "twice": Twice(linear)}).to(device)


Step = Callable[[Any, torch.Tensor, torch.device], None]


def region(device: torch.device, *, cache: bool = True) -> Any:
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().pow(2).sum()


def in_one_region(*names: str, cache: bool = True) -> Step:
    def step(model: Any, x: torch.Tensor, device: torch.device) -> None:
        with region(device, cache=cache):
            for name in names:
                x = model[name](x).tanh()
        loss_of(x).backward()

    return step


def in_two_regions(model: Any, x: torch.Tensor, device: torch.device) -> None:
    for _ in range(2):
        with region(device):
            x = model["one"](x).tanh()
    loss_of(x).backward()


def two_backwards(model: Any, x: torch.Tensor, device: torch.device) -> None:
    with region(device):
        for _ in range(2):
            loss_of(model["one"](x).tanh()).backward()


def run(step: Step, device: torch.device, scope: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Gradients after each step, and the rows of the report by path."""
    model, found, rows = a_model(device), [], {}
    torch.manual_seed(11)
    handle = stepgraph.graph_modules(model, scope) if scope is not None else None
    for index in range(7):
        model.zero_grad()
        step(model, torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device), device)
        found.append([*(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
    if handle is not None:
        rows = {row.path: row for row in handle.report().rows}
        handle.close()
    return found, rows


CASES: dict[str, tuple[Step, str, bool]] = {
    "two calls": (in_one_region("one", "one"), "one", False),
    "two graphed parts": (in_one_region("one", "tied"), "one,tied", False),
    "eager code before": (in_one_region("tied", "one"), "one", False),
    "eager code after": (in_one_region("one", "tied"), "one", False),
    "inside the part": (in_one_region("twice"), "twice", True),
    "inside the part, called twice": (in_one_region("twice", "twice"), "twice", False),
    "without the cache": (in_one_region("one", "one", cache=False), "one", True),
    "in two regions": (in_two_regions, "one", True),
    "two backwards in one region": (two_backwards, "one", True),
    "one call": (in_one_region("one"), "one", True),
}


@pytest.mark.parametrize("case", CASES)
def test_autocast_cache_shared_casts_have_eagers_bits(case: str, device: torch.device) -> None:
    step, scope, is_graphed = CASES[case]
    expected, _ = run(step, device, None)
    with quiet() as seen:
        received, rows = run(step, device, scope)
    for one, two in zip(expected, received, strict=True):
        assert all(a is b or same_bits(a, b) for a, b in zip(one, two, strict=True))
    for row in rows.values():
        assert (row.forwards > 0) is is_graphed
        assert ("capture failed: [autocast-cache]" in row.eager_reasons) is not is_graphed
    assert ("[autocast-cache]" in "".join(str(w.message) for w in seen)) is not is_graphed


def test_autocast_cache_second_call_after_capture_is_reported(device: torch.device) -> None:
    model = a_model(device)
    once, twice = in_one_region("one"), in_one_region("one", "one")
    with quiet() as seen, stepgraph.graph_modules(model, "one") as handle:
        for index in range(14):
            (once if index < 6 else twice)(model, torch.ones(4, WIDTH, device=device), device)
        (row,) = handle.report().rows
    assert "[autocast-cache]" in str(seen[0].message)
    assert any("[autocast-cache]" in why for why in row.recapture_reasons)
    assert row.eager_reasons["capture failed: [autocast-cache]"] > 0


def test_autocast_cache_callables_called_twice_warn(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    x = torch.ones(4, WIDTH, device=device, requires_grad=True)
    with quiet() as seen:
        with region(device):
            first, second = stepgraph.make_graphed_callables(
                (layer,), ((x,), (x,)), order=Order([1, 1, -1, -1], [0, 1, 1, 0])
            )
        for _ in range(3):
            with region(device):
                losses = [loss_of(first(x)), loss_of(second(x))]
            (losses[1] + losses[0]).backward()
    told = [str(w.message) for w in seen if "[autocast-cache]" in str(w.message)]
    assert len(told) == 1


class Product(nn.Module):
    """Uses its argument twice, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(x)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_autocast_cache_of_arguments_is_as_in_eager(is_leaf: bool, device: torch.device) -> None:
    """Autocast casts a leaf once for both uses, and a computed argument twice: their gradients round differently."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = []
        for _ in range(5):
            base = torch.randn(64, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, torch.bfloat16):
                result = model(base if is_leaf else base.mul(1.5))
            result.float().square().sum().backward()
            assert base.grad is not None
            found.append(base.grad)
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    torch.manual_seed(0)
    eager, graphed = nn.Sequential(Product()).to(device), nn.Sequential(Product()).to(device)
    graphed.load_state_dict(eager.state_dict())
    with stepgraph.graph_modules(graphed, "0", warmup=2) as handle:
        found = gradients(graphed)
        assert handle.report().rows[0].forwards == 3
    assert all(torch.equal(one, other) for one, other in zip(found, gradients(eager), strict=True))


def test_autocast_casts_a_callables_argument_as_in_eager(device: torch.device) -> None:
    """The sample is a leaf, whose cast autocast would keep for both uses; what the calls are given was computed."""

    def gradients(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = []
        for _ in range(4):
            base = torch.randn(64, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, torch.bfloat16):
                result = model(base.mul(1.5))
            result.float().square().sum().backward()
            assert base.grad is not None
            found.append(base.grad)
        return found

    torch.manual_seed(0)
    eager, layer = Product().to(device), Product().to(device)
    layer.load_state_dict(eager.state_dict())
    sample = torch.randn(64, 8, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        graphed = stepgraph.make_graphed_callables(layer, (sample,))
    assert all(torch.equal(one, other) for one, other in zip(gradients(graphed), gradients(eager), strict=True))
