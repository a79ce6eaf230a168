"""A parameter of a graphed module that other code of the step uses too: autograd adds up all uses, then adds them.

A graph that added its own share to `.grad` by itself would round at another place than eager.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.harness import assert_same_history, same_bits
from tests.module_harness import Layer, Note, Training, assert_graphed_equals_eager, quiet, training_of
from tests.stage_harness import Block
from tests.stage_harness import assert_graphed_equals_eager as assert_stages_equal_eager

WIDTH = 8
ZEROS = ["none", "zero", "never"]


class Tied(nn.Module):
    """The head is the weight of the embedding, without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)


def with_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Every weight has a second use."""
    return model(x) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def tied(device: torch.device, zero: str, **options: Any) -> Training:
    return training_of(Tied, device, zero=zero, microbatches=3, optimizer=torch.optim.SGD, **options)


# -- graph_modules


@pytest.mark.parametrize("zero", ZEROS)
def test_weight_of_a_graphed_embedding_as_head(zero: str, device: torch.device) -> None:
    report = assert_graphed_equals_eager(lambda device: tied(device, zero), device, ["embed", "layers.*"])
    assert report.eager_calls == 3 * 3, "only warm-up runs eagerly"


@pytest.mark.parametrize("zero", ZEROS)
def test_penalty_on_all_weights_of_graphed_modules(zero: str, device: torch.device) -> None:
    assert_graphed_equals_eager(lambda device: tied(device, zero, call=with_penalty), device, ["embed", "layers.*"])


@pytest.mark.parametrize("single_mempool", [False, True])
def test_weight_used_elsewhere_with_one_summed_backward(single_mempool: bool, device: torch.device) -> None:
    """Each of two calls hands over its own share, between the shares of the other uses."""

    def build(device: torch.device) -> Training:
        training = tied(device, "never")
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            loss = sum(training.model(x).pow(2).mean() for x in batch.unbind(0))
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    assert_graphed_equals_eager(build, device, ["embed", "layers.*"], single_mempool=single_mempool)


def test_parameter_shared_with_a_module_beside_the_model(device: torch.device) -> None:
    """The other module is none of the model that `graph_modules` was given."""

    def build(device: torch.device) -> Training:
        other = nn.Linear(WIDTH, WIDTH, bias=False).to(device)

        def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return other(model(x))

        training = training_of(Tied, device, zero="never", microbatches=2, call=call, others=[other])
        other.weight = training.model.layers[1].norm_weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        training.model.layers[1].down = nn.Linear(WIDTH, WIDTH).to(device)
        training.model.layers[1].up = nn.Linear(WIDTH, WIDTH).to(device)
        training.model.layers[1].up.weight = other.weight
        del training.model.layers[1].norm_weight
        return training

    assert_graphed_equals_eager(build, device, ["layers.*"])


def test_use_that_begins_after_capture_is_told(device: torch.device) -> None:
    """The next audit sees it: a warning, and from then on eager's bits."""
    torch.manual_seed(0)
    eager = Tied().to(device)
    graphed = copy.deepcopy(eager)
    with stepgraph.graph_modules(graphed, ["layers.*"], warmup=1, audit=2), quiet() as told:
        for step in range(10):
            x = torch.randn(3, 4, WIDTH, device=device)
            for model in (eager, graphed):
                if step in (0, 8):  # from None, and again after the warning
                    model.zero_grad(set_to_none=True)
                torch.manual_seed(step)
                for one in x.unbind(0):
                    out = with_penalty(model, one) if step >= 4 else model(one)
                    out.pow(2).mean().backward()
            if step < 4 or step >= 8:
                assert all(map(same_bits, [p.grad for p in eager.parameters()], [p.grad for p in graphed.parameters()]))
    found = [str(w.message) for w in told if "gradient-order" in str(w.message)]
    assert found, "nothing was told"
    assert "Layer.up.weight" in "".join(found)


