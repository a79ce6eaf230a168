"""Parameters that a graphed part returns: they come out as the objects they are, with eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.core.tree import flatten
from tests.harness import assert_same_history
from tests.module_harness import Note, Training, different, quiet

WIDTH = 8


class Part(nn.Module):
    """A projection that returns what a test asks for, like one of Megatron's with `skip_bias_add`."""

    def __init__(self, build: Callable[[Part, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.tied = self.bias
        self.register_buffer("mean", torch.randn(WIDTH))
        self._build = build

    def forward(self, x: torch.Tensor) -> Any:
        return self._build(self, x)


RETURNED: dict[str, Callable[[Part, torch.Tensor], Any]] = {
    "itself": lambda m, x: (x @ m.weight, m.bias),
    "a row of it": lambda m, x: (x @ m.weight, m.bias[None]),
    "its halves": lambda m, x: (x @ m.weight, m.bias.view(2, 4)),
    "its transpose": lambda m, x: (x * m.bias, m.weight.t()),
    "its transpose, used inside": lambda m, x: (x @ m.weight + m.bias, m.weight.t()),
    "itself, used inside": lambda m, x: (x @ m.weight + m.bias, m.bias),
    "itself and a row of it": lambda m, x: (x @ m.weight, m.bias[None], m.bias),
    "all": lambda m, x: (x @ m.weight + m.bias, m.bias, m.weight),
    "nothing else": lambda m, x: m.bias,
    "nothing but two": lambda m, x: [m.bias, m.weight],
    "frozen": lambda m, x: (x @ m.weight + m.bias, m.frozen),
    "a buffer": lambda m, x: (x @ m.weight + m.bias, m.mean),
    "by two names": lambda m, x: (x @ m.weight + m.tied, m.bias, m.tied),
    "nested": lambda m, x: {"out": x @ m.weight, "more": [m.bias, (None, {"weight": m.weight}), 3]},
}


def loss_of(result: Any, other: nn.Parameter) -> torch.Tensor:
    """A loss that uses each tensor of a result, and a parameter that is outside."""
    loss = other.sum() * 0.5
    for index, leaf in enumerate(flatten(result)[0]):
        if isinstance(leaf, torch.Tensor):
            loss = loss + (leaf.sin() * (index + 0.7)).pow(2).mean()
    return loss


def a_training(kind: str, device: torch.device, *, in_flight: int, zero: str) -> Training:
    torch.manual_seed(7)
    part = Part(RETURNED[kind]).to(device)
    model = nn.ModuleDict({"part": part})
    other = nn.Parameter(torch.ones(WIDTH, device=device))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([*trainable, other], lr=0.05)

    def step(batch: torch.Tensor, note: Note) -> Any:
        if zero != "never":
            optimizer.zero_grad(set_to_none=zero == "none")
        losses = [loss_of(part(x), other) for x in batch.unbind(0)[:in_flight]]
        torch.stack(losses).sum().backward()
        note(*losses)
        for x in batch.unbind(0)[in_flight:]:
            loss_of(part(x), other).backward()
            note(x)
        with torch.no_grad():
            seen = [leaf for leaf in flatten(part(batch[0]))[0] if isinstance(leaf, torch.Tensor)]
            note(*seen)
        optimizer.step()
        return torch.stack(losses).detach()

    batches = [torch.randn(in_flight + 1, 4, WIDTH, device=device) for _ in range(7)]
    return Training(model, step, batches, [optimizer], tensors=[other])


def graph_part(way: str, training: Training, device: torch.device) -> Callable[[], int]:
    """Graph the part in one of three ways; gives how often it was replayed."""
    part: Any = training.model["part"]  # type: ignore[index]
    if way == "graph_modules":
        handle = stepgraph.graph_modules(training.model, "part")
        return lambda: handle.report().replays
    if way == "manager":
        manager = stepgraph.CudaGraphManager(None, part, "forward")
        return lambda: manager.report().replays
    stepgraph.make_graphed_callables(part, (torch.ones(4, WIDTH, device=device),), allow_unused_input=True)
    return lambda: stepgraph.engine.parts.callables.report(part).forwards


@pytest.mark.pairwise
@pytest.mark.parametrize("zero", ["none", "never"])
@pytest.mark.parametrize("way", ["graph_modules", "manager", "callables"])
@pytest.mark.parametrize("kind", RETURNED)
def test_returned_parameters_gradients_are_eagers(kind: str, way: str, zero: str, device: torch.device) -> None:
    """Trap: `skip_bias_add`. The gradient of a bias that is returned was lost."""
    # where a parameter is used twice inside, and the part twice in a backward, the sums are made in another order
    in_flight = 1 if way == "callables" or kind == "its transpose, used inside" else 2
    expected = a_training(kind, device, in_flight=in_flight, zero=zero).run(device)
    training = a_training(kind, device, in_flight=in_flight, zero=zero)
    replays = graph_part(way, training, device)
    assert_same_history(expected, training.run(device), "graphed differs from eager")
    assert replays() >= 10


@pytest.mark.parametrize("way", ["graph_modules", "manager", "callables"])
def test_returned_parameters_are_the_objects(way: str, device: torch.device) -> None:
    training = a_training("all", device, in_flight=1, zero="none")
    part: Any = training.model["part"]  # type: ignore[index]
    graph_part(way, training, device)
    training.run(device)
    for mode in (torch.enable_grad(), torch.no_grad()):
        for _ in range(5):
            with mode:
                _, bias, weight = part(torch.randn(4, WIDTH, device=device))
            assert bias is part.bias
            assert weight is part.weight


class Sometimes(nn.Module):
    """Returns its bias where it is asked to, and a parameter that belongs to another module."""

    def __init__(self, other: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH))
        self._others = [other]

    def forward(self, x: torch.Tensor, *, skip: bool = False) -> Any:
        hidden = x @ self.weight + self.bias
        return (hidden, self.bias, self._others[0]) if skip else hidden


@pytest.mark.parametrize("way", ["graph_modules", "manager"])
def test_returned_parameters_of_a_later_kind_of_call(way: str, device: torch.device) -> None:
    """Graphs that accumulate a gradient by themselves are captured again once the parameter is seen to be returned."""

    def build() -> Training:
        torch.manual_seed(7)
        other = nn.Parameter(torch.randn(WIDTH, device=device))
        part = Sometimes(other).to(device)
        model = nn.ModuleDict({"part": part, "elsewhere": nn.ParameterList([other])})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        count = 0

        def step(batch: torch.Tensor, note: Note) -> Any:
            nonlocal count
            count += 1
            optimizer.zero_grad()
            loss = part(batch).sin().pow(2).mean()
            if count > 6:
                hidden, bias, outside = part(batch, skip=True)
                loss = loss + (hidden * bias * outside).sin().pow(2).mean()
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        batches = [torch.randn(4, WIDTH, device=device) for _ in range(18)]
        return Training(model, step, batches, [optimizer])

    expected = build().run(device)
    training = build()
    replays = graph_part(way, training, device)
    assert_same_history(expected, training.run(device), "graphed differs from eager")
    assert replays() >= 4 + 2 * 8


@pytest.mark.parametrize("warmup", [1, 3])
def test_returned_leaf_of_the_call_itself_is_refused(warmup: int, device: torch.device) -> None:
    class Fresh(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.clone().detach().requires_grad_()

    model = nn.ModuleDict({"part": Fresh(), "where": nn.Linear(1, 1)}).to(device)
    with quiet() as seen, stepgraph.graph_modules(model, "part", warmup=warmup) as handle:
        for _ in range(6):
            leaf = model["part"](torch.ones(2, device=device))
            leaf.sum().backward()
            assert leaf.grad is not None
        assert handle.report().replays == 0
    assert "[leaf-result]" in "".join(str(warning.message) for warning in seen)


def test_returned_parameters_of_an_order(device: torch.device) -> None:
    """Microbatches in flight by an order, with the weight gradients split off or not."""

    def run(order: list[float] | None) -> dict[str, Any]:
        torch.manual_seed(7)
        part = Part(RETURNED["itself"]).to(device)
        calls: list[Any] = [part, part]
        if order is not None:
            x = torch.ones(4, WIDTH, device=device, requires_grad=True)
            calls = list(
                stepgraph.make_graphed_callables(
                    (part,), ((x,), (x,)), order=order, num_layers_per_chunk=[1], allow_unused_input=True
                )
            )
        for _ in range(3):
            inputs = [torch.full((4, WIDTH), 0.3 + i, device=device, requires_grad=True) for i in range(2)]
            losses = []
            for call, x in zip(calls, inputs, strict=True):
                out, bias = call(x)
                assert bias is part.bias
                losses.append((out * bias).sin().sum())
            for call, loss in zip(calls, losses, strict=True):
                loss.backward()
                if order is not None and -1.5 in order:
                    call.backward_dw()
        return {name: p.grad for name, p in part.named_parameters()}

    expected = run(None)
    for order in ([1, 1, -1, -1], [1, 1, -1, -1.5, -1, -1.5]):
        assert not different(expected, run(order))
