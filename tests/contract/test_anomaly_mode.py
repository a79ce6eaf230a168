"""`torch.autograd.detect_anomaly()` around a call: it runs eagerly, so that autograd sees it, and the graphs stay."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager
from tests.module_harness import Layer, Net, Note, Training, assert_graphed_equals_eager, training_of


@pytest.fixture(autouse=True)
def anomaly_mode_is_off_again() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in|Anomaly Detection")
        yield
    torch.autograd.set_detect_anomaly(False)


def program(device: torch.device) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sqrt().mean() if x.shape[0] == 2 else model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, [(torch.randn(4, 8, device=device),) for _ in range(12)], [model], [optimizer])


@pytest.mark.parametrize("strict", [False, True])
def test_anomaly_mode_calls_are_eager_and_graphs_stay(strict: bool, device: torch.device) -> None:
    def switch(index: int) -> None:
        torch.autograd.set_detect_anomaly(index == 1 or 6 <= index < 9)

    def build(device: torch.device) -> Program:
        made = program(device)
        made.before_call = switch
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("error", stepgraph.StepgraphWarning)
        report = assert_captured_equals_eager(build, device, strict=strict)
    assert report.eager_reasons == {"warm-up": 3, "anomaly mode": 4}
    assert (report.captures, report.recaptures, report.replays) == (1, 0, 5)


def test_anomaly_mode_finds_the_nan_of_a_captured_step(device: torch.device) -> None:
    made = program(device)
    bad = torch.full((4, 8), float("nan"), device=device)
    with stepgraph.capture(made.step) as step:
        for batch in made.batches[:5]:
            step(*batch)
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
            step(bad)
        assert step.report().replays == 2


def test_anomaly_mode_leaves_the_nan_check_at_work(device: torch.device) -> None:
    made = program(device)
    bad = torch.full((4, 8), float("nan"), device=device)
    with pytest.raises(stepgraph.NonFinite) as told, stepgraph.capture(made.step, nan_check="device") as step:
        for batch in made.batches[:5]:
            step(*batch)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            step(bad)
    assert "was not finite in call 6" in str(told.value)


@pytest.mark.parametrize("options", [{}, {"single_mempool": True}, {"strict": True}], ids=str)
def test_anomaly_mode_around_graphed_modules(options: dict[str, Any], device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer()), device, steps=14, microbatches=2)
        inner, calls = training.step, iter(range(14))

        def step(batch: torch.Tensor, note: Note) -> Any:
            with torch.autograd.set_detect_anomaly(next(calls) in (1, 7, 8)):
                return inner(batch, note)

        training.step = step
        return training

    report = assert_graphed_equals_eager(build, device, **options)
    for row in report.rows:
        assert row.eager_reasons["anomaly mode"] == 6
        assert row.signatures == 1


def test_anomaly_mode_around_graphed_callables(device: torch.device) -> None:
    layer, x = Layer(dropout=0.0).to(device), torch.randn(4, 8, device=device)
    graphed = stepgraph.make_graphed_callables(layer, (x.clone().requires_grad_(),))
    before = graphed(x.clone().requires_grad_()).detach().clone()
    bad = x.clone().fill_(float("nan")).requires_grad_()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
        graphed(bad).sum().backward()
    assert torch.equal(graphed(x.clone().requires_grad_()), before)
