"""State that a graph takes for granted: it is right at every call, noticed when it changes, and never frozen."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.module_harness import (
    Layer,
    Net,
    Note,
    Training,
    assert_graphed_equals_eager,
    only_row,
    quiet,
    same_bits,
    training_of,
)


class Norms(nn.Module):
    """A layer with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.inner(x)))
        self.total.add_(hidden.detach().sum(0))
        return hidden + 0.1 * self.total


def test_state_statistics_and_buffers_move_once_a_call(device: torch.device) -> None:
    """Trap: warm-up and capture move BatchNorm's statistics and the random state."""
    assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(Norms(), Layer(), Norms()), device, microbatches=2), device
    )


def evaluating(kind: str) -> contextlib.AbstractContextManager[Any]:
    return {"eval": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[kind]()


@pytest.mark.parametrize("kind", ["eval", "no_grad", "inference"])
def test_state_evaluation_never_replays_a_training_graph(kind: str, device: torch.device) -> None:
    """Trap: validation with dropout on. Each mode has graphs of its own, and training goes on afterwards."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Norms(), Layer(dropout=0.5)), device, steps=14)
        inner = training.step

        def step(batch: torch.Tensor, note: Note) -> list[Any]:
            result = inner(batch, note)
            training.model.train(kind == "no_grad")
            with evaluating(kind):
                evaluated = [training.model(batch[0] + i) for i in range(2)]
            training.model.train()
            return [result, *evaluated]

        training.step = step
        return training

    report = assert_graphed_equals_eager(build, device)
    assert all(row.signatures == 2 for row in report.rows)
    assert all(row.forwards > 20 for row in report.rows)


def test_state_mode_of_a_submodule_is_part_of_the_call(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Norms(), Layer()), device, steps=18)
        training.before_step = lambda index: training.model.layers[0].norm.train(index % 3 != 2)  # type: ignore[assignment]
        return training

    report = assert_graphed_equals_eager(build, device)
    assert [row.signatures for row in report.rows] == [2, 1]


# -- guards


def replace_parameter(model: nn.Module) -> None:
    model.layers[0].up.weight = nn.Parameter(torch.ones_like(model.layers[0].up.weight) * 0.1)


def swap_data(model: nn.Module) -> None:
    model.layers[0].up.weight.data = model.layers[0].up.weight.data * 2


def freeze(model: nn.Module) -> None:
    model.layers[0].up.weight.requires_grad_(False)
    model.layers[0].up.weight.grad = None


def add_module(model: nn.Module) -> None:
    model.layers[0].dropout = nn.Sequential(nn.Dropout(0.5), nn.Tanh())


def assign_state(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()}, assign=True)


def replace_buffer(model: nn.Module) -> None:
    model.layers[0].norm.running_mean = torch.ones_like(model.layers[0].norm.running_mean)


def put_in_without_a_word(model: nn.Module) -> None:
    model.layers[0].up._parameters["weight"] = nn.Parameter(torch.ones_like(model.layers[0].up.weight) * 0.2)


def load_in_place(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()})


class Guarded(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]


CHANGES: dict[Callable[[nn.Module], None], str | None] = {
    replace_parameter: "layers.0.up.weight",
    swap_data: "layers.0.up.weight",
    freeze: "layers.0.up.weight",
    add_module: "layers.0.dropout",
    assign_state: "layers.0.",
    replace_buffer: "layers.0.norm.running_mean",
    put_in_without_a_word: "layers.0.up.weight",
    load_in_place: None,
}


def changing(device: torch.device, change: Callable[[nn.Module], None]) -> Training:
    training = training_of(lambda: Net(Guarded(), Guarded()), device, steps=12, optimizer=lambda p: NoState(p))

    def before_step(index: int) -> None:
        if index == 5:
            change(training.model)
            training.optimizers[0].param_groups[0]["params"] = [
                p for p in training.model.parameters() if p.requires_grad
            ]

    training.before_step = before_step
    return training


class NoState(torch.optim.SGD):
    """SGD over whatever the model has for parameters now."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_state_that_moves_is_noticed_and_captured_again(
    change: Callable[[nn.Module], None], device: torch.device
) -> None:
    """Trap: a parameter replaced, `.data` swapped, a module moved: a stale address, silently."""
    report = assert_graphed_equals_eager(lambda device: changing(device, change), device)
    reasons = only_row(report, "layers.0").recapture_reasons
    name = CHANGES[change]
    if name is None:
        assert not reasons
    else:
        assert len(reasons) == 1
        assert name in next(iter(reasons))
        assert only_row(report, "layers.0").forwards > 4, "it replays again"


