"""`nan_check="device"`: NaN and inf noticed one call later, by name, in warm-up and in replays alike."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager

GOOD = 12


def batches(device: torch.device, bad_at: int | None = None, value: float = float("nan")) -> list[torch.Tensor]:
    found = [torch.randn(4, 8, device=device) for _ in range(GOOD)]
    if bad_at is not None:
        found[bad_at][1, 2] = value
    return found


def program(device: torch.device, *, fused: bool = False) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "count": torch.ones(2, dtype=torch.int64, device=x.device)}

    return Program(step, [(x,) for x in batches(device)], [model], [optimizer])


@pytest.mark.parametrize("fused", [False, True])
def test_nan_check_changes_nothing_while_all_is_finite(fused: bool, device: torch.device) -> None:
    report = assert_captured_equals_eager(lambda d: program(d, fused=fused), device, nan_check="device")
    assert report.segments == (1 if fused else 3)


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bad_at", [0, 2, 3, 7])
@pytest.mark.parametrize("fused", [False, True])
def test_nan_check_names_the_call_and_the_tensor_one_call_later(
    bad_at: int, value: float, fused: bool, device: torch.device
) -> None:
    made = program(device, fused=fused)
    inputs = batches(device, bad_at, value)
    with pytest.raises(stepgraph.NonFinite) as caught, stepgraph.capture(made.step, nan_check="device") as step:
        for x in inputs[: bad_at + 1]:
            step(x)  # not yet
        stepgraph.backend_for(device).synchronize()
        step(inputs[-1])
    assert f"was not finite in call {bad_at + 1}" in str(caught.value)
    assert "Sequential" in str(caught.value)
    assert ".grad" in str(caught.value)


def test_nan_check_at_close_waits_for_what_is_left(device: torch.device) -> None:
    made = program(device)
    step = stepgraph.capture(made.step, nan_check="device")
    for x in batches(device, bad_at=GOOD - 1):
        step(x)
    with pytest.raises(stepgraph.NonFinite, match=f"in call {GOOD}"):
        step.close()
    step.close()  # told once


def test_nan_check_does_not_hide_the_error_that_ends_the_loop(device: torch.device) -> None:
    made = program(device)
    with pytest.raises(KeyError), stepgraph.capture(made.step, nan_check="device") as step:
        for x in batches(device, bad_at=GOOD - 1):
            step(x)
        raise KeyError


def test_nan_check_sees_a_loss_without_gradients(device: torch.device) -> None:
    model = nn.Linear(8, 4).to(device)

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).log()

    step = stepgraph.capture(evaluate, nan_check="device")
    with pytest.raises(stepgraph.NonFinite, match="`result` was not finite in call 1"), step:
        step(torch.randn(4, 8, device=device))


def test_nan_check_sees_gradients_that_the_step_throws_away(device: torch.device) -> None:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        (loss * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = stepgraph.capture(train, nan_check="device")
    weights = [torch.tensor(w, device=device) for w in (1.0, 1.0, 1.0, 1.0, 1.0, float("inf"))]
    with pytest.raises(stepgraph.NonFinite, match=r"grad` was not finite in call 6"), step:
        for weight in weights:
            step(torch.randn(4, 8, device=device), weight)


def test_nan_check_leaves_overflowing_gradients_to_a_scaler(device: torch.device) -> None:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        scaler.scale(loss * 16).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    with stepgraph.capture(train, nan_check="device") as step:
        for x in batches(device):
            step(x)
        assert step.report().replays > 0
    assert scaler.get_scale() < 2.0**127


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["inside", "outside"])
def test_nan_check_looks_at_each_update_of_a_call(make: type[torch.optim.Optimizer], device: torch.device) -> None:
    model = nn.Linear(8, 4).to(device)
    optimizer = make(model.parameters(), lr=0.1)  # type: ignore[call-arg]

    def train(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        losses = []
        for x in (first, second):
            optimizer.zero_grad()
            losses.append(model(x).pow(2).mean())
            losses[-1].backward()
            optimizer.step()
        return losses[0]

    bad = torch.full((4, 8), float("nan"), device=device)
    with (
        pytest.raises(stepgraph.NonFinite, match=r"grad` was not finite in call 6, and 1 more") as caught,
        stepgraph.capture(train, nan_check="device") as step,
    ):
        for i in range(6):
            step(torch.randn(4, 8, device=device), bad if i == 5 else torch.randn(4, 8, device=device))
    assert len(caught.value.details) == 1, "each parameter is named once"


@pytest.mark.parametrize("fused", [False, True])
def test_nan_check_looks_at_gradients_left_behind_the_update(fused: bool, device: torch.device) -> None:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    def train(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(first).pow(2).mean()
        loss.backward()
        optimizer.step()
        model(second).pow(2).mean().backward()
        return loss

    bad = torch.full((4, 8), float("nan"), device=device)
    with (
        pytest.raises(stepgraph.NonFinite, match=r"grad` was not finite in call 6"),
        stepgraph.capture(train, nan_check="device") as step,
    ):
        for i in range(6):
            step(torch.randn(4, 8, device=device), bad if i == 5 else torch.randn(4, 8, device=device))


def test_nan_check_finds_a_scaler_by_its_calls(device: torch.device) -> None:
    """One that lies deeper in the step's objects than anybody looks."""
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    trainer = SimpleNamespace(plugins=SimpleNamespace(precision=SimpleNamespace()))
    trainer.plugins.precision.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127)

    def train(x: torch.Tensor) -> torch.Tensor:
        scaler = trainer.plugins.precision.scaler
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        scaler.scale(loss * 16).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    with stepgraph.capture(train, nan_check="device") as step:
        for x in batches(device):
            step(x)
        assert step.report().replays > 0
    assert trainer.plugins.precision.scaler.get_scale() < 2.0**127


