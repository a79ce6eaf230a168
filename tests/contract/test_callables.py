"""`make_graphed_callables` without an order: a drop-in replacement, equal to eager, with none of the known traps."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.harness import assert_same_history
from tests.module_harness import Layer, Net, Training, training_of

WIDTH = 8


def sample(device: torch.device, *, grad: bool = True) -> tuple[torch.Tensor]:
    return (torch.randn(4, WIDTH, device=device, requires_grad=grad),)


def graph_layers(training: Training, device: torch.device, **options: Any) -> None:
    layers = tuple(training.model.layers)  # type: ignore[arg-type]
    stepgraph.make_graphed_callables(layers, tuple(sample(device) for _ in layers), **options)


def assert_equal(
    make: Callable[[], nn.Module],
    device: torch.device,
    graph: Callable[[Training, torch.device], None] = graph_layers,
    **options: Any,
) -> None:
    """Train twice from one seed, eager and graphed, and compare after every step."""
    torch.manual_seed(7)
    eager = training_of(make, device, **options)
    torch.manual_seed(11)
    expected = eager.run(device)
    torch.manual_seed(7)
    graphed = training_of(make, device, **options)
    graph(graphed, device)
    torch.manual_seed(11)
    assert_same_history(expected, graphed.run(device), "graphed differs from eager")
    assert stepgraph.engine.parts.callables.report(graphed.model.layers[0]).forwards >= 10  # type: ignore[index]


@pytest.mark.parametrize("zero", ["none", "zero", "never"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_callables_equal_eager(zero: str, microbatches: int, device: torch.device) -> None:
    """Trap: gradient accumulation from `.grad is None`, where a static gradient is overwritten and then added to."""
    assert_equal(lambda: Net(Layer(), Layer(), Layer()), device, zero=zero, microbatches=microbatches)


def test_callables_equal_eager_with_batch_norm(device: torch.device) -> None:
    assert_equal(lambda: Net(nn.BatchNorm1d(WIDTH), Layer(), nn.BatchNorm1d(WIDTH)), device)


def test_callables_equal_eager_under_autocast(device: torch.device) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return model(x).float()

    def graph(training: Training, device: torch.device) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            layers = tuple(training.model.layers)  # type: ignore[arg-type]
            bf16 = torch.randn(4, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
            stepgraph.make_graphed_callables(layers, tuple((bf16,) for _ in layers))

    assert_equal(lambda: Net(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), device, graph, call=call)


def test_callables_equal_eager_with_frozen_and_hooked_parameters(device: torch.device) -> None:
    seen: list[int] = []

    def make() -> nn.Module:
        net = Net(Layer(), Layer())
        net.layers[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
        net.layers[1].up.weight.register_hook(lambda grad: seen.append(1) or grad * 0.5)  # type: ignore[func-returns-value, union-attr]
        return net

    assert_equal(make, device)
    assert len(seen) == 16, "the hook runs at each backward, of both runs, and not in warm-up or capture"


def test_a_function_gives_gradients_to_what_it_closes_over(device: torch.device) -> None:
    torch.manual_seed(0)
    linear, weight = nn.Linear(WIDTH, WIDTH).to(device), nn.Parameter(torch.randn(WIDTH, device=device))
    twin, twin_weight = copy.deepcopy(linear), nn.Parameter(weight.detach().clone())

    def function(x: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        return {"hidden": torch.tanh(linear(x) * weight) * scale, "none": None, "three": 3}

    graphed = stepgraph.make_graphed_callables(function, (*sample(device), torch.ones((), device=device)))
    assert graphed is not function
    for _ in range(10):
        x, scale = torch.randn(4, WIDTH, device=device), torch.rand((), device=device)
        result = graphed(x, scale)
        assert set(result) == {"hidden", "none", "three"}
        assert (result["none"], result["three"]) == (None, 3)
        expected = torch.tanh(twin(x) * twin_weight) * scale
        assert torch.equal(result["hidden"], expected)
        result["hidden"].sum().backward()
        expected.sum().backward()
        for one, two in zip((*linear.parameters(), weight), (*twin.parameters(), twin_weight), strict=True):
            assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    graphed.reset()
    assert torch.equal(graphed(x, scale)["hidden"], function(x, scale)["hidden"])


def test_keyword_arguments_are_samples_too(device: torch.device) -> None:
    layer = Layer(dropout=0.0).to(device)
    mask = torch.randint(2, (4, WIDTH), device=device).float()
    stepgraph.make_graphed_callables(layer, sample(device), sample_kwargs={"mask": mask})
    for _ in range(3):
        x, mask = torch.randn(4, WIDTH, device=device), torch.rand(4, WIDTH, device=device)
        expected = type(layer).forward(layer, x, mask=mask)
        assert torch.equal(layer(x, mask=mask), expected)


def test_gradients_reach_the_arguments(device: torch.device) -> None:
    layer = Layer(dropout=0.0).to(device)
    twin = copy.deepcopy(layer)
    stepgraph.make_graphed_callables(layer, sample(device))
    for _ in range(3):
        x = torch.randn(4, WIDTH, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        layer(x * 2).sum().backward()
        twin(y * 2).sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_forward_is_replaced_while_the_training_flag_matches(device: torch.device) -> None:
    layer = Layer(dropout=0.5).to(device)
    assert stepgraph.make_graphed_callables(layer, sample(device)) is layer
    layer.eval()
    x = torch.randn(7, WIDTH, device=device)
    assert torch.equal(layer(x), type(layer).forward(layer, x))
    assert stepgraph.engine.parts.callables.report(layer).forwards == 0
    layer.train()
    layer.dropout.eval()  # a mode inside is a mode too
    layer(x)
    assert stepgraph.engine.parts.callables.report(layer).forwards == 0
    layer.train()
    layer(torch.randn(4, WIDTH, device=device))
    assert stepgraph.engine.parts.callables.report(layer).forwards == 1


def test_warm_up_and_capture_leave_no_trace(device: torch.device) -> None:
    """Trap: warm-up changes BatchNorm's statistics and the random state."""
    net = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device)
    net[1].weight.grad = torch.ones_like(net[1].weight)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    kept = x.detach().clone()
    generators = [torch.default_generator, *(torch.cuda.default_generators if device.type == "cuda" else ())]
    states = [generator.get_state() for generator in generators]
    stepgraph.make_graphed_callables(net, (x,), num_warmup_iters=5)
    now = [generator.get_state() for generator in generators]
    assert all(torch.equal(a, b) for a, b in zip(states, now, strict=True))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(net[1].weight.grad, torch.ones_like(net[1].weight))
    assert net[1].bias.grad is None
    assert net[0].weight.grad is None
    assert x.grad is None
    assert torch.equal(x.detach(), kept)


