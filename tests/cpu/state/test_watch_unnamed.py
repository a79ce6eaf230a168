"""Code that runs without being named is followed, too: chosen by a string, behind an operator, found in a registry."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest

from stepgraph.state.watch import Watch

Case = tuple[Callable[..., Any], Callable[[], object], list[str]]
"""A step, a change, and what is told of it."""
FACTOR = 1.0


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


@pytest.fixture(autouse=True)
def factor() -> Any:
    set_factor(1.0)
    yield
    set_factor(1.0)


def set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


FACTOR_CHANGED = ["FACTOR: 1.0 -> 2.0"]


class Losses:
    """Chooses a method by a name that it puts together."""

    def __init__(self) -> None:
        self.kind = "plain"
        self.settings = Settings()
        self.history: list[float] = []

    def loss_plain(self, x: float) -> float:
        return x * self.settings.scale

    def loss_global(self, x: float) -> float:
        return x * FACTOR

    def step(self, x: float) -> Any:
        return getattr(self, "loss_" + self.kind)(x)

    def spelled(self, x: float) -> Any:
        return getattr(self, "loss_plain")(x)  # noqa: B009

    def __call__(self, x: float) -> float:
        return x * self.settings.scale


def method_chosen_by_a_string() -> Case:
    losses = Losses()
    return losses.step, lambda: setattr(losses.settings, "scale", 2.0), ["self.settings.scale: 1.0 -> 2.0"]


def global_of_a_method_chosen_by_a_string() -> Case:
    return Losses().step, lambda: set_factor(2.0), FACTOR_CHANGED


def function_of_a_module_chosen_by_a_string() -> Case:
    module = types.ModuleType("some_losses")
    exec("WEIGHT = 1.0\ndef square(x): return x * x * WEIGHT", vars(module))
    name = "square"
    return lambda x: getattr(module, name)(x), lambda: setattr(module, "WEIGHT", 2.0), ["WEIGHT: 1.0 -> 2.0"]


def callable_object_in_a_partial() -> Case:
    losses = Losses()
    step = functools.partial(losses, x=1.0)
    return step, lambda: setattr(losses.settings, "scale", 2.0), ["self.settings.scale: 1.0 -> 2.0"]


CASES = [
    method_chosen_by_a_string,
    global_of_a_method_chosen_by_a_string,
    function_of_a_module_chosen_by_a_string,
    callable_object_in_a_partial,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_watch_follows_code_that_is_not_named(case: Callable[[], Case]) -> None:
    step, change, told = case()
    watch = Watch(step)
    assert watch.changed() == []
    change()
    assert list(map(str, watch.changed())) == told


def test_watch_leaves_other_methods_alone_where_names_are_spelled() -> None:
    losses = Losses()
    watch = Watch(losses.spelled)
    set_factor(2.0)
    losses.history.append(1.0)
    assert watch.changed() == []