@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_nan_check_reads_padded_results_as_returned(outputs: str, device: torch.device) -> None:
    model = nn.Linear(8, 4).to(device)

    @torch.no_grad()
    def evaluate(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": model(x).mean(-1) + mask, "mean": model(x).mean() * weight}

    sizes = {1: [5, 16]}
    options = {"buckets": {"x": sizes, "mask": sizes}, "pad_values": {"mask": float("-inf")}, "outputs": outputs}
    bad, one = torch.full((2, 3), float("nan"), device=device), torch.ones((), device=device)

    def call(step: Any, length: int, mask: torch.Tensor | None = None, weight: torch.Tensor = one) -> None:
        mask = torch.zeros(2, length, device=device) if mask is None else mask
        assert step(torch.randn(2, length, 8, device=device), mask, weight)["scores"].shape == (2, length)

    for spoiled in ("scores", "mean"):
        with (
            pytest.raises(stepgraph.NonFinite, match=rf"`result\['{spoiled}'\]` was not finite in call 9"),
            stepgraph.capture(evaluate, nan_check="device", **options) as step,
        ):
            for length in (3, 3, 9, 2, 4, 12, 5, 16):
                call(step, length)  # the padding is -inf, and cut away
            call(step, 3, bad if spoiled == "scores" else None, one / 0 if spoiled == "mean" else one)


def test_nan_check_waits_for_open_checks_at_the_sessions_end(device: torch.device) -> None:
    def train_all(session: stepgraph.Session) -> Any:
        step = stepgraph.capture(program(device).step, session=session, nan_check="device")
        for x in batches(device, bad_at=GOOD - 1):
            step(x)
        return step

    session = stepgraph.Session()
    step = train_all(session)
    with pytest.raises(stepgraph.NonFinite, match=f"in call {GOOD}"):
        session.close()
    session.close()  # told once
    step.close()
    with pytest.raises(stepgraph.NonFinite), stepgraph.Session() as session:
        step = train_all(session)
    with pytest.raises(KeyError), stepgraph.Session() as session:
        step = train_all(session)
        raise KeyError


def test_nan_check_on_the_host_is_refused_with_the_fix() -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="nan_check='device'"):
        stepgraph.capture(lambda x: x, nan_check=True)


def test_nan_check_counts_the_calls_that_raised(device: torch.device) -> None:
    """The number is that of the caller's own count, however often it was told before."""
    bad, told = (1, 3, 7, 8, 12), []
    step = stepgraph.capture(lambda x: x * 1, nan_check="device")
    for call in range(1, 16):
        try:
            step(torch.full((3,), float("nan") if call in bad else 1.0, device=device))
        except stepgraph.NonFinite as error:
            told.append(str(error).split(" was not finite in ")[1].split()[:2])
        stepgraph.backend_for(device).synchronize()
    step.close()
    # call 8 itself raised for call 7: its batch was not run
    assert told == [["call", str(call)] for call in (1, 3, 7, 12)]


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


@pytest.mark.parametrize("bad_at", [None, 1, 5])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_nan_check_looks_at_float8_results(dtype: torch.dtype, bad_at: int | None, device: torch.device) -> None:
    def evaluate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum().nan_to_num(), x.to(dtype)

    step = stepgraph.capture(evaluate, nan_check="device")
    inputs = [torch.ones(4, 8, device=device) for _ in range(7)]
    if bad_at is not None:
        inputs[bad_at][1, 2] = float("nan")
    with contextlib.ExitStack() as stack:
        if bad_at is not None:
            found = f"`result[1]` was not finite in call {bad_at + 1}"
            stack.enter_context(pytest.raises(stepgraph.NonFinite, match=re.escape(found)))
        with step:
            for x in inputs:
                assert step(x)[1].dtype is dtype
            assert step.report().replays == 4


def test_nan_check_leaves_out_what_can_hold_no_nan(device: torch.device) -> None:
    packed = torch.full((4,), 0xFF, dtype=torch.uint8, device=device)

    def evaluate(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"packed": (packed & x).view(torch.float4_e2m1fn_x2), "sum": x.sum()}

    with stepgraph.capture(evaluate, nan_check="device") as step:
        for _ in range(6):
            step(torch.full((4,), 0xFF, dtype=torch.uint8, device=device))
        assert step.report().replays == 3


def test_nan_in_the_gradient_of_an_argument_is_found(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sqrt().sum()
        loss.backward()
        return loss.detach()

    captured = stepgraph.capture(step, nan_check="device")
    for bad in (False, False, False, False, False, True):
        captured((torch.zeros if bad else torch.ones)(3, device=device).requires_grad_())
    with pytest.raises(stepgraph.NonFinite, match=r"`x\.grad` was not finite in call 6"):
        captured.close()
