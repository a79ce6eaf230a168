"""What changes between an eager call and the recording: the step is looked at once more, never recorded blindly."""

from __future__ import annotations

import contextlib
import itertools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import StepgraphWarning
from tests.harness import Program, assert_captured_equals_eager

CALLS = 12


def assign(model: nn.Sequential) -> None:
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


def replace_head(model: nn.Sequential) -> None:
    old = model[2]
    model[2] = nn.Linear(8, 2).to(old.weight.device)


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)


CHANGES = {"assign": assign, "head": replace_head, "parameter": replace_parameter}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [3, 4, 7])
@pytest.mark.parametrize("zero", ["model", "optimizer"])
def test_parameters_replaced_with_an_optimizer_outside_the_step(
    change: str, at: int, zero: str, device: torch.device
) -> None:
    """The old parameters keep their gradients, so that the call looks like none before."""

    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        steps = itertools.count()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        def before_call(index: int) -> None:
            if next(steps):
                optimizers[0].step()
            if index == at:
                CHANGES[change](model)
                optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.1)
            (model if zero == "model" else optimizers[0]).zero_grad()

        batches = [(torch.randn(3, 4, device=device),) for _ in range(CALLS)]
        return Program(step, batches, [model], before_call=before_call)

    report = assert_captured_equals_eager(build, device)
    assert sum(report.recapture_reasons.values()) == (at > 3)  # before, there is nothing to capture again
    assert sum(count for reason, count in report.eager_reasons.items() if reason.startswith("changed: ")) == 1


def test_strict_reports_replaced_parameters_when_no_graph_fits(device: torch.device) -> None:
    model = nn.Linear(4, 2).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    with stepgraph.capture(step, strict=True) as captured:
        for index in range(6):
            if index == 5:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            model.zero_grad()
            if index < 5:
                captured(torch.ones(1, 4, device=device))
        with pytest.raises(stepgraph.StateChanged, match="was replaced"):
            captured(torch.ones(1, 4, device=device))


