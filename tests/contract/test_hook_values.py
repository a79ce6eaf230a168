"""What an admitted hook reads is baked in as the step's own values are: a change of it is noticed and named."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph

Built = tuple[Any, str, Callable[[], None], str]
"""A hook, how it is registered, a change of what it reads, and what is told of it."""


class Scaling:
    """A hook as an object."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * self.factor

    def double(self) -> None:
        self.factor = 2.0


def scaled_by(factors: list[float], module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * factors[0]


def in_a_closure() -> Built:
    factors = [1.0]

    def hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * factors[0]

    return hook, "register_forward_hook", lambda: factors.__setitem__(0, 2.0), "factors[0]: 1.0 -> 2.0"


def before_the_forward() -> Built:
    factors = [1.0]

    def hook(module: nn.Module, args: Any) -> Any:
        return (args[0] * factors[0],)

    return hook, "register_forward_pre_hook", lambda: factors.__setitem__(0, 2.0), "factors[0]: 1.0 -> 2.0"


def in_the_backward() -> Built:
    factors = [1.0]

    def hook(module: nn.Module, inner: Any, outer: Any) -> Any:
        return tuple(None if grad is None else grad * factors[0] for grad in inner)

    return hook, "register_full_backward_hook", lambda: factors.__setitem__(0, 2.0), "factors[0]: 1.0 -> 2.0"


def on_an_object() -> Built:
    hook = Scaling()
    return hook, "register_forward_hook", hook.double, "hook Scaling.factor: 1.0 -> 2.0"


def on_a_methods_object() -> Built:
    owner = Scaling()
    return owner.__call__, "register_forward_hook", owner.double, "self.factor"


def in_a_partial() -> Built:
    factors = [1.0]
    hook = functools.partial(scaled_by, factors)
    return hook, "register_forward_hook", lambda: factors.__setitem__(0, 2.0), "argument 0[0]: 1.0 -> 2.0"


@pytest.mark.parametrize(
    "build", [in_a_closure, before_the_forward, in_the_backward, on_an_object, on_a_methods_object, in_a_partial]
)
@pytest.mark.parametrize("whole", [True, False])
def test_value_that_an_admitted_hook_reads_is_noticed(
    whole: bool, build: Callable[[], Built], device: torch.device
) -> None:
    hook, register, change, told = build()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)).to(device)
    getattr(model[1], register)(hook)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss.detach(), model[0].weight.grad.clone()

    x = torch.ones(2, 3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, _ = eager = step(x)
        change()
        wanted = step(x)
        assert not all(map(torch.equal, eager, wanted))
    hook, register, change, told = build()
    model[1]._forward_hooks.clear()
    model[1]._forward_pre_hooks.clear()
    model[1]._backward_hooks.clear()
    getattr(model[1], register)(hook)
    handle = (
        stepgraph.capture(step, safe_hooks=[hook])
        if whole
        else stepgraph.graph_modules(nn.ModuleDict({"model": model}), "model", safe_hooks=[hook])
    )
    with handle, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call = handle if whole else step
        for _ in range(5):
            assert torch.equal(call(x)[0], before)
        change()
        assert all(map(torch.equal, call(x), wanted))
    assert told in "".join(str(w.message) for w in seen)


def test_two_hooks_of_one_name_are_both_looked_into(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    hooks = [Scaling(), Scaling()]
    for layer, hook in zip(model, hooks, strict=True):
        layer.register_forward_hook(hook)
    x = torch.ones(2, 3, device=device)
    with stepgraph.capture(lambda x: model(x), safe_hooks=["Scaling"]) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for hook in hooks:
            for _ in range(5):
                step(x)
            hook.double()
            assert torch.equal(step(x), model(x).detach())


def test_number_of_a_hook_of_torch_is_noticed(device: torch.device) -> None:
    layer = nn.utils.spectral_norm(nn.Linear(3, 3)).to(device)
    (norm,) = layer._forward_pre_hooks.values()
    x = torch.ones(2, 3, device=device)
    with stepgraph.capture(lambda x: layer(x)) as step, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(5):
            step(x)
        norm.n_power_iterations = 5
        step(x)
    assert "hook SpectralNorm.n_power_iterations: 1 -> 5" in "".join(str(w.message) for w in seen)


def test_hook_that_counts_is_refused_as_a_hook_unless_allowed(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 3)).to(device)
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, result: seen.append(result.detach().clone()))
    with stepgraph.capture(lambda x: model(x)) as step, pytest.raises(stepgraph.CaptureError, match="module-hook"):
        for _ in range(5):
            step(torch.ones(2, 3, device=device))


def test_hook_that_counts_is_refused_and_may_be_ignored(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 3)).to(device)
    calls = [0]

    def counting(module: nn.Module, args: Any, result: torch.Tensor) -> None:
        calls[0] += 1

    model[0].register_forward_hook(counting)
    x = torch.ones(2, 3, device=device)
    with stepgraph.capture(lambda x: model(x), safe_hooks=[counting]) as step:
        with pytest.raises(stepgraph.CaptureError, match="host-value") as caught:
            for _ in range(5):
                step(x)
        assert "ignore=['calls[0]']" in str(caught.value)
    with stepgraph.capture(lambda x: model(x), safe_hooks=[counting], ignore=["calls[0]"]) as step:
        for _ in range(6):
            step(x)
        assert step.report().replays == 3
