"""Code that has run, and what is followed of that which has not."""

from __future__ import annotations

import gc
import time
import types
from typing import Any

import pytest
import torch

from stepgraph.core.executed_code import ExecutedCode
from stepgraph.engine.guards.host_values.watch import Watch

NUM_FUNCTIONS = 2000


def framework(*, hot: int) -> dict[str, Any]:
    """A large framework in a folder of the user's: functions that all can be named, one of which is called."""
    scope: dict[str, Any] = {"__name__": "framework", "values": [0.0] * NUM_FUNCTIONS}
    for index in range(NUM_FUNCTIONS):
        scope[f"v{index}"] = 1.0
        exec(f"def f{index}(x): return x * v{index}", scope)
    names = ", ".join(f"f{index}" for index in range(NUM_FUNCTIONS))
    scope["source"] = f"def step(x):\n    if x is None:\n        return [{names}]\n    return f{hot}(x)"
    exec(scope["source"], scope)
    return scope


def noted(step: Any) -> ExecutedCode:
    ran = ExecutedCode()
    with ran.noting():
        step(1.0)
    return ran


def test_code_that_ran_is_known_and_other_code_is_not() -> None:
    def runs(x: float) -> float:
        return x

    def rests(x: float) -> float:
        return x

    ran = noted(runs)
    assert ran.is_known
    assert runs.__code__ in ran
    assert rests.__code__ not in ran


def test_callback_of_the_collector_is_not_the_steps_code() -> None:
    """Python calls it at any moment; what it keeps, such as the time of the last collection, changes all the time."""
    ran_at: list[float] = []

    def timed(phase: str, info: dict[str, int]) -> None:
        ran_at.append(time.perf_counter())

    def step(x: float) -> float:
        gc.collect(0)
        return x

    gc.callbacks.append(timed)
    try:
        ran = noted(step)
    finally:
        gc.callbacks.remove(timed)
    assert len(ran_at) == 2
    assert step.__code__ in ran
    assert timed.__code__ not in ran


def test_nothing_is_known_before_a_call() -> None:
    assert not ExecutedCode().is_known


def test_framework_in_a_folder_is_watched_only_where_it_ran() -> None:
    scope = framework(hot=NUM_FUNCTIONS - 1)
    watch = Watch(scope["step"], ran=noted(scope["step"]))
    scope["v0"] = 2.0
    assert not watch.changed()
    scope[f"v{NUM_FUNCTIONS - 1}"] = 2.0
    assert [change.name for change in watch.changed()] == [f"v{NUM_FUNCTIONS - 1}"]


def test_of_few_functions_all_that_can_be_named_is_watched() -> None:
    values = {"hot": 1.0, "cold": 1.0}

    def hot(x: float) -> float:
        return x * values["hot"]

    def cold(x: float) -> float:
        return x * values["cold"]

    def step(x: float) -> float:
        return hot(x) if x else cold(x)

    watch = Watch(step, ran=noted(step))
    values["cold"] = 2.0
    assert [change.name for change in watch.changed()] == ["values['cold']"]


def test_code_that_is_gone_does_not_lend_its_identity() -> None:
    ran = ExecutedCode()
    for _ in range(50):
        scope: dict[str, Any] = {}
        exec("def f(x): return x", scope)
        with ran.noting():
            scope["f"](1)
        del scope
    new: dict[str, Any] = {}
    exec("def g(x): return x + 1", new)
    made: types.FunctionType = new["g"]
    assert made.__code__ not in ran


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_library_code_counts_as_run_though_unobserved(compiled: bool) -> None:
    scope: dict[str, Any] = {"__name__": "library", "scale": 1.0}
    exec(compile("def scaled(x): return x * scale", "/lib/site-packages/library.py", "exec"), scope)
    scaled = torch.compile(scope["scaled"], backend="eager") if compiled else scope["scaled"]

    def step(x: float) -> Any:
        return scaled(x) if x else x

    ran = ExecutedCode()
    with ran.noting():
        step(0.0)  # as when other code runs in its place
    watch = Watch(step, ran=ran)
    scope["scale"] = 2.0
    assert [change.name for change in watch.changed()] == ["scale"] * compiled


def test_compiled_code_in_a_framework_in_a_folder_is_watched() -> None:
    scope = framework(hot=0)
    scope |= {"scale": 1.0, "compile": torch.compile}
    exec("def scaled(x): return x * scale", scope)
    exec("zz = compile(scaled, backend='eager')", scope)
    exec(scope["source"].replace("return f0(x)", "return f0(x) if x else zz(x)"), scope)
    watch = Watch(scope["step"], ran=noted(scope["step"]))  # it is compiled, which comes up after all the others
    scope["zz"] = None
    assert "zz" in [change.name for change in watch.changed()]