def renewed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    at: int,
    renew: Callable[[], torch.optim.Optimizer],
    batches: list[Any],
) -> Program:
    """A program that has another optimizer from one call on."""

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def before_call(index: int) -> None:
        nonlocal optimizer
        if index == at:
            optimizer = renew()

    return Program(step, batches, [model], before_call=before_call)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_a_new_optimizer_in_the_place_of_the_old_one(make: Any, at: int, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Linear(4, 2).to(device)
        first = make(model.parameters(), lr=0.1)
        batches = [(torch.randn(3, 4, device=device),) for _ in range(CALLS)]
        return renewed(model, first, at, lambda: make(model.parameters(), lr=0.01), batches)

    assert_captured_equals_eager(build, device)


def test_layers_unfrozen_with_a_new_optimizer_during_a_warm_up(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        model[0].requires_grad_(False)
        first = torch.optim.Adam(model[2].parameters(), lr=0.1)

        def renew() -> torch.optim.Optimizer:
            return torch.optim.Adam(model.requires_grad_(True).parameters(), lr=0.01)

        batches = [(torch.randn(2 if index % 4 == 3 else 5, 4, device=device),) for index in range(28)]
        return renewed(model, first, 12, renew, batches)

    assert_captured_equals_eager(build, device)


def test_a_hook_that_comes_before_the_recording_is_refused(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to(device)
    calls: list[int] = []
    with stepgraph.capture(lambda x: model(x).sum()) as step:
        for _ in range(3):
            step(torch.ones(1, 4, device=device))
        model.append(nn.Linear(4, 2).to(device)).get_submodule("1").register_forward_hook(lambda *_: calls.append(1))
        with pytest.raises(stepgraph.CaptureError, match="hook"):
            for _ in range(3):
                step(torch.ones(1, 4, device=device))


@pytest.mark.parametrize("kind", ["counts", "draws"])
def test_a_flag_set_before_the_recording_hides_nothing(kind: str, device: torch.device) -> None:
    state = {"on": False}
    numbers = {"n": 0}

    def step(x: torch.Tensor) -> torch.Tensor:
        if state["on"]:
            if kind == "draws":
                return x * torch.rand(1).item()
            numbers["n"] += 1
        return x * numbers["n"]

    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.ones(2, device=device))
        state["on"] = True
        rule = "host-value" if kind == "counts" else "host-read|host-random"  # the recording shows it, or an eager call
        with pytest.raises(stepgraph.CaptureError, match=rule):
            for _ in range(3):
                captured(torch.ones(2, device=device))


def test_value_changing_each_call_is_reported_before_recording(device: torch.device) -> None:
    weight = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    with stepgraph.capture(step) as captured:
        for index in range(9):
            weight = 1.0 / (index + 1)
            outcome = (
                pytest.warns(StepgraphWarning, match="The next 8 calls .* stay eager")
                if index == 5
                else contextlib.nullcontext()
            )
            with outcome:
                result = captured(torch.ones(2, device=device))
            assert result.tolist() == pytest.approx([weight] * 2)
        report = captured.report()
        assert report.captures == 0
        assert report.eager_reasons["host value keeps changing: weight"] > 0


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize(("ramp", "replays"), [(20, True), (10_000, False)], ids=["rests", "never rests"])
def test_value_that_comes_to_rest_is_captured_after_all(ramp: int, replays: bool, device: torch.device) -> None:
    weight, runs = 0.0, 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return x * weight

    with stepgraph.capture(step, ignore=["runs"]) as captured:
        for index in range(60):
            weight = min(1.0, index / ramp)
            assert torch.equal(captured(torch.ones(2, device=device)), torch.ones(2, device=device) * weight)
        report = captured.report()
    assert (report.replays > 25) == replays == bool(report.replays)
    assert runs - report.eager_calls - report.audits <= 6, "a value that never rests costs few recordings"


@pytest.mark.parametrize("result", [lambda n: n, lambda n: [0] * (n % 2)], ids=["a number", "another structure"])
@pytest.mark.parametrize("warmup", [1, 3])
def test_a_result_that_a_recording_shows_to_vary_is_refused(
    result: Callable[[int], Any], warmup: int, device: torch.device, tmp_path: Path
) -> None:
    """By a way that nothing watches."""
    number = tmp_path / "number"

    def step(x: torch.Tensor) -> Any:
        return x * 2, result(int(number.read_text()))

    with stepgraph.capture(step, warmup=warmup) as captured:
        with pytest.raises(stepgraph.CaptureError) as caught:
            for index in range(12):
                number.write_text(str(max(0, index - warmup + 1)))
                captured(torch.ones(2, device=device))
        assert caught.value.rule == "varying-output"


def test_result_that_changes_at_the_recording_is_recorded_as_new(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(x: torch.Tensor) -> Any:
        return x * 2, os.environ["STEPGRAPH_TEST_NUMBER"]

    with stepgraph.capture(step) as captured:
        for index in range(8):
            monkeypatch.setenv("STEPGRAPH_TEST_NUMBER", "before" if index < 3 else "after")
            assert captured(torch.ones(2, device=device))[1] == ("before" if index < 3 else "after")
        assert captured.report().replays == 4


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("is_seen", [True, False], ids=["counter", "and out of reach"])
@pytest.mark.parametrize("period", [2, 3, 4])
def test_result_that_follows_a_counter_in_warm_up_is_captured(
    period: int, is_seen: bool, device: torch.device, tmp_path: Path
) -> None:
    """A result that follows something else, too, is refused, or the calls stay eager."""
    trainer, number = types.SimpleNamespace(n=0), tmp_path / "number"

    def step(x: torch.Tensor) -> Any:
        is_last = trainer.n % period == period - 1
        return (x * 2 if is_last else x), is_last, None if is_seen else int(number.read_text())

    captured, results = stepgraph.capture(step), []
    with contextlib.nullcontext() if is_seen else contextlib.suppress(stepgraph.CaptureError):
        for trainer.n in range(40):
            number.write_text(str(trainer.n))
            results.append(captured(torch.ones(2, device=device)))
    for n, (x, is_last, found) in enumerate(results):
        assert (x[0].item(), is_last, found) == (1.0 + is_last, n % period == period - 1, None if is_seen else n)
    assert not is_seen or captured.report().replays >= 32
