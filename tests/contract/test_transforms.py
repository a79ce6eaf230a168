"""Graphed modules, callables and steps inside the transforms of `torch.func`: eager, counted, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import stepgraph

Call = Callable[..., Any]


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)


def batch(device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, 24, device=device).view(6, 4)


def dual(call: Call, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "vmap": lambda call, x: vmap(call)(torch.stack([x, 2 * x])),
    "vmap over nothing of the call": lambda call, x: vmap(lambda scale: call(x) * scale)(
        torch.ones(3, device=x.device)
    ),
    "grad": lambda call, x: grad(lambda x: call(x).square().sum())(x),
    "vmap of grad": lambda call, x: vmap(grad(lambda x: call(x).square().sum()))(torch.stack([x, 2 * x])),
    "jvp": lambda call, x: jvp(call, (x,), (torch.ones_like(x),)),
    "vjp": lambda call, x: vjp(call, x)[1](torch.ones_like(x)),
    "jacrev": lambda call, x: jacrev(call)(x),
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
    "forward mode": dual,
}
REASONS = ("a transform of torch.func", "forward-mode differentiation")


def same(one: Any, two: Any) -> bool:
    return all(map(torch.equal, tree_leaves(one), tree_leaves(two)))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("warm", [0, 5])
def test_captured_step_in_a_transform_equals_eager(transform: str, warm: int, device: torch.device) -> None:
    x, use, model = batch(device), TRANSFORMS[transform], model_on(device)
    step = stepgraph.capture(lambda x: model(x))
    for _ in range(warm):
        step(x)
    for _ in range(3):
        assert same(use(step, x), use(model_on(device), x))
    assert sum(step.report().eager_reasons.get(reason, 0) for reason in REASONS) == 3
    for _ in range(4):
        assert torch.equal(step(x), model(x))
    assert step.report().replays


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_graphed_modules_in_a_transform_equal_eager(transform: str, device: torch.device) -> None:
    x, use, model = batch(device), TRANSFORMS[transform], model_on(device)
    with stepgraph.graph_modules(model, scope=["0", "2"]) as handle:
        for _ in range(5):
            model(x).sum().backward()
        for _ in range(3):
            assert same(use(model, x), use(model_on(device), x))
        assert torch.equal(model(x), model_on(device)(x))
        rows = handle.report().rows
    assert all(sum(row.eager_reasons.get(reason, 0) for reason in REASONS) == 3 for row in rows)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_graphed_callables_in_a_transform_equal_eager(transform: str, device: torch.device) -> None:
    x, use = batch(device), TRANSFORMS[transform]
    graphed = stepgraph.make_graphed_callables(model_on(device), (x,))
    for _ in range(3):
        assert same(use(graphed, x), use(model_on(device), x))
        assert torch.equal(graphed(x), model_on(device)(x))


def test_callables_with_an_order_refuse_a_transform(device: torch.device) -> None:
    x = batch(device)
    (graphed,) = stepgraph.make_graphed_callables((model_on(device),), ((x,),), order=[1, -1])
    with pytest.raises(stepgraph.SignatureMismatch, match=r"a transform of torch\.func"):
        vmap(lambda scale: graphed(x) * scale)(torch.ones(3, device=device))


def test_functional_call_of_graphed_modules_equals_eager(device: torch.device) -> None:
    x, model = batch(device), model_on(device)
    with stepgraph.graph_modules(model, scope=["0", "2"]):
        for _ in range(5):
            model(x).sum().backward()
        values = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}

        def per_sample(model: nn.Module) -> Any:
            def loss(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = functional_call(model, values, (row[None],)).square().sum()
                return found

            return vmap(grad(loss), in_dims=(None, 0))(values, x)

        assert same(functional_call(model, values, (x,)), functional_call(model_on(device), values, (x,)))
        assert same(per_sample(model), per_sample(model_on(device)))
