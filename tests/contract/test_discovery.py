"""What a step touches is found whatever else it can name: objects that make attributes up, and compiled code."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import stepgraph
from stepgraph.engine.observe.discovery import discovering
from stepgraph.engine.observe.finder import is_compiled, reachable
from stepgraph.engine.observe.step_objects import StepObjects


class AttrDict(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Addict(dict[str, Any]):
    """A missing name is an empty one, as in addict."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __missing__(self, name: str) -> Addict:
        return Addict()


class Slotted:
    """No `__dict__`, and an error of its own for what it has not."""

    __slots__ = ("w",)

    def __init__(self) -> None:
        self.w = 2.0

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Asked:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return Mock()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_module() -> nn.Module:
    module: nn.Module = torch.compile(nn.Linear(4, 4), backend="eager")
    return module


def self_compiled_module() -> nn.Module:
    module = nn.Linear(4, 4)
    module.compile(backend="eager")
    return module


THINGS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "AttrDict": lambda: AttrDict(w=2.0),
    "addict": lambda: Addict(w=2.0),
    "slotted": Slotted,
    "Mock": Mock,
    "compiled function": lambda: torch.compile(torch.relu, backend="eager"),
    "compiled lambda": lambda: torch.compile(lambda x: x.relu(), backend="eager"),
    "disabled function": lambda: torch.compiler.disable(lambda x: x.relu()),
    "compiled module": compiled_module,
    "self-compiled module": self_compiled_module,
}


def deep_model(device: torch.device) -> SimpleNamespace:
    """A model that lies deeper than anybody looks before the step has run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(device)
    return SimpleNamespace(parts=SimpleNamespace(inner=SimpleNamespace(model=model)))


@pytest.mark.parametrize("name", THINGS)
def test_discovery_sees_a_deep_model_beside_anything(name: str, device: torch.device) -> None:
    thing = THINGS[name]()

    def run(*, captured: bool) -> tuple[list[torch.Tensor], Any]:
        trainer = deep_model(device)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
            return trainer.parts.inner.model(x), thing is None

        run_step = stepgraph.capture(step) if captured else step
        results = []
        for call in range(12):
            if call == 6:
                trainer.parts.inner.model.eval()
            results.append(run_step(torch.ones(2, 4, device=device))[0].detach().clone())
        return results, run_step

    eager, _ = run(captured=False)
    graphed, step = run(captured=True)
    with step:
        assert all(map(torch.equal, eager, graphed))
        assert step.report().graphs == 2
        assert step.report().replays > 4


@pytest.mark.parametrize(
    "make", [lambda: AttrDict(w=2.0), lambda: Addict(w=2.0), Slotted], ids=["Attr", "Add", "slots"]
)
def test_discovery_allows_objects_with_computed_attributes(make: Callable[[], Any], device: torch.device) -> None:
    config = make()
    with stepgraph.capture(lambda x: x * config.w) as step:
        for _ in range(6):
            assert step(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
        assert step.report().replays == 3


def test_discovery_runs_no_code_of_the_objects_it_finds() -> None:
    asked = Asked()
    found = list(reachable(lambda: asked))
    assert any(value is asked for value in found)
    assert not any(map(is_compiled, found))
    assert asked.names == []


def test_compiled_code_is_recognised_by_its_marks() -> None:
    compiled = ("compiled function", "compiled lambda", "compiled module", "self-compiled module")
    assert [name for name, make in THINGS.items() if is_compiled(make())] == list(compiled)
    assert is_compiled(nn.Sequential(nn.Linear(4, 4), compiled_module()))
    assert not is_compiled(nn.Sequential(nn.Linear(4, 4)))


# -- compiled code that really is compiled, as on CUDA


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def compiled_programs(
    backend: Any, hooked: bool
) -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module]]:
    """How a model can be compiled, each with what to call and the model."""
    models = [nn.Sequential(Inner(), Inner()) for _ in range(5)]
    for model in models if hooked else ():
        model[1].linear.register_forward_pre_hook(lambda module, args: None)
        model.register_forward_hook(lambda module, args, result: result * 2)
    models[2].compile(backend=backend)

    def with_a_break(x: torch.Tensor) -> torch.Tensor:
        y = models[3][0](x)
        torch._dynamo.graph_break()
        return models[3][1](y)

    return {
        "function": (torch.compile(lambda x: models[0](x), backend=backend), models[0]),
        "module": (torch.compile(models[1], backend=backend), models[1]),
        "in itself": (models[2], models[2]),
        "with a break": (torch.compile(with_a_break, backend=backend), models[3]),
        "whole": (torch.compile(lambda x: models[4](x), backend=backend, fullgraph=True), models[4]),
    }


@pytest.mark.pairwise
@pytest.mark.parametrize("before", [False, True], ids=["compiled meanwhile", "compiled before"])
@pytest.mark.parametrize("how", ["function", "module", "in itself", "with a break", "whole"])
@pytest.mark.parametrize("hooked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "hooked"])
def test_compiled_code_is_compiled_once_and_its_callers_are_seen(how: str, before: bool, hooked: bool) -> None:
    compilations: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(1)
        return graph.forward

    x = torch.ones(2, 4)
    alone, _ = compiled_programs(counting, hooked)[how]
    alone(x.clone().requires_grad_() * 1)
    expected = len(compilations)
    assert expected > 0
    torch.compiler.reset()
    compilations.clear()

    compiled, model = compiled_programs(counting, hooked)[how]
    trainer = deep_model(torch.device("cpu"))

    def step() -> torch.Tensor:
        return trainer.parts.inner.model(compiled(trainer.parts.inner.model(x)))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks on modules")  # those here are not the user's
        if before:
            step()
        hooks = dict(torch_module._global_forward_pre_hooks)
        touched = StepObjects()
        for _ in range(3):
            with discovering(touched, step, (), lambda optimizer: None):
                step()
        assert torch_module._global_forward_pre_hooks == hooks
        step()
    assert len(compilations) == expected
    seen = set(map(id, touched.modules))
    assert {id(m) for m in (*model.modules(), *trainer.parts.inner.model.modules())} <= seen


def test_discovery_leaves_the_process_as_it_was() -> None:
    handler = torch._dynamo.callback_handler

    def state() -> list[Any]:
        return [
            dict(torch_module._global_forward_pre_hooks),
            *(dict(torch_optimizer._global_optimizer_pre_hooks), dict(torch_optimizer._global_optimizer_post_hooks)),
            *(torch.autograd.backward, torch_module._has_any_global_hook, torch.overrides.has_torch_function),
            *(torch.get_rng_state, torch.manual_seed, torch._dynamo.eval_frame._stance),
            *(list(handler.start_callbacks), list(handler.end_callbacks)),
        ]

    def broken(x: torch.Tensor) -> torch.Tensor:
        if calls.append(1) or len(calls) in (2, 5):
            raise ValueError
        return x + 1

    calls: list[int] = []
    before = state()
    with stepgraph.capture(broken, ignore=["calls"]) as step:
        for _ in range(8):
            with contextlib.suppress(ValueError, stepgraph.CaptureError):
                step(torch.ones(2))
            assert state() == before
