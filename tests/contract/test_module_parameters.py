"""Parameters that more happens to than accumulation: hooks, `main_grad`, DDP-like readiness, routers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.module_harness import Layer, Net, Note, Training, assert_graphed_equals_eager, same_bits, training_of


def hooked_training(
    device: torch.device, hook_up: Callable[[nn.Module, list[Any]], None], *, late: int | None = None, **options: Any
) -> Training:
    """A training whose hooks write down what they see; set from the start, or before a later step."""
    training = training_of(lambda: Net(Layer(), Layer()), device, microbatches=2, steps=12, **options)
    seen: list[Any] = []
    inner = training.step

    def step(batch: torch.Tensor, note: Note) -> Any:
        seen.clear()
        result = inner(batch, note)
        return [result, *seen]

    def before_step(index: int) -> None:
        if index == (late or 0):
            hook_up(training.model, seen)

    training.step, training.before_step = step, before_step
    return training


def tensor_hooks(model: nn.Module, seen: list[Any]) -> None:
    def doubled(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.clone())
        return grad * 2

    model.layers[0].up.weight.register_hook(doubled)
    model.layers[1].norm.bias.register_hook(lambda grad: seen.append(grad.clone()))


def post_accumulate_hooks(model: nn.Module, seen: list[Any]) -> None:
    for layer in model.layers:
        layer.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


@pytest.mark.pairwise
@pytest.mark.parametrize("late", [None, 5], ids=["from the start", "later"])
@pytest.mark.parametrize("hook_up", [tensor_hooks, post_accumulate_hooks])
@pytest.mark.parametrize("zero", ["none", "never"])
def test_parameter_hooks_run_and_see_the_right_value(
    zero: str, hook_up: Any, late: int | None, device: torch.device
) -> None:
    """Once for each backward, with the gradient that eager shows them, and what they return counts."""
    report = assert_graphed_equals_eager(lambda device: hooked_training(device, hook_up, late=late, zero=zero), device)
    assert (report.recaptures > 0) == (late is not None)


def test_parameter_hook_that_steps_its_optimizer_in_the_backward(device: torch.device) -> None:
    """An optimizer fused into the backward: each parameter is updated as soon as its gradient is there."""

    def build(device: torch.device) -> Training:
        model = Net(Layer(), Layer()).to(device)
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        def step(x: torch.Tensor, note: Note) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            note(loss)
            return loss.detach()

        batches = [torch.randn(4, 8, device=device) for _ in range(12)]
        return Training(model, step, batches, list(optimizers.values()))

    assert_graphed_equals_eager(build, device)


# -- main_grad


class FusedLinear(torch.autograd.Function):
    """Adds the weight's gradient to `main_grad` in its backward, and hands autograd a stand-in or nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dummy: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dummy = dummy
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.T @ x)
        weight.grad_added_to_main_grad = True
        return grad @ weight, (torch.zeros_like(weight) if ctx.dummy else None), None


class Fused(nn.Module):
    def __init__(self, dummy: bool) -> None:
        super().__init__()
        self.weight, self.norm, self._dummy = nn.Parameter(torch.randn(8, 8)), nn.LayerNorm(8), dummy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FusedLinear.apply(self.norm(x), self.weight, self._dummy)


def with_main_grad(model: nn.Module, hook: bool) -> list[torch.Tensor]:
    """Give each parameter a `main_grad`, and, as such frameworks do, a hook that moves `.grad` there."""

    def move(parameter: Any) -> None:
        if not getattr(parameter, "grad_added_to_main_grad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad_added_to_main_grad = False
        parameter.grad = None

    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        if hook:
            parameter.register_post_accumulate_grad_hook(move)
    return [parameter.main_grad for parameter in model.parameters()]


def main_grad_training(device: torch.device, make: Callable[[], nn.Module], hook: bool) -> Training:
    model = make().to(device)
    main_grads = with_main_grad(model, hook)

    def step(batch: torch.Tensor, note: Note) -> list[torch.Tensor]:
        for grad in main_grads:
            grad.zero_()
        for x in batch.unbind(0):
            model(x).pow(2).mean().backward()
            note(main_grads)
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), main_grads, strict=True):
                parameter -= 0.05 * grad
        flags = [getattr(parameter, "grad_added_to_main_grad", None) for parameter in model.parameters()]
        return [*(grad.clone() for grad in main_grads), *flags]

    batches = [torch.randn(2, 4, 8, device=device) for _ in range(12)]
    return Training(model, step, batches, tensors=main_grads)


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("hook", [False, True])
def test_main_grad_written_by_the_backward_itself(hook: bool, dummy: bool, device: torch.device) -> None:
    """Fused accumulation is inside the graph; flags that the backward sets are set, before the hooks run."""
    assert_graphed_equals_eager(
        lambda device: main_grad_training(device, lambda: Net(Fused(dummy), Layer(), Fused(dummy)), hook), device
    )


def test_main_grad_moved_to_by_a_hook(device: torch.device) -> None:
    assert_graphed_equals_eager(lambda device: main_grad_training(device, lambda: Net(Layer(), Layer()), True), device)


# -- what a graph must leave alone


class Expert(nn.Module):
    """A layer with a router that is graphed alone; the experts stay eager, and read counts on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(x)
        return hidden, self.gate(hidden).softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, weights = self.route(x)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(hidden[rows]) * weights[rows, index : index + 1])
        return x + out


@pytest.mark.parametrize("zero", ["none", "never"])
def test_router_alone_touches_only_its_own_gradients(zero: str, device: torch.device) -> None:
    """Trap: capturing a router clones the gradients of the whole layer."""

    def look(handle: stepgraph.GraphedModules, training: Training) -> None:
        for manager in handle._shared.managers:
            (part,) = {
                id(b): b.accumulated
                for site in manager.sites.values()
                for r in site.runners
                for b in r.backwards.values()
            }.values()
            layer = manager.module
            own = [*layer.norm.parameters(), *layer.gate.parameters()]
            assert {id(p) for p, _ in part._pairs} == set(map(id, own))

    report = assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(Expert(), Expert()), device, microbatches=2, zero=zero),
        device,
        "layers.*.route",
        look=look,
    )
    assert all(row.backwards > 0 for row in report.rows)


class TwoMethods(nn.Module):
    """Two methods of one module, graphed each, which share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x).tanh()

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.shared(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("zero", ["none", "never"])
def test_parameter_of_two_graphed_methods_of_one_module(zero: str, device: torch.device) -> None:
    """Each adds to it in one backward; the sum is what is added to an old gradient."""
    assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(TwoMethods()), device, microbatches=2, zero=zero),
        device,
        ["layers.0.first", "layers.0.second"],
    )


def test_backward_that_fails_between_two_uses_of_a_parameter(device: torch.device) -> None:
    """The old gradient, put aside for the sum, is there again; eager would not have touched it either."""
    model = nn.ModuleDict({"layer": nn.Linear(4, 4)}).to(device)
    layer, x = model["layer"], torch.ones(2, 4, device=device)

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    def use(fails: bool) -> None:
        one, two = layer(x).exp(), layer(2 * x).exp()
        if fails:
            one.register_hook(fail)
        (one.sum() + two.sum()).backward()

    with stepgraph.graph_modules(model, "layer", warmup=1) as handle:
        for _ in range(4):
            use(fails=False)
        assert handle.report().replays > 0
        before = layer.weight.grad.clone()
        with pytest.raises(ArithmeticError):
            use(fails=True)
        use(fails=False)
        after = layer.weight.grad.clone()
        layer.zero_grad()
        use(fails=False)
        assert same_bits(after, before + layer.weight.grad)
