"""Hooks and graphed modules: those on the module itself run around its replay, those inside are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import stepgraph
from tests.module_harness import Layer, Net, Note, Training, assert_graphed_equals_eager, only_row, quiet, training_of


def hook_everything(layer: nn.Module, seen: list[Any]) -> list[Any]:
    """Every kind of hook on one module; each writes down what it sees, and some change it."""

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(args[0].detach().clone())
        return (args[0] * 2,), kwargs

    def post(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        seen.append(result.detach().clone())
        return result + 1

    def backward_pre(module: nn.Module, grads: Any) -> Any:
        seen.append(grads[0].clone())
        return (grads[0] * 0.5,)

    def backward(module: nn.Module, grads_in: Any, grads_out: Any) -> Any:
        seen.extend([grads_in[0].clone(), grads_out[0].clone()])
        return (grads_in[0] * 3,)

    return [
        layer.register_forward_pre_hook(pre, with_kwargs=True),
        layer.register_forward_hook(post),
        layer.register_full_backward_pre_hook(backward_pre),
        layer.register_full_backward_hook(backward),
    ]


@pytest.mark.parametrize("when", ["from the start", "later", "now and then"])
def test_hooks_on_the_graphed_module_run_around_its_replay(when: str, device: torch.device) -> None:
    """Forward and backward hooks, also such as come and go: they are no part of the graph."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer(), Layer()), device, microbatches=2, steps=12)
        seen: list[Any] = []
        handles: list[Any] = []
        inner = training.step

        def step(batch: torch.Tensor, note: Note) -> list[Any]:
            seen.clear()
            result = inner(batch, note)
            return [result, *seen]

        def before_step(index: int) -> None:
            if index == {"from the start": 0, "later": 5}.get(when) or (when == "now and then" and index % 3 == 0):
                handles.extend(hook_everything(training.model.layers[1], seen))
            elif when == "now and then" and index % 3 == 1:
                while handles:
                    handles.pop().remove()

        training.step, training.before_step = step, before_step
        return training

    report = assert_graphed_equals_eager(build, device)
    assert report.recaptures == 0


def print_shape(module: nn.Module, args: Any, result: torch.Tensor) -> None:
    assert result.shape[-1] > 0


@pytest.mark.parametrize("late", [False, True])
def test_hook_inside_a_graphed_module_is_refused_by_name(late: bool, device: torch.device) -> None:
    """Trap: hooks of submodules, accepted and never run. The module stays eager, where they do run."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer()), device, steps=12)
        seen: list[torch.Tensor] = []
        inner = training.step

        def step(batch: torch.Tensor, note: Note) -> list[Any]:
            seen.clear()
            result = inner(batch, note)
            return [result, *seen]

        def before_step(index: int) -> None:
            if index == (5 if late else 0):
                training.model.layers[0].up.register_forward_hook(
                    lambda module, args, result: seen.append(result.detach().clone())
                )

        training.step, training.before_step = step, before_step
        return training

    with quiet() as warned:
        report = assert_graphed_equals_eager(build, device, replays=False)
    assert report.rows[0].eager_reasons["capture failed: [module-hook]"] > 3
    assert report.rows[1].eager_calls == 3
    (message,) = {str(w.message) for w in warned if "module-hook" in str(w.message)}
    assert "layers.0.up" in message
    assert "safe_hooks" in message


def test_hook_inside_that_is_listed_safe_is_recorded(device: torch.device) -> None:
    def scale(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * 2

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer()), device)
        training.model.layers[0].up.register_forward_hook(scale)
        training.model.layers[1].down.register_forward_hook(print_shape)
        return training

    report = assert_graphed_equals_eager(build, device, safe_hooks=[scale, "print_shape"])
    assert report.eager_calls == 6


def test_hook_inside_under_strict_raises(device: torch.device) -> None:
    model = nn.ModuleDict({"layer": Layer()}).to(device)
    model["layer"].up.register_forward_hook(print_shape)
    with stepgraph.graph_modules(model, "layer", strict=True, warmup=1):
        model["layer"](torch.ones(2, 8, device=device)).sum().backward()
        with pytest.raises(stepgraph.CaptureError, match=r"layer\.up.*print_shape") as raised:
            model["layer"](torch.ones(2, 8, device=device))
        assert raised.value.rule == "module-hook"


def test_hook_on_all_modules_of_the_process_keeps_calls_eager(device: torch.device) -> None:
    """torch's global hooks see every module; while one is set, nothing is replayed past it."""
    model = Net(Layer(), Layer()).to(device)
    x = torch.randn(4, 8, device=device)
    called: list[str] = []
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle:
        for _ in range(3):
            model(x).sum().backward()
        before = handle.report().replays
        hook = register_module_forward_hook(lambda module, args, result: called.append(type(module).__name__))
        try:
            model(x).sum().backward()
        finally:
            hook.remove()
        assert called.count("Linear") == 2 + 2 * 2
        assert handle.report().replays == before
        row = only_row(handle.report(), "layers.0")
        assert [reason for reason in row.eager_reasons if "a hook on all modules" in reason]
        model(x).sum().backward()
        assert handle.report().replays == before + 2
        assert handle.report().recaptures == 0
