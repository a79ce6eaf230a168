"""Graphed modules whose layers leave their weight gradients to `backward_dw()`: as in eager, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.lab.models.linear import Linear, backward_dw
from tests.module_harness import Note, Training, assert_graphed_equals_eager, quiet

WIDTH, STEPS = 6, 7
DELAYED = r"\[delayed-weights\]"


class Layer(nn.Module):
    """A residual layer with dropout; its norm's weight is not delayed."""

    def __init__(self, delay: bool = True) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = Linear(WIDTH, 2 * WIDTH), Linear(2 * WIDTH, WIDTH, bias=True)
        self.up.delay_wgrad_compute = self.down.delay_wgrad_compute = delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Two layers to be graphed next to each other, and an eager linear layer behind them."""

    def __init__(self, delay: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(delay) for _ in range(2)])
        self.head = Linear(WIDTH, WIDTH)
        self.head.delay_wgrad_compute = delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers[1](self.layers[0](x)))
        return out


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def training(order: str = "F0 B0 W0", delay: bool = True) -> Any:
    """A training whose microbatches come in an order of forwards, backwards and weight gradients."""

    def build(device: torch.device) -> Training:
        model = Stack(delay).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            losses: dict[str, torch.Tensor] = {}
            for what, number in map(tuple, order.split()):
                if what == "F":
                    losses[number] = loss_of(model, batch[int(number)])
                elif what == "B":
                    losses[number].backward()
                elif delay:
                    backward_dw(model)
            note()
            optimizer.step()
            return torch.stack([loss.detach() for loss in losses.values()])

        return Training(model, step, torch.randn(STEPS, 2, 4, WIDTH, device=device), [optimizer])

    return build


@pytest.mark.parametrize("single_mempool", [False, True])
def test_delayed_weights_of_modules_equal_eager(device: torch.device, single_mempool: bool) -> None:
    report = assert_graphed_equals_eager(training(), device, warmup=2, single_mempool=single_mempool)
    assert all(row.eager_reasons == {"warm-up": 2} for row in report.rows), report
    # a forward, a backward and the weight gradients of each layer
    assert report.fixed_order == (6 if single_mempool else 0)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["F0 B0 W0 F1 B1 W1", "F0 F1 B0 W0 B1 W1", "F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"])
def test_delayed_weights_of_calls_in_flight(device: torch.device, order: str) -> None:
    assert_graphed_equals_eager(training(order), device, warmup=2)


@pytest.mark.slow
def test_delayed_weights_change_no_gradient(device: torch.device) -> None:
    """Where each weight has one use, a split backward adds up what a whole one does."""
    runs = []
    for delay in (False, True):
        torch.manual_seed(0)
        built = training(delay=delay)(device)
        with stepgraph.graph_modules(built.model, "layers.*", warmup=2):
            built.run(device)
        runs.append([p.detach().clone() for p in built.model.parameters()])
    assert all(map(torch.equal, *runs))


def graphed(device: torch.device, **options: Any) -> tuple[Stack, torch.Tensor, Any]:
    """A model after its warm-up, which the next call captures."""
    torch.manual_seed(0)
    model, x = Stack().to(device), torch.randn(4, WIDTH, device=device)
    handle = stepgraph.graph_modules(model, "layers.*", warmup=2, **options)
    for _ in range(2):
        loss_of(model, x).backward()
        backward_dw(model)
        model.zero_grad()
    return model, x, handle


def test_delayed_weights_wait_until_asked(device: torch.device) -> None:
    model, x, handle = graphed(device)
    with handle:
        loss_of(model, x).backward()
        weights = [model.layers[0].up.weight, model.layers[1].down.weight, model.head.weight]
        assert [weight.grad is None for weight in weights] == [True] * 3
        backward_dw(model)
        assert [weight.grad is None for weight in weights] == [False] * 3
        assert [row.backwards for row in handle.report().rows] == [1, 1]
        with pytest.raises(RuntimeError, match="no weight gradient waits"):
            backward_dw(model)
        with pytest.raises(stepgraph.StepgraphError, match=DELAYED):
            vars(model.layers[0])["forward"].backward_dw()


def test_delayed_weights_with_held_gradients(device: torch.device) -> None:
    """Gradients that the program keeps are not overwritten: the weight gradients are recorded for other memory."""
    model, x, handle = graphed(device)
    with handle:
        kept, copies = [], []
        for _ in range(4):
            loss_of(model, x).backward()
            backward_dw(model)
            kept.append([p.grad for p in model.parameters()])
            copies.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
        assert all(all(map(torch.equal, *pair)) for pair in zip(kept, copies, strict=True))
        assert len({grads[0].data_ptr() for grads in kept}) == 4


def test_delayed_weights_are_added_to_main_grad(device: torch.device) -> None:
    """With `gradient_accumulation_fusion` the third graph adds to `main_grad`, and `.grad` stays None."""
    torch.manual_seed(0)
    models = [Stack().to(device).eval()]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        for layer in model.layers:
            for linear in (layer.up, layer.down):
                linear.gradient_accumulation_fusion = True
                linear.weight.main_grad = torch.zeros_like(linear.weight)
    x = torch.randn(4, WIDTH, device=device)
    with stepgraph.graph_modules(models[0], "layers.*", warmup=1) as handle:
        for _ in range(4):
            for model in models:
                loss_of(model, x).backward()
                backward_dw(model)
        assert handle.replays == 6
    for ours, expected in zip(models[0].layers, models[1].layers, strict=True):
        assert ours.up.weight.grad is None
        assert torch.equal(ours.up.weight.main_grad, expected.up.weight.main_grad)
        assert torch.equal(ours.down.weight.main_grad, expected.down.weight.main_grad)


def test_delayed_weights_that_nobody_asks_for(device: torch.device) -> None:
    model, x = Stack().to(device), torch.randn(4, WIDTH, device=device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle, quiet() as warned:
        for _ in range(3):
            loss_of(model, x).backward()
        assert handle.replays == 0
    told = [str(warning.message) for warning in warned]
    assert any("layers.0" in text and "[delayed-weights]" in text for text in told), told


def test_delayed_weights_refuse_retain_graph(device: torch.device) -> None:
    model, x, handle = graphed(device)
    with handle, pytest.raises(RuntimeError, match="retain_graph"):
        loss_of(model, x).backward(retain_graph=True)


def test_delayed_weights_refuse_another_backward(device: torch.device) -> None:
    """A gradient of other strides needs another graph, and none can be added."""
    model, x, handle = graphed(device)
    with handle:
        loss_of(model, x).backward()
        backward_dw(model)
        with pytest.raises(stepgraph.CaptureError, match=r"(?s)\[replay-order\].*are delayed"):
            model.layers[1](model.layers[0](x)).sum().backward()


def test_delayed_weights_out_of_their_order(device: torch.device) -> None:
    model, x, handle = graphed(device, single_mempool=True)
    with handle:
        loss_of(model, x).backward()
        with pytest.raises(stepgraph.CaptureError, match=r"replay-order"):
            vars(model.layers[1])["forward"].backward_dw()
        backward_dw(model)


def test_delayed_weights_switched_off_are_captured_again(device: torch.device) -> None:
    model, x, handle = graphed(device)
    with handle, quiet():
        loss_of(model, x).backward()
        backward_dw(model)
        for layer in model.layers:
            layer.up.delay_wgrad_compute = layer.down.delay_wgrad_compute = False
        for _ in range(8):
            model.zero_grad()
            loss_of(model, x).backward()
            backward_dw(model)  # of the eager layer
        assert all(p.grad is not None for p in model.parameters())
        assert all(row.recapture_reasons for row in handle.report().rows)
        assert handle.replays > 3
