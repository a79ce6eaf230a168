"""Graphed modules that are compiled for real: what a compiler's backward does to its activations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stepgraph
from tests.module_harness import Layer, Net, assert_graphed_equals_eager, training_of

pytestmark = pytest.mark.gpu


def compiled_net() -> nn.Module:
    model = Net(Layer(dropout=0.0), Layer(dropout=0.0))
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("zero", ["none", "never"])
def test_compiled_modules_are_replayed_and_equal_eager(zero: str) -> None:
    report = assert_graphed_equals_eager(
        lambda device: training_of(compiled_net, device, microbatches=2, zero=zero), torch.device("cuda")
    )
    assert report.eager_calls == 2 * 3


def test_compiled_module_refuses_a_second_backward_as_eager_does() -> None:
    model, x = compiled_net().cuda(), torch.randn(4, 8, device="cuda")
    model(x).sum().backward()  # compiles the backward; one that comes with retain_graph first is compiled for that
    with pytest.raises(RuntimeError, match="retain_graph"):
        model(x).sum().backward(retain_graph=True)
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle:
        for _ in range(3):
            model(x).sum().backward()
        assert handle.report().replays > 0
        with pytest.raises(RuntimeError, match="retain_graph"):
            model(x).sum().backward(retain_graph=True)
        model(x).sum().backward()
