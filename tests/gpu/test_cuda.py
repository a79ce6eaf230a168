"""What only a GPU can show: CUDA's own errors with their codes, streams, memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import stepgraph

pytestmark = pytest.mark.gpu


def warmed(step: stepgraph.CapturedStep, *args: torch.Tensor) -> None:
    for _ in range(3):
        step(*args)


def capture_failure(work: object, *args: torch.Tensor) -> stepgraph.CaptureError:
    with stepgraph.capture(work) as step:
        warmed(step, *args)
        with pytest.raises(stepgraph.CaptureError) as caught:
            step(*args)
    return caught.value


def test_error_900_synchronize() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return x * 2

    error = capture_failure(step, torch.ones(2, device="cuda"))
    assert (error.code, error.rule) == (900, "host-read")
    assert error.where.file == __file__


def test_error_904_unjoined_stream() -> None:
    side = torch.cuda.Stream()

    def step(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 3
        return x * 2

    error = capture_failure(step, torch.ones(2, device="cuda"))
    assert (error.code, error.rule) == (904, "unjoined-stream")


def test_error_905_waiting_on_outside_work() -> None:
    side = torch.cuda.Stream()

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(side)
        return x * 2

    with torch.cuda.stream(side):
        torch.ones(1 << 20, device="cuda").sum()
    error = capture_failure(step, torch.ones(2, device="cuda"))
    assert (error.code, error.rule) == (905, "capture-isolation")


def test_error_out_of_memory_leaves_the_process_usable() -> None:
    failed: list[bool] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        too_much = torch.cuda.is_current_stream_capturing() and not failed
        return x * 2 + torch.zeros(1 << 42 if too_much else 4, device="cuda")[:2]

    with stepgraph.capture(step, ignore=["failed"]) as captured:
        warmed(captured, torch.ones(2, device="cuda"))
        with pytest.raises(stepgraph.CaptureError, match="out-of-memory"):
            captured(torch.ones(2, device="cuda"))
        failed.append(True)
        assert captured(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]


def test_host_tensors_are_copied_in_pinned_or_not() -> None:
    weight = torch.ones(4, device="cuda")
    with stepgraph.capture(lambda x: x * weight) as step:
        for i in range(6):
            x = torch.full((4,), float(i))
            assert step(x.pin_memory() if i % 2 else x).tolist() == [float(i)] * 4
        assert step.report().replays == 3


def test_replay_runs_on_the_callers_stream() -> None:
    side = torch.cuda.Stream()
    with stepgraph.capture(lambda x: x * 2) as step:
        warmed(step, torch.ones(1 << 20, device="cuda"))
        for i in range(4):
            with torch.cuda.stream(side):
                x = torch.full((1 << 20,), float(i), device="cuda")
                y = step(x)
                total = y[0].item()
            assert total == 2 * i


def test_session_stream_is_the_capture_stream() -> None:
    with stepgraph.Session() as session:
        with session.stream():
            stream = torch.cuda.current_stream()
        assert stream != torch.cuda.default_stream()
        seen = []
        step = stepgraph.capture(
            lambda x: (seen.append(torch.cuda.current_stream()), x * 2)[1], session=session, ignore=["seen"]
        )
        warmed(step, torch.ones(2, device="cuda"))
        step(torch.ones(2, device="cuda"))
        assert seen == [stream] * 4


def test_closing_gives_the_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    _capture_and_close()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for every stream that ever multiplied matrices
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 40 << 20


def _capture_and_close() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).sum()

    for _ in range(3):
        with stepgraph.capture(step) as captured:
            for _ in range(5):
                captured(torch.randn(4096, 1024, device="cuda"))
            assert captured.report().pool_bytes > 0


def test_failed_captures_do_not_pile_up_memory() -> None:
    def reading(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return y * float(y[0, 0] > 0)

    x = torch.randn(2048, 2048, device="cuda")
    with stepgraph.capture(reading, warmup=1) as step:
        step(x)
        for _ in range(5):
            with pytest.raises(stepgraph.CaptureError):
                step(x)
        gc.collect()  # an error's traceback holds the step's tensors
        first = torch.cuda.memory_reserved()
        for _ in range(10):
            with pytest.raises(stepgraph.CaptureError):
                step(x)
            gc.collect()
        assert torch.cuda.memory_reserved() - first <= 64 << 20
    torch.cuda.empty_cache()


def test_many_signatures_share_one_set_of_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    with stepgraph.capture(step, warmup=2, audit=False) as captured:
        sizes = [64, 56, 48, 40, 32, 24, 16, 8]
        for size in sizes[:1] * 3:
            captured(torch.randn(size, 1024, device="cuda"))
        one = captured.report().pool_bytes
        for size in sizes * 3:
            captured(torch.randn(size, 1024, device="cuda"))
        report = captured.report()
    assert report.graphs == 8
    assert report.pool_bytes <= 2 * one


def test_report_counts_nodes() -> None:
    with stepgraph.capture(lambda x: (x * 2).sin()) as step:
        warmed(step, torch.ones(4, device="cuda"))
        step(torch.ones(4, device="cuda"))
        assert step.report().nodes == 2


def test_tape_refuses_a_step_on_a_gpu() -> None:
    with (
        stepgraph.capture(lambda x: x * 2, backend="tape") as step,
        pytest.raises(stepgraph.InvalidArgument, match="the backend is the tape"),
    ):
        step(torch.ones(2, device="cuda"))
