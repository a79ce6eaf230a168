"""Whose line is it: the user's frame among torch's and the engine's."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch

import stepgraph
from stepgraph.core.errors import Location
from stepgraph.core.frames import called_from_torch, caller_is_torch, error_location, is_engine, is_user, user_location

PACKAGE = Path(stepgraph.__file__).parent
TORCH = Path(torch.__file__).parent


def test_engine_is_the_package_without_models_and_benchmarks() -> None:
    assert is_engine(str(PACKAGE / "engine" / "step" / "record.py"))
    assert is_engine(str(PACKAGE / "core" / "errors.py"))
    assert not is_engine(str(PACKAGE / "lab" / "models" / "gpt.py"))
    assert not is_engine(str(PACKAGE / "lab" / "bench" / "demo.py"))
    assert not is_engine(__file__)


def test_engine_is_recognised_by_its_whole_path() -> None:
    assert not is_engine(str(PACKAGE.with_name("stepgraph_plugin") / "errors.py"))
    assert is_user(str(TORCH.with_name("torchvision") / "models.py"))


def test_user_is_neither_torch_nor_engine_nor_generated() -> None:
    assert is_user(__file__)
    assert is_user(str(PACKAGE / "lab" / "models" / "gpt.py"))
    assert not is_user(str(TORCH / "nn" / "functional.py"))
    assert not is_user(str(PACKAGE / "engine" / "backends" / "tape" / "mode.py"))
    assert not is_user("<string>")
    assert not is_user("/usr/lib/python3.11/contextlib.py")


def line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def test_user_location_is_the_line_that_asks() -> None:
    found, here = user_location(), line()
    assert found == Location(__file__, here, "test_user_location_is_the_line_that_asks")


MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
from stepgraph.core.frames import caller_is_torch, user_location

class Asking(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.answers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.answers.append((user_location(), caller_is_torch()))
        return func(*args, **(kwargs or {}))
"""


def asking() -> Any:
    """A dispatch mode that stands in a file of the engine and asks whose line each operator is."""
    scope: dict[str, Any] = {"__name__": "asking"}
    exec(compile(MODE, str(PACKAGE / "backends" / "asking.py"), "exec"), scope)
    return scope["Asking"]()


def test_user_location_looks_through_torch_and_engine() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())
    x = torch.ones(1, 2)
    with asking() as mode:
        layer(x)
        here = line() - 1
    assert mode.answers
    assert {found for found, _ in mode.answers} == {
        Location(__file__, here, "test_user_location_looks_through_torch_and_engine")
    }


def test_caller_is_torch_only_where_torchs_code_calls() -> None:
    x = torch.ones(1, 2)
    with asking() as mode:
        x + 1
    assert [by_torch for _, by_torch in mode.answers] == [False]
    optimizer = torch.optim.SGD([torch.nn.Parameter(x)], lr=0.1, foreach=False)
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(x)
    with asking() as mode:
        optimizer.step()
    assert mode.answers
    assert all(by_torch for _, by_torch in mode.answers)


def test_caller_is_torch_does_not_stop_at_the_dispatch_plumbing() -> None:
    for plumbing in ("overrides.py", "_ops.py", os.path.join("utils", "_python_dispatch.py")):
        scope: dict[str, Any] = {"ask": caller_is_torch}
        exec(compile("answer = ask()", str(TORCH / plumbing), "exec"), scope)
        assert scope["answer"] is False, plumbing


def test_error_location_is_the_innermost_user_line() -> None:
    def inner() -> None:
        torch.ones(2) @ torch.ones(3)

    try:
        inner()
    except RuntimeError as error:
        found = error_location(error)
    assert found is not None
    assert (found.file, found.function) == (__file__, "inner")
    assert "torch.ones(2) @ torch.ones(3)" in str(found)


def test_error_location_ends_before_torchs_own_lines() -> None:
    layer = torch.nn.Linear(2, 2)
    try:
        layer(torch.ones(1, 3))
    except RuntimeError as error:
        found = error_location(error)
    assert found is not None
    assert found.function == "test_error_location_ends_before_torchs_own_lines"
    assert "layer(torch.ones(1, 3))" in str(found)


def test_error_location_of_an_error_never_raised_is_none() -> None:
    assert error_location(ValueError("not raised")) is None


def test_called_from_torch_finds_a_torch_file_on_the_stack() -> None:
    seen: list[bool] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(called_from_torch("utils/checkpoint.py"))
        return x * 2

    torch.utils.checkpoint.checkpoint(work, torch.ones(2), use_reentrant=False)
    work(torch.ones(2))
    assert seen == [True, False]
