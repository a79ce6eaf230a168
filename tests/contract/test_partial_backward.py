"""Gradients of a graphed part's parameters need a full backward: `autograd.grad` for some is refused by name."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import same_bits

ROUNDS = (0, 1, 5)
"""Full backwards after the capture: at first autograd has an edge to each parameter, later the graph adds by itself."""


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.part(x)))
        return result


def trained(device: torch.device, engine: str, rounds: int) -> tuple[Both, torch.Tensor, stepgraph.GraphedModules]:
    model, x = Both().to(device), torch.randn(3, 4, device=device)
    session = None
    if engine == "modules":
        session = stepgraph.graph_modules(model, ["part"], warmup=2)
    else:
        stepgraph.make_graphed_callables(model.part, (torch.randn(3, 4, device=device),))
    for _ in range(rounds + 2 * (engine == "modules")):
        model(x).square().mean().backward()
    return model, x, session


def plain(loss: torch.Tensor, model: Both) -> None:
    torch.autograd.grad(loss, list(model.part.parameters()))


def unused_allowed(loss: torch.Tensor, model: Both) -> None:
    torch.autograd.grad(loss, list(model.part.parameters()), allow_unused=True)


def among_others(loss: torch.Tensor, model: Both) -> None:
    torch.autograd.grad(loss, list(model.parameters()))


def with_a_penalty(loss: torch.Tensor, model: Both) -> None:
    loss = loss + sum(p.square().sum() for p in model.parameters())
    torch.autograd.grad(loss, list(model.parameters()))


def inputs_of_backward(loss: torch.Tensor, model: Both) -> None:
    loss.backward(inputs=[model.part.weight])


def an_edge(loss: torch.Tensor, model: Both) -> None:
    torch.autograd.grad(loss, [torch.autograd.graph.get_gradient_edge(model.part.weight)], allow_unused=True)


WAYS = (plain, unused_allowed, among_others, with_a_penalty, inputs_of_backward, an_edge)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("engine", ["modules", "callables"])
@pytest.mark.pairwise
def test_gradient_of_a_parameter_inside_is_refused(
    engine: str, rounds: int, way: Callable[[torch.Tensor, Both], None], device: torch.device
) -> None:
    model, x, _session = trained(device, engine, rounds)
    with pytest.raises(stepgraph.CaptureError) as info:
        way(model(x).square().mean(), model)
    assert info.value.rule == "partial-backward"


def test_refusal_names_the_parameter(device: torch.device) -> None:
    model, x, _session = trained(device, "modules", 5)
    with pytest.raises(stepgraph.CaptureError, match=r"`Linear\.bias`, a parameter of a graphed module"):
        torch.autograd.grad(model(x).sum(), model.part.bias)


def test_gradient_of_a_parameter_behind_the_part_is_computed(device: torch.device) -> None:
    model, x, _session = trained(device, "modules", 5)
    eager = Both().to(device)
    eager.load_state_dict(model.state_dict())
    (wanted,) = torch.autograd.grad(eager(x).square().mean(), eager.head.weight)
    (received,) = torch.autograd.grad(model(x).square().mean(), model.head.weight)
    assert same_bits(received, wanted)


def test_gradient_in_a_graph_without_the_part_is_computed(device: torch.device) -> None:
    model, x, _session = trained(device, "modules", 5)
    waiting = model(x)
    (received,) = torch.autograd.grad(model.part.weight.square().sum(), model.part.weight)
    assert same_bits(received, 2 * model.part.weight.detach())
    waiting.sum().backward()


def layers() -> int:
    """How many sessions look at the backwards of this process."""
    found = getattr(torch.autograd._engine_run_backward, "layers", None)
    return 0 if found is None else len(found._layers)


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_autograd_is_as_before_when_the_graphs_are_gone(end: str, device: torch.device) -> None:
    gc.collect()
    before = layers()
    model, x, session = trained(device, "modules", 5)
    assert layers() == before + 1
    if end == "closed":
        session.close()
        assert layers() <= before
        assert torch.autograd.grad(model(x).sum(), model.part.bias)[0].shape == (4,)
    del model, session
    gc.collect()
    assert layers() <= before, "those of earlier tests may go meanwhile"