@pytest.mark.parametrize("change", [c for c, name in CHANGES.items() if name], ids=lambda c: c.__name__)
def test_state_that_moves_is_an_error_under_strict(change: Callable[[nn.Module], None], device: torch.device) -> None:
    model = Net(Guarded(), Guarded()).to(device)
    with stepgraph.graph_modules(model, "layers.*", strict=True, warmup=1):
        for _ in range(3):
            model(torch.randn(4, 8, device=device)).sum().backward()
        change(model)
        with pytest.raises(stepgraph.StateChanged, match=CHANGES[change]) as raised:
            model(torch.randn(4, 8, device=device))
        assert raised.value.rule == "state-changed"


class Growing(Layer):
    """A layer that may get a part, or makes one itself."""

    def __init__(self, *, makes_part: bool = False) -> None:
        super().__init__()
        self.makes_part = makes_part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.makes_part and not hasattr(self, "part"):
            self.part = nn.Linear(8, 8, device=x.device)
            nn.init.ones_(self.part.weight)
        hidden = super().forward(x)
        return self.part(hidden) if hasattr(self, "part") else hidden


@pytest.mark.parametrize("index", [1, 2, 3, 4])
@pytest.mark.parametrize("layer", [0, 1])
def test_state_module_added_in_warm_up_is_named(index: int, layer: int, device: torch.device) -> None:
    """Trap: the noted calls have the flags of fewer modules; the capture failed, and the layer stayed eager."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Growing(), Growing()), device, steps=14, optimizer=lambda p: NoState(p))

        def before_step(step: int) -> None:
            if step == index:
                part = nn.Linear(8, 8, device=device)
                nn.init.ones_(part.weight)
                training.model.layers[layer].part = part  # type: ignore[union-attr, operator]
                training.optimizers[0].param_groups[0]["params"] = list(training.model.parameters())

        training.before_step = before_step
        return training

    report = assert_graphed_equals_eager(build, device)
    row, name = only_row(report, f"layers.{layer}"), f"`layers.{layer}.part` was added"
    assert any(name in reason for reason in (*row.eager_reasons, *row.recapture_reasons)), row
    assert not any("capture failed" in reason for reason in row.eager_reasons)
    assert all(each.forwards > 4 for each in report.rows), "both replay"


def test_state_module_made_by_first_call_is_captured(device: torch.device) -> None:
    model = Net(Growing(makes_part=True)).to(device)
    with stepgraph.graph_modules(model, "layers.*", strict=True) as handle:
        for _ in range(8):
            model(torch.randn(4, 8, device=device)).sum().backward()
        row = only_row(handle.report(), "layers.0")
    assert row.eager_reasons["changed: `layers.0.part` was added"] == 1
    assert row.forwards > 2


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_state_replaced_before_another_capture_is_kept(kind: str, device: torch.device) -> None:
    """Trap: the capture of a second shape put the old tensor back into the module, and computed with it."""
    torch.manual_seed(0)
    model = Net(Norms()).to(device).eval()
    layer: Any = model.layers[0]
    with stepgraph.graph_modules(model, "layers.*", warmup=2) as handle:
        for rows in (4, 4, 4, 4, 6, 6):
            model(torch.ones(rows, 8, device=device)).sum().backward()
        if kind == "parameter":
            new = layer.inner.weight = nn.Parameter(torch.full((8, 8), 9.0, device=device))
        else:
            new = layer.norm.running_mean = torch.full((8,), 9.0, device=device)
        for _ in range(6):
            total = layer.total.clone()
            found = model(torch.ones(6, 8, device=device))
            assert (layer.inner.weight if kind == "parameter" else layer.norm.running_mean) is new
            layer.total.copy_(total)
            assert same_bits(found, eager_result(model, device))
            layer.total.copy_(total)
            found.sum().backward()
        row = only_row(handle.report(), "layers.0")
    assert len(row.recapture_reasons) == 1
    assert row.forwards > 3


def eager_result(model: nn.Module, device: torch.device) -> torch.Tensor:
    """The result of the eager model."""
    return copy.deepcopy(model)(torch.ones(6, 8, device=device))


def test_state_model_moved_to_another_dtype_and_back(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer()), device, steps=12)
        kept: list[Any] = []

        def before_step(index: int) -> None:
            if index == 5:
                kept.extend(p.data for p in training.model.parameters())
                training.model.double().float()
                training.model.cpu().to(device)

        training.before_step = before_step
        return training

    report = assert_graphed_equals_eager(build, device)
    assert all(row.recapture_reasons for row in report.rows)


def test_state_of_functional_call_is_the_callers(device: torch.device) -> None:
    """torch.func.functional_call puts other tensors in the parameters' places, and back, without a word."""
    model = Net(Layer(dropout=0.0), Layer(dropout=0.0)).to(device)
    eager = Net(Layer(dropout=0.0), Layer(dropout=0.0)).to(device)
    eager.load_state_dict(model.state_dict())
    x = torch.randn(4, 8, device=device)
    other = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle, quiet():
        for _ in range(12):
            assert same_bits(model(x), eager(x))
            assert same_bits(
                torch.func.functional_call(model, other, (x,)), torch.func.functional_call(eager, other, (x,))
            )
        assert handle.report().replays > 0
