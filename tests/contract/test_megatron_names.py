"""Megatron's names, called as Megatron calls them, equal to eager bit for bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.module_harness import same_bits

CONFIG = SimpleNamespace(cuda_graph_impl="local", cuda_graph_warmup_steps=2, use_te_rng_tracker=True)


class Managed(nn.Module):
    """A layer that passes its calls to a manager, as Megatron's layers do."""

    def __init__(self, config: Any = None, **options: Any) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.25)
        self.cudagraph_manager: Any = None
        if config is not None:
            self.cudagraph_manager = stepgraph.CudaGraphManager(config, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.cudagraph_manager is not None:
            return self.cudagraph_manager(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(torch.tanh(self.linear(x)))

    def halve(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.linear(x) / 2,)


def pair(config: Any, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """An eager layer and a managed one with the same parameters."""
    eager, managed = Managed().to(device), Managed(config, **options).to(device)
    managed.load_state_dict(eager.state_dict())
    return eager, managed


def assert_equal_steps(eager: Any, graphed: Any, device: torch.device, steps: int = 6) -> None:
    """Results, gradients and random state of some steps are equal."""
    histories = []
    for layer in (eager, graphed):
        torch.manual_seed(3)
        seen = []
        for step in range(steps):
            x = torch.randn(4, 8, device=device, requires_grad=True)
            y = layer(x, scale=2.0)
            y.pow(2).sum().backward()
            seen += [y.detach().clone(), x.grad, layer.linear.weight.grad.clone(), torch.rand(1, device=device)]
            if step % 2:
                layer.zero_grad()
        histories.append(seen)
    assert all(map(same_bits, *histories))


# -- CudaGraphManager


def test_manager_is_given_module_and_arguments(device: torch.device) -> None:
    eager, managed = pair(CONFIG, device)
    assert_equal_steps(eager, managed, device)
    row = managed.cudagraph_manager.report().rows[0]
    assert (row.forwards, row.backwards, row.eager_reasons, row.recapture_reasons) == (4, 4, {"warm-up": 2}, {})
    assert "forward" not in vars(managed)
    managed.cudagraph_manager.reset()
    assert managed.cudagraph_manager.report().graphs == 0
    assert_equal_steps(eager, managed, device, 3)
    managed.cudagraph_manager.close()
    assert_equal_steps(eager, managed, device, 3)
    assert "closed" in repr(managed.cudagraph_manager)


def test_manager_runs_the_hooks_of_the_module(device: torch.device) -> None:
    eager, managed = pair(CONFIG, device)
    called: dict[str, list[str]] = {"eager": [], "managed": []}
    for name, layer in (("eager", eager), ("managed", managed)):
        notes = called[name]
        layer.register_forward_pre_hook(lambda module, args, notes=notes: notes.append("before"))
        layer.register_forward_hook(lambda module, args, result, notes=notes: notes.append("after"))
        layer.register_full_backward_hook(lambda module, grads, received, notes=notes: notes.append("backward"))
    assert_equal_steps(eager, managed, device)
    assert called["eager"] == called["managed"]
    assert managed.cudagraph_manager.report().replays == 4
    managed.cudagraph_manager.close()


def test_managers_of_one_session_share_an_order(device: torch.device) -> None:
    first = Managed(CONFIG).to(device)
    second = Managed(CONFIG, session=first.cudagraph_manager.session).to(device)
    eager = copy.deepcopy(nn.Sequential(first, second))
    for layer in eager:
        layer.cudagraph_manager = None
    for model in (eager, [first, second]):
        torch.manual_seed(5)
        for _ in range(4):
            x = torch.randn(4, 8, device=device)
            for layer in model:
                x = layer(x)
            x.sum().backward()
    assert same_bits(eager[0].linear.weight.grad, first.linear.weight.grad)
    assert [row.forwards for row in second.cudagraph_manager.report().rows] == [2, 2]
    first.cudagraph_manager.close()


@pytest.mark.parametrize("name", ["forward", "halve"])
def test_manager_takes_the_place_of_a_method(name: str, device: torch.device) -> None:
    eager, graphed = Managed().to(device).eval(), Managed().to(device).eval()
    graphed.load_state_dict(eager.state_dict())
    manager = stepgraph.CudaGraphManager(CONFIG, base_module=graphed, function_name=name)
    x = torch.randn(4, 8, device=device)
    for _ in range(5):
        expected, found = getattr(eager, name)(x), getattr(graphed, name)(x)
        assert type(found) is type(expected)
        assert same_bits(*(y[0] if name == "halve" else y for y in (expected, found)))
        found = manager(graphed, (x,), {}, cache_key=("kind", 1))
        (found[0] if name == "halve" else found).sum().backward()
    row = manager.report().rows[0]
    assert row.forwards > 0
    total = row.forwards + row.eager_calls
    getattr(graphed, name)(x, eager=True)
    row = manager.report().rows[0]
    assert row.forwards + row.eager_calls == total
    with pytest.raises(stepgraph.InvalidArgument, match="another module"):
        manager(eager, (x,), {})
    with pytest.raises(stepgraph.InvalidArgument, match="graphed already"):
        stepgraph.CudaGraphManager(CONFIG, graphed, name)
    manager.close()
    assert name not in vars(graphed)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("way", ["kept", "installed"])
def test_copy_of_a_managed_layer_has_its_own_graphs(
    way: str, copied: Callable[[Any], Any], when: str, device: torch.device
) -> None:
    eager, managed = pair(CONFIG if way == "kept" else None, device)
    if way == "installed":
        managed.kept = stepgraph.CudaGraphManager(CONFIG, managed, "forward")
    if when == "after":
        assert_equal_steps(eager, managed, device, 4)
    made = copied(managed)
    eager.zero_grad()
    made.zero_grad()
    assert_equal_steps(eager, made, device, 4)
    manager = made.cudagraph_manager if way == "kept" else made.kept
    assert manager is not (managed.cudagraph_manager if way == "kept" else managed.kept)
    assert sum(row.forwards for row in manager.report().rows) == (2 if way == "kept" else 0)


@pytest.mark.parametrize("graded", [True, False], ids=["with backward", "without"])
def test_manager_captures_inline_after_one_call(graded: bool, device: torch.device) -> None:
    """Without a backward to wait for, the graph is there when the first call returns."""
    config = SimpleNamespace(cuda_graph_impl="local", cuda_graph_warmup_steps=5, use_te_rng_tracker=True)
    eager, managed = pair(config, device, inline_capture=True, need_backward=graded)
    manager = managed.cudagraph_manager
    graphs = []
    for step in range(3):
        x = torch.randn(4, 8, device=device)
        results = []
        for layer in (eager, managed):
            torch.manual_seed(step)
            results.append(layer(x))
        assert same_bits(*(y.detach() for y in results))
        graphs.append(manager.report().graphs)
        if graded:
            for y in results:
                y.sum().backward()
    assert graphs == ([0, 1, 1] if graded else [1, 1, 1])
    assert manager.report().rows[0].eager_reasons["warm-up"] == 1
    manager.close()


@pytest.mark.parametrize(("given", "warmup"), [({}, 2), ({"num_warmup_steps": 4}, 4), ({"num_warmup_steps": 0}, 1)])
def test_manager_warm_up_can_be_overridden(given: dict[str, int], warmup: int, device: torch.device) -> None:
    """An engine that captures from a recorded call needs one; 0 is read as 1, with a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager, managed = pair(CONFIG, device, **given)
    assert [w.category for w in caught] == [stepgraph.StepgraphWarning] * (given.get("num_warmup_steps") == 0)
    assert_equal_steps(eager, managed, device)
    assert managed.cudagraph_manager.report().rows[0].eager_reasons["warm-up"] == warmup
    managed.cudagraph_manager.close()


class Confused(Managed):
    def forward(self, x: torch.Tensor, eager: bool = False) -> Any:  # type: ignore[override]
        return self.cudagraph_manager(self, (x,), {})


def as_forward(layer: Any) -> None:
    layer.forward = stepgraph.CudaGraphManager(CONFIG, base_module=layer)
    layer(torch.ones(4, 8))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (as_forward, r'called with a Tensor[\s\S]*function_name="forward"'),
        (lambda layer: layer.cudagraph_manager(layer), "called with a Managed"),
        (lambda layer: layer.cudagraph_manager(x=1), "called with no module"),
        (lambda layer: stepgraph.CudaGraphManager(CONFIG, None, "forward"), "base_module=None"),
        (lambda layer: stepgraph.CudaGraphManager(CONFIG, layer, "foward"), "mean 'forward'"),
        (lambda layer: stepgraph.CudaGraphManager(CONFIG, Confused(), "forward"), "parameter `eager`"),
        (lambda layer: Confused(CONFIG)(torch.ones(4, 8)), "calls the manager"),
        (lambda layer: stepgraph.CudaGraphManager(CONFIG, num_warmup_steps=-1), "num_warmup_steps=-1"),
    ],
)
def test_manager_refuses_other_uses(wrong: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match=message) as raised:
        wrong(Managed(CONFIG))
    assert raised.value.rule == "option"
    assert raised.value.fix
