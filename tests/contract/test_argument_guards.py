"""Functions and objects that are passed to a captured step: what they hold is watched as a closure is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stepgraph


class Scale:
    """A number on an object, used in every way that a step may be handed it."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def in_closure(scale: Scale) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * scale.factor


def plus_nothing(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return function(x) + 0


USES: dict[str, Callable[[Scale], Callable[[torch.Tensor], torch.Tensor]]] = {
    "callable object": lambda scale: scale,
    "bound method": lambda scale: scale.method,
    "closure": in_closure,
    "partial": lambda scale: functools.partial(plus_nothing, function=scale),
}


@pytest.mark.parametrize("how", ["argument", "keyword", "partial", "step"])
@pytest.mark.parametrize("use", USES)
def test_value_of_a_passed_object_is_never_frozen(use: str, how: str, device: torch.device) -> None:
    scale = Scale()
    function = USES[use](scale)
    step: Any
    if how == "step":
        step, args, kwargs = stepgraph.capture(function), (), {}
    elif how == "partial":
        step, args, kwargs = stepgraph.capture(functools.partial(plus_nothing, function=function)), (), {}
    else:
        step = stepgraph.capture(plus_nothing)
        args, kwargs = ((function,), {}) if how == "argument" else ((), {"function": function})
    x = torch.ones((), device=device)
    with step:
        for _ in range(5):
            assert step(x, *args, **kwargs).item() == 2.0
        assert step.report().replays == 2
        scale.factor = 5.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"factor: 2.0 -> 5.0"):
            assert step(x, *args, **kwargs).item() == 5.0
        assert step(x, *args, **kwargs).item() == 5.0
        assert step.report().recaptures == 1


def test_value_on_a_passed_object_changed_by_the_step_is_refused(device: torch.device) -> None:
    class Counter:
        calls = 0

        def __init__(self) -> None:
            self.calls = 0

    def count(x: torch.Tensor, counter: Counter) -> torch.Tensor:
        counter.calls += 1
        return x + 1

    with stepgraph.capture(count, warmup=2) as step:
        counter = Counter()
        for _ in range(2):
            step(torch.ones((), device=device), counter)
        with pytest.raises(stepgraph.CaptureError, match=r"counter.calls: 1 -> 2"):
            step(torch.ones((), device=device), counter)


def test_bound_method_is_compared_by_its_object(device: torch.device) -> None:
    """`scale.method` is a new object at each look-up, and one and the same method."""
    one, two = Scale(), Scale()
    two.factor = 3.0
    x = torch.ones((), device=device)
    with stepgraph.capture(plus_nothing, warmup=1) as step:
        for scale in (one, one, two, two, one, two):
            assert step(x, scale.method).item() == scale.factor
        assert (step.report().graphs, step.report().replays) == (2, 4)


def test_parameter_passed_as_an_argument_is_compared_by_identity(device: torch.device) -> None:
    """Another parameter of the same shape, or the same one moved, is another graph: its address is baked in."""
    one, two = (torch.nn.Parameter(torch.full((4,), value, device=device)) for value in (1.0, 2.0))

    @torch.no_grad()
    def double(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return weight * 2 + x

    x = torch.zeros(4, device=device)
    with stepgraph.capture(double, warmup=1) as step:
        for weight in (one, one, one, two, two, two):
            assert torch.equal(step(weight, x), double(weight, x))
        assert step.report().graphs == 2
        one.data = torch.full((4,), 5.0, device=device)
        for _ in range(3):
            assert torch.equal(step(one, x), double(one, x))