def test_use_that_begins_after_capture_raises_under_strict(device: torch.device) -> None:
    """The audit raises it out of the backward, again at each one, until the graphs are dropped or the use ends."""
    torch.manual_seed(0)
    eager = Tied().to(device)
    graphed = copy.deepcopy(eager)
    x = torch.randn(8, 4, WIDTH, device=device)
    handle = stepgraph.graph_modules(graphed, ["layers.*"], warmup=1, audit=1, strict=True)
    with handle, quiet() as told:
        for one in x[:4]:
            graphed(one).pow(2).mean().backward()
        for one in x[4:6]:
            loss = with_penalty(graphed, one).pow(2).mean()
            with pytest.raises(stepgraph.StateChanged, match=r"Layer\..* is now used by other code too") as caught:
                loss.backward()
            assert caught.value.rule == "gradient-order"
            assert "zero_grad()" in caught.value.fix
            del loss
        handle.reset()
        for step, use in enumerate([with_penalty] * 5 + [nn.Module.__call__] * 3):
            for model in (eager, graphed):
                model.zero_grad()
                torch.manual_seed(step)
                use(model, x[step]).pow(2).mean().backward()
            assert all(map(same_bits, [p.grad for p in eager.parameters()], [p.grad for p in graphed.parameters()]))
        rows = handle.report().rows
    assert all(row.forwards > 5 for row in rows)
    assert not [w for w in told if "gradient-order" in str(w.message)]


# -- the other engines


@pytest.mark.parametrize("zero", ZEROS)
def test_manager_of_an_embedding_whose_weight_is_the_head(zero: str, device: torch.device) -> None:
    histories = []
    for is_graphed in (False, True):
        torch.manual_seed(7)
        training = tied(device, zero)
        if is_graphed:
            manager = stepgraph.CudaGraphManager(None, training.model.embed, "forward")
        torch.manual_seed(11)
        histories.append(training.run(device))
    assert manager.report().replays >= 10
    manager.close()
    assert_same_history(*histories, "graphed differs from eager")


def graph_without_order(model: nn.Module, device: torch.device) -> Callable[..., torch.Tensor]:
    x = torch.randn(4, WIDTH, device=device)
    stepgraph.make_graphed_callables((model.embed, model.layers[0]), ((x,), (x.clone().requires_grad_(),)))
    return model


def graph_with_order(model: nn.Module, device: torch.device) -> Callable[..., torch.Tensor]:
    """Three microbatches, all forwards before the backwards."""
    x = [(torch.randn(4, WIDTH, device=device),) for _ in range(3)]
    graphed = iter(stepgraph.make_graphed_callables((model.embed,), tuple(x), _order=[1, 1, 1, -1, -1, -1]) * 10)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = next(graphed)(x)
        for layer in model.layers:
            y = layer(y)
        return F.linear(y, model.embed.weight)

    return call


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("graph", [graph_without_order, graph_with_order])
def test_callable_whose_weight_is_used_elsewhere(graph: Callable[..., Any], zero: str, device: torch.device) -> None:
    histories = []
    for is_graphed in (False, True):
        torch.manual_seed(7)
        model = Tied().to(device)
        call = graph(model, device) if is_graphed else model
        torch.manual_seed(11)
        seen = []
        for _ in range(7):
            if zero != "never":
                model.zero_grad(set_to_none=zero == "none")
            batch = torch.randn(3, 4, WIDTH, device=device)
            if graph is graph_with_order:
                losses = [call(x).pow(2).mean() for x in batch.unbind(0)]
                for loss in losses:
                    loss.backward()
            else:
                for x in batch.unbind(0):
                    call(x).pow(2).mean().backward()
            seen += [p.grad.clone() for p in model.parameters()]
        histories.append(seen)
    assert all(map(same_bits, *histories))


@pytest.fixture
def group(device: torch.device) -> Iterator[None]:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_stage_whose_weights_the_loss_uses(name: str, keep_grads: bool, group: None, device: torch.device) -> None:
    made: list[Block] = []

    def block(index: int) -> Block:
        made.append(Block())
        return made[-1]

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, target) + 0.01 * sum(p.pow(2).sum() for p in made[-1].parameters() if p.requires_grad)

    assert_stages_equal_eager(name, 4, device=device, block=block, loss_fn=loss, keep_grads=keep_grads)
