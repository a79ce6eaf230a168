"""Megatron's names, called as Megatron calls them, equal to eager bit for bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.lab.models import GPT, GPTConfig
from tests.module_harness import Layer, Net, same_bits

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


# -- OptimizerCudaGraphWrapper

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def optimizer_losses(make: Any, device: torch.device, wrap: Any, *, set_to_none: bool = False) -> list[torch.Tensor]:
    """Train two models with an optimizer each, under changing learning rates; all parameters afterwards."""
    torch.manual_seed(0)
    models = [Managed().to(device) for _ in range(2)]
    optimizers = [make(model.parameters()) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    steps = [wrap(optimizer) for optimizer in optimizers]
    for _ in range(7):
        for model, optimizer, scheduler, step in zip(models, optimizers, schedulers, steps, strict=True):
            model(torch.randn(4, 8, device=device)).pow(2).mean().backward()
            step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return [parameter.detach() for model in models for parameter in model.parameters()]


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("installed", [False, True], ids=["beside", "installed"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_wrapper_is_equal_to_eager(
    kind: str, installed: bool, set_to_none: bool, device: torch.device
) -> None:
    """Two wrappers in one process, each with graphs of its own."""
    wrappers: list[Any] = []

    def wrap(optimizer: Any) -> Callable[[], Any]:
        wrapper = stepgraph.OptimizerCudaGraphWrapper(optimizer.step, 2, True)
        wrappers.append(wrapper)
        if not installed:
            return wrapper
        optimizer.step = wrapper
        return lambda: optimizer.step()

    make = OPTIMIZERS[kind]
    expected = optimizer_losses(make, device, lambda optimizer: lambda: optimizer.step(), set_to_none=set_to_none)
    found = optimizer_losses(make, device, wrap, set_to_none=set_to_none)
    assert all(map(same_bits, expected, found))
    for wrapper in wrappers:
        report = wrapper.report()
        assert report.replays >= 3
        assert report.eager_calls + report.replays == 7
        assert not any("replaced" in where for where in report.optimizers.values())
        wrapper.reset()
        assert wrapper.report().graphs == 0
        wrapper.close()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_optimizer_wrapper_holds_the_optimizer(set_to_none: bool, device: torch.device) -> None:
    """With the step inside the graph, gradients are read wherever they are, and the result is the step's."""
    models = [Managed().to(device).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    wrapper = stepgraph.OptimizerCudaGraphWrapper(optimizers[1].step)
    optimizers[1].step = wrapper  # type: ignore[method-assign]
    held = []
    for _ in range(6):
        x = torch.randn(4, 8, device=device)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(x).pow(2).mean().backward()
            assert optimizer.step() is None
            held.append([parameter.grad for parameter in model.parameters()])  # new memory at each step
        assert all(map(same_bits, models[0].parameters(), models[1].parameters()))
    assert wrapper.report().optimizers == {"SGD": "inside the graph (SGD uses no step count)"}
    wrapper.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda step: step(lambda: 1.0), "with arguments: function"),
        (lambda step: step(closure=None), "with arguments: closure="),
        (lambda step: stepgraph.OptimizerCudaGraphWrapper(None), "cannot be called"),
        (lambda step: stepgraph.OptimizerCudaGraphWrapper(step, -1), "cuda_graph_warmup_steps=-1"),
        (lambda step: stepgraph.OptimizerCudaGraphWrapper(step, 1, "yes"), "use_single_mempool='yes'"),
    ],
)
def test_optimizer_wrapper_refuses_other_uses(wrong: Callable[[Any], Any], message: str) -> None:
    optimizer = torch.optim.SGD(Managed().parameters(), lr=0.1)
    with pytest.raises(stepgraph.InvalidArgument, match=message):
        wrong(stepgraph.OptimizerCudaGraphWrapper(optimizer.step))


# -- FullCudaGraphWrapper


def iteration(*, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool, **rest: Any) -> Any:
    """Forward and backward of all microbatches."""
    losses = []
    for _ in range(num_microbatches):
        loss = model(next(data_iterator)["x"]).pow(2).mean()
        if not forward_only:
            loss.backward()
        losses.append(loss.detach())
    return losses