def test_results_stay_as_they_are(device: torch.device) -> None:
    """Trap: results overwritten by the next call."""
    layer = Layer().to(device)
    stepgraph.make_graphed_callables(layer, sample(device))
    held = []
    for _ in range(4):
        y = layer(torch.randn(4, WIDTH, device=device))
        y.sum().backward()
        held.append((y.detach(), y.detach().clone()))
    assert all(torch.equal(now, then) for now, then in held)


def test_a_backward_for_other_results_is_captured_when_it_comes(device: torch.device) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(x), self.two(x)

    net = Two().to(device)
    twin = copy.deepcopy(net)
    stepgraph.make_graphed_callables(net, sample(device))
    for index in (0, 1, 0, 1):
        x = torch.randn(4, WIDTH, device=device)
        for each in (net, twin):
            each.zero_grad()
            each(x)[index].sum().backward()
        for one, two in zip(net.parameters(), twin.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            assert one.grad is None or torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_a_second_backward_with_retain_graph(device: torch.device) -> None:
    layer = Layer(dropout=0.0).to(device)
    twin = copy.deepcopy(layer)
    stepgraph.make_graphed_callables(layer, sample(device))
    x = torch.randn(4, WIDTH, device=device)
    for each in (layer, twin):
        loss = each(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, two in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_evaluation_without_gradients_replays(device: torch.device) -> None:
    layer = Layer(dropout=0.0).to(device)
    stepgraph.make_graphed_callables(layer, sample(device))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, WIDTH, device=device)
            assert torch.equal(layer(x), type(layer).forward(layer, x))
    assert stepgraph.engine.parts.callables.report(layer).forwards == 3
    with torch.inference_mode():
        x = torch.randn(4, WIDTH, device=device)
        assert torch.equal(layer(x), type(layer).forward(layer, x))


def test_hooks_of_the_module_itself_run_around_the_replay(device: torch.device) -> None:
    layer = Layer(dropout=0.0).to(device)
    stepgraph.make_graphed_callables(layer, sample(device))
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer(torch.randn(4, WIDTH, device=device, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]


def test_reset_restores_the_forward(device: torch.device) -> None:
    """Trap: a reset that leaves the forward pointing at dead graphs. Graphs of the others go on."""
    first, second = Layer(dropout=0.0).to(device), Layer(dropout=0.0).to(device)
    stepgraph.make_graphed_callables((first, second), (sample(device), sample(device)))
    x = torch.randn(4, WIDTH, device=device)
    second(first(x)).sum().backward()
    first.reset()
    assert not {"forward", "reset"} & set(vars(first))
    second(first(x)).sum().backward()
    assert stepgraph.engine.parts.callables.report(second).forwards == 3
    second.reset()
    assert not {"forward", "reset"} & set(vars(second))
    stepgraph.make_graphed_callables(first, sample(device))  # and it can be captured again
    assert torch.equal(first(x), type(first).forward(first, x))


def test_a_copy_of_a_graphed_module_is_a_plain_one(device: torch.device) -> None:
    layer = Layer().to(device)
    stepgraph.make_graphed_callables(layer, sample(device))
    twin = copy.deepcopy(layer)
    assert not isinstance(twin.forward, type(layer.forward))
    twin.reset()  # there is nothing to reset
    assert isinstance(pickle.loads(pickle.dumps(layer)), Layer)
    assert stepgraph.engine.parts.callables.report(layer).num_graphs == 2
    assert set(layer.state_dict()) == set(twin.state_dict())


def test_a_module_that_has_a_reset_keeps_it(device: torch.device) -> None:
    class Counting(nn.Linear):
        def reset(self) -> str:
            return "mine"

    layer = Counting(WIDTH, WIDTH).to(device)
    stepgraph.make_graphed_callables(layer, sample(device))
    assert layer.reset() == "mine"
    layer.forward.reset()  # type: ignore[attr-defined]
    assert "forward" not in vars(layer)


def test_hooks_run_around_warm_up_and_capture_only(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    total = float(layer.weight.detach().sum())
    seen: list[str] = []

    def hook(word: str) -> Callable[[Any], None]:
        def noted(module: Any) -> None:
            assert module is layer
            assert float(layer.weight.detach().sum()) == total  # which no recording allows
            seen.append(word)

        return noted

    phases = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    stepgraph.make_graphed_callables(
        layer,
        sample(device),
        num_warmup_iters=2,
        capture_time_hooks=[{phase: {0: hook(phase)} for phase in phases}],
        pre_warmup_hook=lambda: seen.append("before"),
        post_warmup_hook=lambda: seen.append("after"),
    )
    assert seen == ["before", *phases, *phases, "after", *phases]
    layer(torch.randn(4, WIDTH, device=device)).sum().backward()
    assert len(seen) == 14


@pytest.mark.parametrize("order", [None, [1, -1]], ids=["plain", "ordered"])
def test_gradients_through_autograd_may_be_lent(order: list[float] | None, device: torch.device) -> None:
    """With clone_param_grads=False a hook that uses a gradient up at once sees it where it lies."""
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    twin = copy.deepcopy(layer)
    places: set[int] = set()

    def used_up(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        if weight is layer.weight:
            places.add(weight.grad.data_ptr())
        weight.main_grad += weight.grad  # type: ignore[attr-defined]
        weight.grad = None

    for each in (layer, twin):
        each.weight.main_grad = torch.zeros_like(each.weight)  # type: ignore[assignment]
        each.weight.register_post_accumulate_grad_hook(used_up)
    samples = sample(device) if order is None else (sample(device),)
    made = stepgraph.make_graphed_callables(layer, samples, order=order, clone_param_grads=False)
    graphed = made if order is None else made[0]
    noise = []
    for _ in range(5):
        x = torch.randn(4, WIDTH, device=device)
        for each in (graphed, twin):
            F.gelu(each(x)).sum().backward()
        assert torch.equal(layer.weight.main_grad, twin.weight.main_grad)  # type: ignore[arg-type]
        noise.append(torch.randn(WIDTH, WIDTH, device=device))  # a copy would be elsewhere each time
    assert len(places) == 1


def test_a_lent_gradient_that_is_kept_is_refused(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    kept: list[torch.Tensor] = []
    layer.weight.register_hook(lambda grad: kept.append(grad))
    stepgraph.make_graphed_callables(layer, sample(device), clone_param_grads=False)
    layer(torch.randn(4, WIDTH, device=device)).pow(2).sum().backward()
    with pytest.raises(stepgraph.CaptureError, match="held-gradient"):
        layer(torch.randn(4, WIDTH, device=device))
    kept.clear()
    layer.weight.grad = None
    layer(torch.randn(4, WIDTH, device=device)).pow(2).sum().backward()
