"""Gradients of graphed modules: after every backward they are eager's, bit for bit, and nobody's static memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.module_harness import Layer, Net, Note, Training, assert_graphed_equals_eager, same_bits, training_of


def two_layers() -> nn.Module:
    return Net(Layer(), Layer())


@pytest.mark.parametrize("zero", ["none", "zero", "never"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_accumulate_as_in_eager(zero: str, microbatches: int, device: torch.device) -> None:
    """From None, from zero, on top of what is there; one microbatch and several."""
    report = assert_graphed_equals_eager(
        lambda device: training_of(two_layers, device, microbatches=microbatches, zero=zero), device
    )
    assert report.eager_calls == 2 * 3, "only warm-up runs eagerly"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_of_other_dtypes(optimizer: Any, device: torch.device) -> None:
    for dtype in (torch.float64, torch.bfloat16):

        def build(device: torch.device, dtype: torch.dtype = dtype) -> Training:
            made = training_of(lambda: two_layers().to(dtype), device, optimizer=lambda p: optimizer(p, lr=1e-2))
            made.batches = [batch.to(dtype) for batch in made.batches]
            return made

        assert_graphed_equals_eager(build, device)


class Scaled(nn.Module):
    """A product without a sum: a gradient of -0.0 is one on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_gradients_start_from_minus_zero_not_zero(device: torch.device) -> None:
    """A gradient of -0.0 stays -0.0 where there was none before: nothing was added to it."""
    layer = Scaled().to(device)
    with stepgraph.graph_modules(nn.ModuleDict({"layer": layer}), "layer", warmup=1):
        for _ in range(4):
            layer.weight.grad = None
            (layer(torch.ones(2, device=device)) * -0.0).sum().backward()
            assert same_bits(layer.weight.grad, torch.full((2,), -0.0, device=device))


@pytest.mark.parametrize("what", ["one weight", "all of a layer", "all but a norm"])
def test_gradients_frozen_parameters_get_none(what: str, device: torch.device) -> None:
    def make() -> nn.Module:
        model = Net(Layer(), Layer(), Layer())
        layer = model.layers[1]
        if what == "one weight":
            layer.up.weight.requires_grad_(False)
        elif what == "all of a layer":
            layer.requires_grad_(False)
        else:
            model.layers.requires_grad_(False)
            model.layers[2].norm.requires_grad_(True)
        return model

    assert_graphed_equals_eager(lambda device: training_of(make, device, microbatches=2), device)


def test_gradients_stop_where_nothing_before_needs_them(device: torch.device) -> None:
    """Frozen layers at the bottom: their calls have no backward, and no call waits for one."""

    def make() -> nn.Module:
        model = Net(Layer(), Layer(), Layer())
        model.embed.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        model.layers[1].requires_grad_(False)
        return model

    report = assert_graphed_equals_eager(lambda device: training_of(make, device, microbatches=2), device)
    assert [row.backwards > 0 for row in report.rows] == [False, False, True]
    assert [row.runners for row in report.rows] == [1, 1, 1]


class PartlyUsed(nn.Module):
    """A layer with a parameter that no call uses, and one that only some results rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x).relu(), self.other(x)


def test_gradients_unused_parameters_stay_none(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        return training_of(lambda: nn.ModuleDict({"part": PartlyUsed()}), device, call=lambda m, x: m["part"](x)[0])

    def look(handle: stepgraph.GraphedModules, training: Training) -> None:
        part = training.model["part"]
        assert part.unused.weight.grad is None
        assert part.other.weight.grad is None

    assert_graphed_equals_eager(build, device, "part", look=look)


def test_gradients_for_whichever_results_the_loss_uses(device: torch.device) -> None:
    """One result, the other, both: each has a backward of its own, recorded when it is first asked for."""

    def build(device: torch.device) -> Training:
        model = nn.ModuleDict({"part": PartlyUsed()}).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count = [0]

        def step(x: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            one, two = model["part"](x)
            loss = [one.sum(), two.pow(2).sum(), (one * two).sum(), one.mean() + two.mean()][count[0] % 4]
            count[0] += 1
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        return Training(model, step, [torch.randn(4, 8, device=device) for _ in range(16)], [optimizer])

    report = assert_graphed_equals_eager(build, device, "part")
    assert report.eager_calls == 3


class SharedInside(nn.Module):
    """One matrix used twice in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh())


