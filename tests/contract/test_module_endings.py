"""The end of graphed modules: closed, copied, saved, dropped. Nothing of the graphs stays behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from tests.module_harness import Layer, Net, same_bits, train


def test_close_leaves_the_modules_as_they_were(device: torch.device) -> None:
    model = Net(Layer(), Layer()).to(device)
    own = model.layers[1].forward
    model.layers[1].forward = own  # a user's own attribute stays theirs
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    names = list(model.state_dict())
    handle = stepgraph.graph_modules(model, "layers.*", warmup=1)
    assert isinstance(model.layers[0].forward, ModuleGraphs)
    assert list(model.state_dict()) == names
    train(model, device)
    handle.close()
    handle.close()
    assert "forward" not in vars(model.layers[0])
    assert model.layers[1].forward is own
    assert {path: list(vars(module)) for path, module in model.named_modules()} == {
        k: list(v) for k, v in before.items()
    }
    assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())
    assert handle.report().graphs == 0
    train(model, device)


def test_gradients_and_results_outlive_a_close(device: torch.device) -> None:
    model = Net(Layer(dropout=0.0)).to(device)
    eager = copy.deepcopy(model)
    x = torch.ones(4, 8, device=device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1):
        train(model, device)
        train(eager, device)
        kept = model.layers[0](x)
    gc.collect()
    assert same_bits(kept, eager.layers[0](x))
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    train(model, device)
    train(eager, device)
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_copy_of_a_graphed_model_is_a_plain_model(how: str, when: str, device: torch.device) -> None:
    """It shares nothing with the original, has no graphs, and can be graphed itself."""
    model = Net(Layer(dropout=0.0), Layer(dropout=0.0)).to(device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle:
        if when == "after":
            train(model, device)
        if how == "deepcopy":
            made = copy.deepcopy(model)
        elif how == "pickle":
            made = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            made = torch.load(file, weights_only=False)
        graphs = handle.report().graphs
        model.zero_grad()
        made.zero_grad()
        for layer in made.layers:
            assert not isinstance(layer.forward, ModuleGraphs)
            assert layer.forward.__self__ is layer
        with torch.no_grad():
            for p, q in zip(model.parameters(), made.parameters(), strict=True):
                assert p is not q
                q.mul_(0.5)
        expected = Net(Layer(dropout=0.0), Layer(dropout=0.0)).to(device)
        expected.load_state_dict(made.state_dict())
        assert all(map(same_bits, train(expected, device), train(made, device)))
        assert handle.report().graphs == graphs
        with stepgraph.graph_modules(made, "layers.*", warmup=1) as other:
            assert all(map(same_bits, train(expected, device), train(made, device)))
            assert other.report().replays == 4


def test_model_that_is_dropped_is_freed_with_its_graphs(device: torch.device) -> None:
    """Dropping the handle keeps the graphs; dropping the model frees everything."""
    model = Net(Layer(), Layer()).to(device)
    handle = stepgraph.graph_modules(model, "layers.*", warmup=1)
    train(model, device)
    shared = weakref.ref(handle._shared)
    freed = [weakref.ref(runner) for m in handle._shared.managers for s in m.sites.values() for runner in s.runners]
    assert len(freed) == 2
    del handle
    gc.collect()
    assert all(runner() is not None for runner in freed)
    train(model, device)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert shared() is None
    assert all(runner() is None for runner in freed)


def test_runners_of_a_reset_are_freed(device: torch.device) -> None:
    """Nothing of a dropped graph stays: no activations behind a cycle that the collector cannot see."""
    model = Net(Layer(), Layer()).to(device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle:
        freed: list[Any] = []
        for _ in range(3):
            train(model, device)
            gc.collect()
            assert not [ref for ref in freed if ref() is not None]
            for manager in handle._shared.managers:
                for runner in [runner for site in manager.sites.values() for runner in site.runners]:
                    result = runner.result.tensors[0]
                    freed += [weakref.ref(runner), weakref.ref(result.untyped_storage())]
                    del runner, result
            handle.reset()
        assert len(freed) == 12
        assert handle._shared.session._resources.graphs == []
