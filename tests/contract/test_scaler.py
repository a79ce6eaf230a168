"""GradScaler inside a captured step: scaled, unscaled, skipped and grown exactly as in eager."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.optim.scaler import ScalerCapture, noticing_scalers
from tests.harness import Program, assert_captured_equals_eager, same_bits


def scaled_program(device: torch.device, *, clip: bool, fused: bool, overflow_at: tuple[int, ...] = ()) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=4)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    batches = []
    for i in range(24):
        x = torch.randn(4, 8, device=device)
        batches.append((x * float("inf") if i in overflow_at else x,))
    program = Program(step, batches, [model], [optimizer])
    program.extra["scaler"] = scaler
    return program


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_step_equals_eager(clip: bool, fused: bool, device: torch.device) -> None:
    report = assert_captured_equals_eager(lambda d: scaled_program(d, clip=clip, fused=fused), device)
    if fused:
        assert report.segments == 1
        assert report.optimizers["AdamW"] == "inside the graph (fused: its step count is on the device)"
    else:
        assert report.segments == (5 if clip else 3)
        assert report.optimizers["AdamW"] == "eager, between graphs (a GradScaler steps it)"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_scaler_skips_overflowing_steps_as_eager_does(clip: bool, fused: bool, device: torch.device) -> None:
    made: list[Program] = []

    def build(device: torch.device) -> Program:
        made.append(scaled_program(device, clip=clip, fused=fused, overflow_at=(6, 7, 15)))
        return made[-1]

    assert_captured_equals_eager(build, device)
    scales = [program.extra["scaler"].state_dict() for program in made]
    assert all(scale == scales[0] for scale in scales)
    assert scales[0]["scale"] != 256.0


def test_scaler_loaded_between_calls_is_live(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        program = scaled_program(device, clip=False, fused=False)
        scaler = program.extra["scaler"]

        def before_call(index: int) -> None:
            if index == 8:
                scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0})

        program.before_call = before_call
        return program

    assert assert_captured_equals_eager(build, device).recaptures == 0


def test_scaler_methods_are_as_before_after_a_capture(device: torch.device) -> None:
    program = scaled_program(device, clip=True, fused=False)
    scaler = program.extra["scaler"]
    with stepgraph.capture(program.step) as step:
        for batch in program.batches[:6]:
            step(*batch)
        assert not {"step", "update", "unscale_"} & set(vars(scaler))
        assert same_bits(torch.tensor(scaler.get_scale()), torch.tensor(512.0))


def test_recorded_scaler_captures_again_when_its_numbers_change(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        program = scaled_program(device, clip=True, fused=True)
        scaler = program.extra["scaler"]

        def before_call(index: int) -> None:
            if index == 8:
                scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0, "growth_factor": 4.0})
            if index == 12:
                scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0})

        program.before_call = before_call
        return program

    report = assert_captured_equals_eager(build, device)
    assert report.recapture_reasons == {"GradScaler growth_factor: 2.0 -> 4.0": 1}


def test_scaler_updated_outside_the_step_equals_eager(device: torch.device) -> None:
    """Without `update()` the scaler's stages go on after the step: it cannot be recorded, and is cut."""

    def build(device: torch.device) -> Program:
        model = nn.Linear(8, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=3)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            return loss

        batches = [(torch.randn(4, 8, device=device),) for _ in range(12)]
        return Program(step, batches, [model], [optimizer], before_call=lambda i: scaler.update() if i else None)

    assert assert_captured_equals_eager(build, device).segments == 2