def test_wrapper_resets_the_graphs_of_one_stage(device: torch.device) -> None:
    model, wrapped = Managed().to(device), stepgraph.FullCudaGraphWrapper(iteration, 1, True)

    def run(forward_only: bool, times: int = 4) -> int:
        before = wrapped.report().replays
        for _ in range(times):
            microbatches = [{"x": torch.randn(4, 8, device=device)} for _ in range(2)]
            call = {"model": model, "num_microbatches": 2, "forward_only": forward_only}
            torch.manual_seed(1)
            with torch.set_grad_enabled(not forward_only):
                expected = iteration(data_iterator=iter(microbatches), **call)
                torch.manual_seed(1)
                found = wrapped(forward_step_func=len, data_iterator=iter(microbatches), **call)
            assert all(map(same_bits, expected, found))
            model.zero_grad()
        return wrapped.report().replays - before

    replays = {forward_only: run(forward_only) for forward_only in (False, True)}
    assert all(0 < count < 4 for count in replays.values())
    held = wrapped.report().static_bytes
    wrapped.reset_cuda_graph("validation")
    assert wrapped.report().graphs == 1
    assert wrapped.report().static_bytes == held  # both stages read the same buffers
    assert (run(False), run(True)) == (4, replays[True])
    wrapped.reset_cuda_graph(stage="training")
    assert (run(True), run(False)) == (4, replays[False])
    wrapped.reset_cuda_graph("training")
    wrapped.reset_cuda_graph("validation")
    assert (wrapped.report().graphs, wrapped.report().static_bytes) == (0, 0)
    assert run(False) == replays[False]
    wrapped.reset_cuda_graph()
    assert (wrapped.report().graphs, wrapped.report().static_bytes) == (0, 0)
    with pytest.raises(stepgraph.InvalidArgument, match="mean 'training'"):
        wrapped.reset_cuda_graph("train")
    wrapped.close()


# -- the words of a configuration

TINY = replace(GPTConfig.tiny(), hidden_size=32, ffn_size=32)
LAYERS, ATTENTION = ["blocks.0", "blocks.1"], ["blocks.0.attn", "blocks.1.attn"]


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({}, LAYERS),
        ({"cuda_graph_modules": "full"}, LAYERS),
        ({"cuda_graph_scope": "full"}, LAYERS),
        ({"cuda_graph_modules": []}, LAYERS),
        ({"cuda_graph_modules": ["attn"]}, ATTENTION),
        ({"cuda_graph_modules": ["attn"], "cuda_graph_scope": "full"}, ATTENTION),
        ({"cuda_graph_impl": "none", "cuda_graph_modules": ["attn"]}, []),
    ],
)
@pytest.mark.parametrize("engine", ["graph_modules", "helper"])
def test_engines_capture_what_megatron_captures(
    engine: str, fields: dict[str, Any], paths: list[str], device: torch.device
) -> None:
    """Trap: the renamed scope was not read, and whole layers were captured; "none" was captured too."""
    config = SimpleNamespace(**{**vars(CONFIG), "cuda_graph_warmup_steps": 1, "hidden_size": TINY.hidden_size} | fields)
    model = GPT(TINY).to(device)
    tokens = torch.randint(TINY.vocab_size, (1, 9), device=device)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()

    if engine == "helper":
        helper = stepgraph.TECudaGraphHelper(model, config, 8, 1)
        helper.create_cudagraphs()
        assert (helper.paths, helper.capture_finished(), helper.graphs_created()) == (paths, True, bool(paths))
        stepgraph.set_current_microbatch(model, 0)
        step()
        assert helper.report().forwards == len(paths)
        helper.delete_cuda_graphs()
        return
    with stepgraph.graph_modules(model, config=config) as handle:
        for _ in range(3):
            step()
        report = handle.report()
        assert [row.path for row in report.rows if row.runners] == paths
        assert report.replays == 2 * len(paths)
        if not paths:
            assert all(row.eager_reasons == {"cuda_graph_impl is 'none'": 3} for row in report.rows)


def test_manager_of_impl_none_counts_its_eager_calls(device: torch.device) -> None:
    config = SimpleNamespace(cuda_graph_impl="none", cuda_graph_modules=["attn"])
    eager, managed = pair(config, device, inline_capture=True)
    assert_equal_steps(eager, managed, device, 3)
    stepgraph.create_cudagraphs()
    report = managed.cudagraph_manager.report()
    assert (report.graphs, report.rows[0].eager_reasons) == (0, {"cuda_graph_impl is 'none'": 3})


# -- static buffers


@pytest.mark.parametrize("single_mempool", [False, True])
def test_static_buffers_list_the_edges_of_the_graphs(single_mempool: bool, device: torch.device) -> None:
    """Two layers in a row with one mask: what is between them is the first one's result and the second's argument."""
    model = Net(Layer(), Layer()).to(device)
    mask = torch.ones(4, 8, device=device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1, single_mempool=single_mempool) as handle:
        assert handle.static_buffers() == []
        for _ in range(3):
            x = torch.randn(4, 8, device=device)
            model(x, mask).sum().backward()
        buffers = handle.static_buffers()
        counts = [(b.is_cudagraph_input, b.is_cudagraph_output, b.input_use_count) for b in buffers]
        assert sorted(counts) == [(False, True, 0), (True, False, 1), (True, False, 2), (True, True, 1)]
        assert [b.cudagraph_reuse_ref_count for b in buffers] == [int(all(kinds[:2])) for kinds in counts]
        for buffer, (_, _, uses) in zip(buffers, counts, strict=True):
            assert (buffer.bwd_cudagraph_buffer is None) is (uses == 2)  # the mask
            assert buffer.fwd_cudagraph_buffer is not None
            assert buffer.fwd_cudagraph_buffer.shape == (4, 8)
            assert buffer.capture_reuse_count == 0
            if uses == 2:
                assert same_bits(buffer.fwd_cudagraph_buffer, mask)
        handle.reset()
        assert handle.static_buffers() == []