@pytest.mark.parametrize("zero", ["none", "never"])
def test_gradients_tied_inside_one_module(zero: str, device: torch.device) -> None:
    assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(SharedInside(), Layer()), device, microbatches=2, zero=zero), device
    )


@pytest.mark.parametrize("zero", ["none", "never"])
@pytest.mark.parametrize("where", ["two graphed modules", "a graphed module and eager code"])
def test_gradients_tied_between_modules(where: str, zero: str, device: torch.device) -> None:
    """Autograd adds up all uses of a parameter before it adds them to an old gradient; so must we."""

    def make() -> nn.Module:
        model = Net(nn.Linear(8, 8), Layer(), nn.Linear(8, 8))
        model.layers[2].weight = model.layers[0].weight
        if where == "a graphed module and eager code":
            model.embed.weight = model.layers[0].weight
            model.layers[2].weight = nn.Parameter(torch.randn(8, 8))
        return model

    assert_graphed_equals_eager(
        lambda device: training_of(make, device, microbatches=2, zero=zero, optimizer=torch.optim.SGD), device
    )


@pytest.mark.parametrize("zero", ["none", "never"])
def test_gradients_of_two_forwards_and_one_summed_backward(zero: str, device: torch.device) -> None:
    """Trap: two forwards before their backwards. Each has its own activations, and one backward runs through both."""

    def build(device: torch.device) -> Training:
        training = training_of(two_layers, device, microbatches=2, zero=zero)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            if zero == "none":
                optimizer.zero_grad()
            loss = sum(training.model(x).pow(2).mean() for x in batch.unbind(0))
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    report = assert_graphed_equals_eager(build, device)
    assert [row.runners for row in report.rows] == [2, 2]


@pytest.mark.parametrize("zero", ["none", "never"])
def test_gradients_of_a_module_called_twice_in_a_row(zero: str, device: torch.device) -> None:
    """A recurrent use: the second call's argument is the first one's result."""

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.head(model.layers[0](model.layers[0](model.embed(x))))

    assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(Layer()), device, zero=zero, call=call, microbatches=2), device
    )


