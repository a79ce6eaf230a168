"""Code that goes through the parts of a module meets them in an order: another one is another step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph


def module_dict() -> tuple[nn.Module, Callable[[Any, torch.Tensor], Any]]:
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}), lambda m, x: next(iter(m.values()))(x)


def parameter_dict() -> tuple[nn.Module, Callable[[Any, torch.Tensor], Any]]:
    values = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    return nn.ParameterDict(values), lambda m, x: next(iter(m.values())) * x


@pytest.mark.parametrize("build", [module_dict, parameter_dict])
def test_parts_of_a_module_in_another_order_are_another_step(
    build: Callable[[], tuple[Any, Callable[[Any, torch.Tensor], Any]]], device: torch.device
) -> None:
    module, use = build()
    module.to(device)
    x = torch.ones(2, 3, device=device)
    with stepgraph.capture(lambda x: use(module, x)) as step:
        for _ in range(5):
            before = step(x)
        module["a"] = module.pop("a")
        assert torch.equal(step(x), use(module, x).detach())
        assert not torch.equal(before, step(x))
        (reason,) = step.report().recapture_reasons
        assert "a new order of its parts: `b` before `a`" in reason


def test_plain_number_in_a_parameter_list_is_noticed(device: torch.device) -> None:
    values = nn.ParameterList([torch.ones(3), 2.0]).to(device)
    x = torch.ones(3, device=device)
    with stepgraph.capture(lambda x: x * values[0] * values[1]) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            step(x)
        values[1] = 5.0
        assert step(x).tolist() == [5.0] * 3
        assert list(step.report().recapture_reasons) == ["values.1: 2.0 -> 5.0"]