@pytest.mark.parametrize("both_fused", [False, True])
def test_scaler_of_two_optimizers_equals_eager(both_fused: bool, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        body, head = nn.Linear(8, 8).to(device), nn.Linear(8, 4).to(device)
        first = torch.optim.AdamW(body.parameters(), lr=1e-2, fused=True)
        second = torch.optim.AdamW(head.parameters(), lr=1e-2, fused=both_fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=3)

        def step(x: torch.Tensor) -> torch.Tensor:
            first.zero_grad()
            second.zero_grad()
            loss = head(body(x).tanh()).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            return loss

        batches = [(torch.randn(4, 8, device=device) * (float("inf") if i == 7 else 1),) for i in range(14)]
        return Program(step, batches, [body, head], [first, second])

    assert assert_captured_equals_eager(build, device).segments == (1 if both_fused else 4)


def test_scaler_is_as_before_when_its_recording_fails(device: torch.device) -> None:
    program = scaled_program(device, clip=True, fused=True)
    scaler, fails = program.extra["scaler"], [True]

    def failing(x: torch.Tensor) -> torch.Tensor:
        loss = program.step(x)
        if stepgraph.backend_for(device).is_capturing() and fails[0]:
            loss.item()
        return loss

    with stepgraph.capture(failing, warmup=1, ignore=["fails"]) as step:
        for batch in program.batches[:2]:
            step(*batch)
        before = scaler.state_dict()
        with pytest.raises(stepgraph.CaptureError):
            step(*program.batches[2])
        assert scaler.state_dict() == before
        assert dict(scaler._per_optimizer_states) == {}
        fails[0] = False
        step(*program.batches[2])
        assert step.report().replays == 1


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_deep_in_the_steps_objects_is_found(fused: bool, device: torch.device) -> None:

    def build(device: torch.device) -> Program:
        model = nn.Linear(8, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=2)
        trainer = SimpleNamespace(plugins=SimpleNamespace(precision=SimpleNamespace(scaler=scaler)))

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            scaled = trainer.plugins.precision.scaler.scale(loss)
            scaled.backward()
            trainer.plugins.precision.scaler.step(optimizer)
            trainer.plugins.precision.scaler.update()
            return loss, scaled

        def before_call(index: int) -> None:
            found = trainer.plugins.precision.scaler
            if index == 6:
                found.load_state_dict(found.state_dict() | {"growth_interval": 1, "growth_factor": 4.0})

        batches = [(torch.randn(4, 8, device=device),) for _ in range(12)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    assert assert_captured_equals_eager(build, device).segments == (1 if fused else 3)


@pytest.mark.parametrize("on_error", ["raise", "eager"])
@pytest.mark.parametrize("update", ["inside", "outside"])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_begun_with_outside_the_step_equals_eager(
    fused: bool, update: str, on_error: str, device: torch.device
) -> None:
    """`unscale_` in the loop, `step` in what is captured: the stages go on around it."""

    def train(wrap: Any) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(3)
        model = nn.Linear(8, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=3)

        def apply() -> None:
            scaler.step(optimizer)
            if update == "inside":
                scaler.update()

        step, found = wrap(apply), []
        for i in range(9):
            optimizer.zero_grad()
            x = torch.randn(4, 8, device=device) * (float("inf") if i == 6 else 1.0)
            scaler.scale(model(x).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step()
            if update == "outside":
                scaler.update()
            found += [model.weight.detach().clone(), torch.tensor(scaler.get_scale())]
        return found, step

    expected, _ = train(lambda function: function)
    received, step = train(lambda function: stepgraph.capture(function, on_error=on_error))
    assert all(map(same_bits, expected, received))
    assert step.report().replays > 0
    step.close()


def test_scaler_failure_in_a_recording_cleans_the_optimizer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `GradScaler.step` hangs on it would be multiplied into the next step's scale."""
    program = scaled_program(device, clip=False, fused=True)
    (optimizer,), scaler = program.optimizers, program.extra["scaler"]
    program.step(*program.batches[0])
    attributes, stages = dict(vars(optimizer)), dict(scaler._per_optimizer_states)
    capture = ScalerCapture([scaler], [optimizer], lambda name, call, imitate: None, lambda optimizer: None, whole=True)

    def fail() -> None:
        assert "grad_scale" in vars(optimizer)
        raise KeyError

    with monkeypatch.context() as patch, pytest.raises(KeyError), capture.recording():
        patch.setattr(type(optimizer), "step", lambda self: fail())
        scaler.step(optimizer)
    assert (dict(vars(optimizer)), dict(scaler._per_optimizer_states)) == (attributes, stages)


def test_noticing_scalers_leaves_their_classes_as_they_were() -> None:
    class Mine(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)

    kinds = [torch.amp.GradScaler, Mine]
    before = [dict(vars(kind)) for kind in kinds]
    seen: list[Any] = []
    scaler, off = Mine("cpu"), Mine("cpu", enabled=False)
    loss = torch.ones(())
    with noticing_scalers(seen.append):
        with noticing_scalers(seen.append), pytest.raises(KeyError):
            scaler.scale(loss)
            off.scale(loss)
            raise KeyError
        with ThreadPoolExecutor(1) as other:  # the calls of another thread are not this one's
            other.submit(Mine("cpu").scale, loss).result()
        scaler.scale(loss)
    assert seen == [scaler] * 3
    assert [dict(vars(kind)) for kind in kinds] == before


def test_noticing_scalers_in_two_threads_that_end_out_of_order() -> None:
    before = dict(vars(torch.amp.GradScaler))
    first, second = noticing_scalers(lambda scaler: None), noticing_scalers(lambda scaler: None)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        one.submit(first.__enter__).result()
        two.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        assert vars(torch.amp.GradScaler)["step"] is not before["step"]
        two.submit(second.__exit__, None, None, None).result()
    assert dict(vars(torch.amp.GradScaler)) == before
