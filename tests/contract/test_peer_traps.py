"""Traps of other ways to capture, each impossible here, or loud. This table says which test holds which.

| trap | held by |
|---|---|
| accumulation from `.grad is None` is silently wrong | `test_accumulation.py`, from none and present |
| outputs are overwritten by the next call | `test_capture.py::test_capture_outputs_are_detached_and_safe_to_keep` |
| a wrong shape is broadcast, a wrong dtype cast | here |
| a parameter replaced, `.data` swapped: a stale address | `test_guards.py::test_guard_notices_and_captures_once_more` |
| a model moved away and back: a stale address | here |
| warm-up moves BatchNorm statistics and the random state | here; `test_equality.py`, after every call |
| the backward is captured under the ambient autocast | here |
| no reset, no handle, no second shape | `test_capture.py`: reset, close and capture again; here |
| a capture that breaks because another thread allocates | `test_dataloader.py` |
| learning rate, weight decay, betas, momentum are frozen | `test_live_numbers.py` |
| step numbers and loss weights are frozen | `test_guards.py`, the tests of what is watched; here |
| a pool for each graph | here |
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.lab.models import GPT, GPTConfig
from tests.harness import Program, assert_captured_equals_eager


def test_trap_other_shape_or_dtype_is_never_broadcast_or_cast(device: torch.device) -> None:
    """What a copy into the static input would accept (one row, another dtype, a scalar) is another call, or refused."""
    with stepgraph.capture(lambda x: (x * 2, x.dtype, x.shape), max_graphs=2) as step:
        for _ in range(5):
            step(torch.ones(4, 3, device=device))
        others = [
            torch.full((1, 3), 2.0, device=device),
            torch.full((3,), 2.0, device=device),
            torch.full((), 2.0, device=device),
            torch.full((4, 3), 2.0, device=device, dtype=torch.float64),
            torch.full((4, 3), 2, device=device),
            torch.full((3, 4), 2.0, device=device),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for other in others * 4:
                result, dtype, shape = step(other)
                assert (dtype, shape) == (other.dtype, other.shape)
                assert torch.equal(result, other * 2)
        assert torch.equal(step(torch.ones(4, 3, device=device))[0], torch.full((4, 3), 2.0, device=device))
    with stepgraph.capture(lambda x: x * 2, max_graphs=1, strict=True) as step:
        for _ in range(5):
            step(torch.ones(4, 3, device=device))
        for other in others:
            with pytest.raises(stepgraph.SignatureMismatch, match=r"x: .* changed"):
                step(other)


def test_trap_second_shape_keeps_the_first_graph(device: torch.device) -> None:
    """Back and forth between shapes, a reset in between: each has its graph, and replays it."""
    weight = torch.randn(3, device=device)
    with stepgraph.capture(lambda x: x * weight, warmup=1) as step:
        for _ in range(2):
            for size in [4, 6, 4, 6, 4, 6]:
                x = torch.randn(size, 3, device=device)
                assert torch.equal(step(x), x * weight)
            assert step.report().graphs == 2
            step.reset()
        assert step.report().captures == 4
        assert step.report().replays == 8


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_trap_model_moved_away_and_back(fused: bool, device: torch.device) -> None:
    """To another dtype and back (to the host and back on a GPU): the same numbers at other addresses."""

    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        kept: list[Any] = []

        def before_call(index: int) -> None:
            if index == 7:
                kept.extend(p.data for p in model.parameters())  # so that nothing moves back to its old address
                model.double().float()
                model.cpu().to(device)

        batches = [(torch.randn(4, 8, device=device),) for _ in range(14)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    report = assert_captured_equals_eager(build, device)
    assert report.recaptures == 1
    assert report.captures == 2


def test_trap_capture_changes_no_statistic_and_no_random_state(device: torch.device) -> None:
    """N calls are N steps, whatever warm-up, capture and a recording that was thrown away did in between."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device)
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()  # adds to what it finds, so that the first recording does not hold
        return loss

    drawn = []
    for captured in (False, True):
        torch.manual_seed(3)
        model[1].reset_running_stats()
        model.zero_grad()
        with stepgraph.capture(step) if captured else contextlib.nullcontext(step) as run:
            for call in range(8):
                run(torch.ones(4, 4, device=device))
                assert model[1].num_batches_tracked.item() == call + 1
                drawn.append(generator.get_state())
    assert all(torch.equal(one, two) for one, two in zip(drawn[:8], drawn[8:], strict=True))


class MatmulBackward(torch.autograd.Function):
    """A backward that multiplies matrices: under autocast it would do so in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad.float() @ weight.T, x.float().T @ grad.float()


@pytest.mark.parametrize("inner", ["none", "forward"])
@pytest.mark.parametrize("ambient", ["never", "every third call", "every other call", "nested and off"])
def test_trap_backward_runs_under_the_autocast_of_eager(ambient: str, inner: str, device: torch.device) -> None:
    """Autocast around the forward only, or around the call in some calls: the backward never inherits another one."""

    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(device)
        weight = nn.Parameter(torch.randn(8, 4, device=device))
        optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16) if inner == "forward" else contextlib.nullcontext():
                out = MatmulBackward.apply(model(x), weight)
            loss = out.float().pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        batches = [(torch.randn(4, 8, device=device),) for _ in range(18)]
        return Program(step, batches, [model], [optimizer], tensors=[weight])

    def around(call: int) -> contextlib.AbstractContextManager[Any]:
        if ambient == "nested and off" and call % 2:
            return torch.autocast(device.type, torch.bfloat16, enabled=False)
        on = {"every third call": call % 3 == 0, "every other call": call % 2 == 0, "nested and off": True}
        return torch.autocast(device.type, torch.bfloat16) if on.get(ambient) else contextlib.nullcontext()

    def run(step: Any, program: Program) -> list[list[torch.Tensor]]:
        history = []
        for call, (x,) in enumerate(program.batches):
            with around(call):
                loss = step(x)
            state = [*program.modules[0].parameters(), *program.tensors]
            history.append([loss.detach().clone(), *(p.detach().clone() for p in state)])
            history[-1] += [p.grad.clone() for p in state]
        return history

    torch.manual_seed(7)
    eager = build(device)
    expected = run(eager.step, eager)
    torch.manual_seed(7)
    program = build(device)
    with stepgraph.capture(program.step) as step:
        received = run(step, program)
        assert step.report().graphs == (1 if ambient == "never" else 2)
    for call, (one, two) in enumerate(zip(expected, received, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), f"after call {call}"


def test_trap_step_number_counted_by_the_loop_is_never_frozen(device: torch.device) -> None:
    number = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * number

    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(10):
            assert captured(x).tolist() == [float(number)] * 2
    assert any("number: " in str(warning.message) for warning in seen)


def test_trap_many_signatures_take_little_more_than_the_largest(device: torch.device) -> None:
    """One pool for all graphs: eight sequence lengths, the longest first, against the longest alone."""
    config = replace(GPTConfig.tiny(), num_layers=1, max_seq_len=64)

    def pool_bytes(lengths: list[int]) -> int:
        model = GPT(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            return loss

        with stepgraph.capture(step, warmup=1, max_graphs=len(lengths)) as captured:
            for length in lengths * 4:
                captured(torch.randint(config.vocab_size, (2, length), device=device))
            report = captured.report()
            assert report.graphs == len(lengths)
            assert report.replays == 2 * len(lengths)
            return report.pool_bytes

    assert pool_bytes([64, 56, 48, 40, 32, 24, 16, 8]) <= 1.3 * pool_bytes([64])