@pytest.mark.parametrize("order", ["in turn", "reversed"])
def test_gradients_of_several_forwards_then_several_backwards(order: str, device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(two_layers, device, microbatches=3)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [training.model(x).pow(2).mean() for x in batch.unbind(0)]
            for loss in losses if order == "in turn" else reversed(losses):
                loss.backward()
                note(loss)
            optimizer.step()
            return torch.stack([loss.detach() for loss in losses])

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


# -- the caller's own tensors


def leaf_training(device: torch.device, keep: Callable[[torch.Tensor], Any]) -> Training:
    """The batch is a leaf whose gradient the caller keeps."""
    model = Net(Layer(), Layer()).to(device)
    model.embed = nn.Identity()
    kept: list[Any] = []

    def step(x: torch.Tensor, note: Note) -> list[torch.Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        model(leaf).pow(2).mean().backward()
        note(leaf.grad)
        kept.append(keep(leaf.grad))
        return [grad.clone() for grad in kept[-4:]]

    return Training(model, step, [torch.randn(4, 8, device=device) for _ in range(12)])


@pytest.mark.parametrize("keep", [lambda grad: grad, lambda grad: grad[1:, ::2]], ids=["the gradient", "a view of it"])
def test_gradients_of_input_leaves_are_safe_to_keep(keep: Any, device: torch.device) -> None:
    """Trap: the gradient is static memory, and the next backward overwrites it."""
    assert_graphed_equals_eager(lambda device: leaf_training(device, keep), device)


@pytest.mark.parametrize("hook", ["no hook", "a hook that keeps", "a hook that changes"])
@pytest.mark.parametrize("layout", ["rows", "columns", "every other"])
def test_gradients_are_added_to_those_that_a_leaf_has(hook: str, layout: str, device: torch.device) -> None:
    """A leaf that lives over the steps: its gradient is taken off now and then, else added to, and kept by a hook."""

    def build(device: torch.device) -> Training:
        model = Net(Layer(), Layer()).to(device)
        model.embed = nn.Identity()
        given = {"rows": torch.randn(4, 8), "columns": torch.randn(8, 4).t(), "every other": torch.randn(4, 16)[:, ::2]}
        leaf = given[layout].to(device).requires_grad_()
        kept: list[torch.Tensor] = []
        if hook == "a hook that keeps":
            leaf.register_hook(lambda grad: kept.append(grad))
        elif hook == "a hook that changes":
            leaf.register_hook(lambda grad: grad * 0.5)

        def step(index: int, note: Note) -> list[torch.Tensor]:
            model.zero_grad()
            if index % 4 == 3:
                leaf.grad = None
            for _ in range(2):
                model(leaf).pow(2).mean().backward()
                note(leaf.grad)
            return [grad.clone() for grad in kept[-6:]]

        return Training(model, step, list(range(14)), tensors=[leaf])

    assert_graphed_equals_eager(build, device)


def test_gradients_of_an_argument_used_outside_too_nearly_equal(device: torch.device) -> None:
    """The one gradient that is only nearly eager's: a graph adds up the uses inside it first, autograd one by one."""

    def gradients(*, graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"before": nn.Linear(8, 8), "layer": Layer()}).to(device)
        handle = stepgraph.graph_modules(model, "layer", warmup=1) if graphed else None
        found = []
        for _ in range(6):
            model.zero_grad()
            hidden = model["before"](torch.randn(4, 8).to(device))
            (model["layer"](hidden) + 0.5 * hidden).pow(2).mean().backward()
            found.append(model["before"].weight.grad.clone())
        if handle is not None:
            assert handle.report().eager_calls == 1
            handle.close()
        return found

    for one, two in zip(gradients(graphed=False), gradients(graphed=True), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


class Shift(nn.Module):
    """Hands its result's gradient on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@pytest.mark.parametrize("where", [(0, 1, 2, 3), (1,), (2,)], ids=str)
def test_gradients_in_hooks_between_modules_are_safe_to_keep(where: tuple[int, ...], device: torch.device) -> None:
    """A hook on what one graphed module hands to the next sees the gradient there, and may keep it."""

    def build(device: torch.device) -> Training:
        model = Net(Layer(), Shift(), Layer()).to(device)
        kept: list[torch.Tensor] = []

        def step(x: torch.Tensor, note: Note) -> list[torch.Tensor]:
            model.zero_grad()
            hidden = [model.embed(x)]
            for layer in model.layers:
                hidden.append(layer(hidden[-1]))
            for index in where:
                hidden[index].register_hook(kept.append)
                hidden[index].retain_grad()
            hidden[-1].pow(2).mean().backward()
            note(*[hidden[index].grad for index in where])
            return [grad.clone() for grad in kept[-12:]]

        return Training(model, step, [torch.randn(4, 8, device=device) for _ in range(12)])

    assert_graphed_equals_eager(build, device)


@pytest.mark.parametrize("keep", ["the tensors", "views"])
def test_gradients_kept_over_zero_grad_stay_as_they_were(keep: str, device: torch.device) -> None:
    """Two tasks, each with gradients of its own: eager makes new ones after zero_grad(), so old ones may be kept."""

    def build(device: torch.device) -> Training:
        training = training_of(two_layers, device, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        model, optimizer = training.model, training.optimizers[0]

        def gradients() -> list[torch.Tensor]:
            found = [p.grad for p in model.parameters()]
            return found if keep == "the tensors" else [grad.flatten()[1:] for grad in found]

        def step(batch: torch.Tensor, note: Note) -> list[torch.Tensor]:
            tasks = []
            for scale in (1.0, -3.0):
                optimizer.zero_grad()
                (model(batch[0]).pow(2).mean() * scale).backward()
                note()
                tasks.append(gradients())
            optimizer.step()
            return [grad.clone() for task in tasks for grad in task]

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


def test_gradients_in_memory_that_the_caller_chose(device: torch.device) -> None:
    """One flat buffer under all gradients, set by the caller: backward adds to that very memory."""

    def build(device: torch.device) -> Training:
        model = two_layers().to(device)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)

        def attach() -> None:
            start = 0
            for p in model.parameters():
                p.grad = flat[start : start + p.numel()].view_as(p)
                start += p.numel()

        def step(x: torch.Tensor, note: Note) -> torch.Tensor:
            flat.zero_()
            attach()
            for _ in range(2):
                model(x).pow(2).mean().backward()
                note(flat)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            return flat.clone()

        return Training(model, step, [torch.randn(4, 8, device=device) for _ in range(12)])

    assert_graphed_equals_eager(build, device)
