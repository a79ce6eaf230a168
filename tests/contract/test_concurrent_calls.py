"""One step, or graphs of one model, called by several threads at once: the second is refused, the first goes on."""

from __future__ import annotations

import _thread
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests import threads_at_once
from tests.harness import same_bits
from tests.processes import run_to_end

ROOT = Path(__file__).parents[2]
TIMEOUT = 60


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


class Meeting:
    """A place in a call where another thread makes a call of its own, when it is told to."""

    def __init__(self, other: ThreadPoolExecutor) -> None:
        self._other = other
        self.call: Callable[[], Any] | None = None
        self.refused: list[stepgraph.StepgraphError] = []
        self.look = ctypes.py_object(self._look)  # no watch looks into it

    def _look(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            error = self._other.submit(call).exception(TIMEOUT)
            assert isinstance(error, stepgraph.CaptureError), error
            self.refused.append(error)


class Waiting(torch.optim.SGD):
    """It runs between the graphs of a step, so that something happens in a replay, too."""

    meeting: Any

    def step(self, closure: Any = None) -> None:
        self.meeting.value()
        super().step()


def a_step(device: torch.device, look: Any) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    optimizer = Waiting(model.parameters(), lr=0.1)
    optimizer.meeting = look

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        look.value()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


@pytest.mark.parametrize("on_error", ["raise", "eager"])
@pytest.mark.parametrize(("during", "index"), [("warm-up", 1), ("recording", 3), ("replay", 6)])
def test_second_call_of_a_step_is_refused(
    during: str, index: int, on_error: Any, device: torch.device, other: ThreadPoolExecutor
) -> None:
    meeting = Meeting(other)
    model, step = a_step(device, meeting.look)
    twin, eager = a_step(device, ctypes.py_object(lambda: None))
    x = torch.ones(3, 4, device=device)
    with stepgraph.capture(step, on_error=on_error, optimizer="outside", audit=False) as captured:
        for call in range(9):
            if call == index:
                meeting.call = lambda: captured(x * 5)
            assert same_bits(captured(x), eager(x)), during
        report = captured.report()
    [error] = meeting.refused
    assert error.rule == "concurrent-call"
    assert "ThreadPoolExecutor" in str(error)
    assert report.refused == {"concurrent-call": 1}
    assert (report.captures, report.replays) == (1, 6)
    assert same_bits(model.weight.detach(), twin.weight.detach())


def test_calls_of_threads_one_after_the_other_are_fine(device: torch.device, other: ThreadPoolExecutor) -> None:
    nothing = ctypes.py_object(lambda: None)
    (_, step), (_, eager) = a_step(device, nothing), a_step(device, nothing)
    with stepgraph.capture(step, optimizer="outside") as captured:
        for index in range(9):
            x = torch.full((3, 4), float(index), device=device)
            found = other.submit(captured, x).result(TIMEOUT) if index % 2 else captured(x)
            assert same_bits(found, eager(x))


def test_step_may_call_itself_in_its_own_thread(device: torch.device) -> None:
    depth: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        if len(depth) == 1:
            return x + 1
        depth.append(1)
        made = captured(x) * 2
        depth.pop()
        return made

    with stepgraph.capture(step, ignore=["depth"]) as captured:
        assert captured(torch.ones(2, device=device)).tolist() == [4, 4]


@pytest.mark.parametrize(("during", "index"), [("warm-up", 0), ("recording", 2)])
def test_second_call_of_graphed_modules_is_refused(
    during: str, index: int, device: torch.device, other: ThreadPoolExecutor
) -> None:
    meeting, x = Meeting(other), torch.ones(2, 4, device=device)

    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            meeting.look.value()
            return super().forward(x)

    def train(*, graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(First(4, 4), nn.Linear(4, 4)).to(device)
        if graphed:
            stepgraph.graph_modules(model, ["0", "1"], warmup=2, audit=False)
        found = []
        for step in range(6):
            if graphed and step == index:
                meeting.call = lambda: model[1](x)
            model.zero_grad()
            model(x * step).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    graphed = train(graphed=True)
    assert all(map(same_bits, graphed, train(graphed=False)))
    assert [error.rule for error in meeting.refused] == ["concurrent-call"], during


def replayed(device: torch.device) -> tuple[stepgraph.Session, nn.Module, torch.Tensor]:
    """A graphed module, and a result of it whose backward is to come."""
    session, model, x = stepgraph.Session(), nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    stepgraph.graph_modules(model, ["forward"], warmup=2, session=session)
    for _ in range(4):
        model(x).sum().backward()
    model.zero_grad()
    return session, model, model(x).sum()


def test_backward_beside_a_call_of_another_thread_is_refused(device: torch.device, other: ThreadPoolExecutor) -> None:
    session, model, loss = replayed(device)
    other.submit(session.calling.acquire).result(TIMEOUT)
    with pytest.raises(stepgraph.CaptureError) as caught:
        loss.backward()
    assert caught.value.rule == "concurrent-call"
    other.submit(session.calling.release).result(TIMEOUT)
    assert model.weight.grad is None
    model(torch.ones(2, 4, device=device)).sum().backward()
    assert model.weight.grad is not None


def test_backward_in_a_thread_of_autograds_is_let_in(device: torch.device) -> None:
    """As on CUDA, where autograd runs the backward in a thread of its own, for a call that this thread is in."""
    session, model, loss = replayed(device)
    done, errors = threading.Event(), []

    def run() -> None:  # Python's threading did not start this thread
        try:
            loss.backward()
        except BaseException as error:  # noqa: BLE001 (the test's own thread is to fail)
            errors.append(error)
        done.set()

    with session.calling:
        _thread.start_new_thread(run, ())
        assert done.wait(TIMEOUT)
    assert errors == []
    assert model.weight.grad is not None


def test_models_of_two_threads_have_their_own_turns(device: torch.device, other: ThreadPoolExecutor) -> None:
    barrier = threading.Barrier(2)

    class Meets(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            met.value()
            return super().forward(x)

    met = ctypes.py_object(lambda: barrier.wait(TIMEOUT))

    def train() -> None:
        model = Meets(4, 4).to(device)
        stepgraph.graph_modules(model, ["forward"], warmup=2)
        for _ in range(2):
            model(torch.ones(2, 4, device=device)).sum().backward()

    beside = other.submit(train)
    train()
    beside.result(TIMEOUT)


@pytest.mark.parametrize("engine", ["capture", "graph_modules", "make_graphed_callables"])
def test_threads_that_call_at_once_break_nothing(engine: str, device: torch.device) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    [done] = run_to_end([[sys.executable, threads_at_once.__file__, str(device), engine]], environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["whole"]
