"""Options: each bad one is refused when the step is made, with a fix to type."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.step.options import StepOptions


def step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def refused(**options: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        stepgraph.capture(step, **options)
    return caught.value


@pytest.mark.parametrize("name", ["warmup", "max_graphs"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "3", None, True], ids=repr)
def test_count_option_is_a_whole_number_of_at_least_one(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.rule == "option"
    assert f"{name}={value!r}" in error.what
    assert f"{name}=" in error.fix


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("on_error", "raises", "raise"),
        ("on_error", "eagre", "eager"),
        ("optimizer", "capturabel", "capturable"),
        ("optimizer", "out", "outside"),
        ("optimizer", "insid", "inside"),
        ("outputs", "copies", "copy"),
        ("outputs", "statics", "static"),
    ],
)
def test_word_option_is_answered_with_the_nearest_word(name: str, value: str, meant: str) -> None:
    error = refused(**{name: value})
    assert error.rule == "option"
    assert f"{name}={value!r}" in error.what
    assert repr(meant) in error.what
    assert f"did you mean {meant!r}?" in error.fix


@pytest.mark.parametrize(("name", "value"), [("on_error", "zzz"), ("optimizer", None), ("outputs", 3)])
def test_word_option_without_a_near_word_suggests_the_default(name: str, value: Any) -> None:
    error = refused(**{name: value})
    default = {f.name: f.default for f in dataclasses.fields(StepOptions)}[name]
    assert f"{name}={default!r}" in error.fix


def test_generators_option_takes_generators_only() -> None:
    error = refused(generators=[torch.Generator(), 5])
    assert error.rule == "option"
    assert "5" in error.what
    assert "torch.Generator" in error.fix


@pytest.mark.parametrize(
    "options", [{"warmup": 0}, {"max_graphs": 0}, {"on_error": "x"}, {"generators": [1]}], ids=lambda o: next(iter(o))
)
def test_bad_option_says_why(options: dict[str, Any]) -> None:
    error = refused(**options)
    assert error.what
    assert error.why
    assert error.fix


@pytest.mark.parametrize(
    "make",
    [
        lambda: stepgraph.capture(step, backend="gpu"),
        lambda: stepgraph.capture(backend="tapes"),
        lambda: stepgraph.FullCudaGraphWrapper(step, backend="gpu"),
        lambda: stepgraph.make_graphed_callables(torch.nn.Linear(1, 1), (torch.ones(1),), backend="gpu"),
        lambda: stepgraph.Session(backend="gpu"),
    ],
)
def test_unknown_backend_is_refused_when_it_is_named(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.rule == "backend"
    assert "'tape'" in caught.value.fix
    assert caught.value.why


def test_backend_of_a_device_without_one_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        stepgraph.backend_for("meta")
    assert "'meta'" in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_backend_variable_overrides_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_BACKEND", "tape")
    assert stepgraph.backend_for("cpu").name == "tape"
    monkeypatch.setenv("STEPGRAPH_BACKEND", "no-such")
    with pytest.raises(InvalidArgument, match="no-such"):
        stepgraph.backend_for("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_cuda_backend_without_a_gpu_suggests_the_tape() -> None:
    captured = stepgraph.capture(step, backend="cuda")
    with pytest.raises(InvalidArgument) as caught:
        captured(torch.ones(1))
    assert "backend='tape'" in caught.value.fix


def test_options_are_frozen_and_have_a_docstring_each() -> None:
    options = StepOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.warmup = 5  # type: ignore[misc]
    assert {f.name for f in dataclasses.fields(StepOptions)} == {
        "warmup",
        "max_graphs",
        "strict",
        "on_error",
        "optimizer",
        "outputs",
        "generators",
        "ignore",
        "safe_hooks",
        "audit",
        "nan_check",
        "buckets",
    }


def test_capture_is_a_decorator_with_and_without_options() -> None:
    @stepgraph.capture
    def plain(x: torch.Tensor) -> torch.Tensor:
        """Adds one."""
        return x + 1

    @stepgraph.capture(warmup=1)
    def with_options(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for captured in (plain, with_options):
        with captured:
            assert [captured(torch.ones(1)).item() for _ in range(5)] == [2.0] * 5
    assert (plain.__name__, plain.__doc__) == ("plain", "Adds one.")
    assert plain.report().eager_calls == 3
    assert with_options.report().eager_calls == 1


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("ignore", "self.steps", "pass ignore=['self.steps']."),
        ("safe_hooks", "scale", "pass safe_hooks=['scale']."),
        ("safe_hooks", step, "pass safe_hooks=[step]."),
        ("generators", torch.Generator(), "pass generators=[...]."),
        ("ignore", None, "pass ignore=[...]."),
    ],
    ids=["a name", "a hook by name", "a hook", "a generator", "nothing"],
)
def test_list_option_takes_no_single_name(name: str, value: Any, fix: str) -> None:
    error = refused(**{name: value})
    assert error.rule == "option"
    assert error.fix == fix
    with pytest.raises(InvalidArgument) as caught:
        stepgraph.graph_modules(torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1)}), "a", **{name: value})
    assert caught.value.fix == fix


def test_list_option_takes_a_set() -> None:
    with stepgraph.capture(step, ignore={"self.steps"}) as captured:
        captured(torch.ones(1))
