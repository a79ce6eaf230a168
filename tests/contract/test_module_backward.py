"""Kinds of backward through graphed modules: again, in part, with a graph of its own, broken off, never."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.module_harness import Layer, Net, Note, Training, assert_graphed_equals_eager, training_of


def two_layers() -> nn.Module:
    return Net(Layer(), Layer())


def test_backward_twice_with_retain_graph(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(two_layers, device, microbatches=2)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(training.model(x).pow(2).mean() for x in batch.unbind(0))
            loss.backward(retain_graph=True)
            note(loss)
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


def graphed_layer(device: torch.device, calls: int = 3) -> tuple[nn.Module, stepgraph.GraphedModules]:
    """A layer that replays from now on."""
    model = nn.ModuleDict({"layer": nn.Linear(4, 4)}).to(device)
    handle = stepgraph.graph_modules(model, "layer", warmup=1)
    for _ in range(calls):
        model["layer"](torch.ones(2, 4, device=device, requires_grad=True)).sum().backward()
    assert handle.report().replays == calls - 1
    return model["layer"], handle


def test_backward_a_second_time_without_retain_graph_is_refused(device: torch.device) -> None:
    layer, handle = graphed_layer(device)
    with handle:
        result = layer(torch.ones(2, 4, device=device, requires_grad=True)).sum()
        result.backward()
        with pytest.raises(RuntimeError, match="second time"):
            result.backward()


def test_backward_after_another_call_is_right_with_retain_graph(device: torch.device) -> None:
    """Activations that a second backward may need stay, whatever is called in between."""

    def build(device: torch.device) -> Training:
        training = training_of(two_layers, device, microbatches=2)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            first = training.model(batch[0]).pow(2).mean()
            first.backward(retain_graph=True)
            note(first)
            second = training.model(batch[1]).pow(2).mean()
            second.backward()
            note(second)
            first.backward()
            note(first)
            optimizer.step()
            return second.detach()

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


def test_backward_with_create_graph_is_refused(device: torch.device) -> None:
    """Trap: a gradient penalty that silently vanishes."""
    layer, handle = graphed_layer(device)
    with handle:
        x = torch.ones(2, 4, device=device, requires_grad=True)
        with pytest.raises(stepgraph.CaptureError, match="create_graph=True") as raised:
            layer(x).pow(2).sum().backward(create_graph=True)
        assert raised.value.rule == "create-graph"
    (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    assert grad.requires_grad, "closed, the layer is eager again"


@pytest.mark.parametrize("how", ["autograd.grad", "backward(inputs=)"])
def test_backward_for_some_tensors_only_is_refused(how: str, device: torch.device) -> None:
    layer, handle = graphed_layer(device)
    with handle:
        x = torch.ones(2, 4, device=device, requires_grad=True)
        before = layer.weight.grad.clone()
        with pytest.raises(stepgraph.CaptureError, match=r"inputs=") as raised:
            if how == "autograd.grad":
                torch.autograd.grad(layer(x).sum(), x)
            else:
                layer(x).sum().backward(inputs=[x])
        assert raised.value.rule == "partial-backward"
        assert torch.equal(layer.weight.grad, before)


def test_backward_of_nothing_gives_nothing(device: torch.device) -> None:
    """A gradient that is None for all results, as a function downstream may return."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    layer, handle = graphed_layer(device)
    with handle:
        layer.weight.grad = None
        x = torch.ones(2, 4, device=device, requires_grad=True)
        Stop.apply(layer(x)).sum().backward()
        assert layer.weight.grad is None
        assert x.grad is None


def test_results_dropped_without_a_backward_free_the_runner(device: torch.device) -> None:
    layer, handle = graphed_layer(device)
    with handle:
        x = torch.ones(2, 4, device=device, requires_grad=True)
        for _ in range(5):
            layer(x)
        assert handle.report().graphs == 1
        for _ in range(3):
            kept = [layer(x) for _ in range(3)]
            assert len(kept) == 3
            assert handle.report().graphs == 3
            del kept


def test_backward_failure_leaves_gradients_that_can_be_cleared(device: torch.device) -> None:
    """An error in the middle of a backward: after zero_grad() all is as in eager."""

    def build(device: torch.device) -> Training:
        training = training_of(two_layers, device, steps=14)
        inner = training.step

        def fail(grad: torch.Tensor) -> None:
            raise ArithmeticError("in a hook")

        def step(batch: torch.Tensor, note: Note) -> Any:
            hidden = training.model.layers[0](training.model.embed(batch[0]))
            hidden.register_hook(fail)
            with pytest.raises(ArithmeticError, match="in a hook"):
                F.gelu(training.model.layers[1](hidden)).sum().backward()
            del hidden
            return inner(batch, note)

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)
