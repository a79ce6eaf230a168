"""Ctrl-C while modules, callables or stages are recorded: it waits until the recording is over, and all is whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_stack

import stepgraph
from stepgraph.engine.record.pair.record import PairCapture
from tests.harness import different
from tests.stage_harness import Pipeline


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Python's own handler: a process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupter:
    """Sends the signal once, right after the n-th recording, before anybody has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.times, self.is_past = 0, 1, False
        record, interrupter = PairCapture.record, self

        def interrupted(pair: PairCapture, *args: Any) -> Any:
            recording = record(pair, *args)
            interrupter.at -= 1
            if interrupter.at == 0:
                for _ in range(interrupter.times):
                    signal.raise_signal(signal.SIGINT)
                interrupter.is_past = True
            return recording

        monkeypatch.setattr(PairCapture, "record", interrupted)


@pytest.fixture
def interrupter(monkeypatch: pytest.MonkeyPatch) -> Interrupter:
    return Interrupter(monkeypatch)


class Trained:
    """A model and a step."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to(device)
        self.optimizer, self.device = torch.optim.SGD(self.model.parameters(), lr=0.01), device

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        x = torch.arange(12.0, device=self.device).reshape(3, 4).cos() * (number + 1)
        self.model(x).square().mean().backward()
        self.optimizer.step()


def train(trained: Trained, number: int) -> int:
    """Make a step, again if it is interrupted; the number of interrupts."""
    try:
        trained.step(number)
    except KeyboardInterrupt:
        assert_whole()
        trained.step(number)
        return 1
    return 0


def assert_whole() -> None:
    assert dispatch_stack() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def assert_equal(one: Trained, two: Trained) -> None:
    for (name, tensor), other in zip(one.model.state_dict().items(), two.model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 8])  # 4 recordings at the capture, and as many at an audit
def test_interrupt_in_a_modules_recording(device: torch.device, interrupter: Interrupter, at: int, times: int) -> None:
    eager, graphed = Trained(device), Trained(device)
    handle = stepgraph.graph_modules(graphed.model, ["0", "2"])
    interrupter.at, interrupter.times, interrupts = at, times, 0
    for number in range(12):
        eager.step(number)
        interrupts += train(graphed, number)
    assert interrupts == 1
    assert interrupter.is_past == (times == 1)
    assert_equal(graphed, eager)
    assert handle.replays > 0
    handle.close()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", [1, 2])
def test_interrupt_in_make_graphed_callables(
    device: torch.device, interrupter: Interrupter, at: int, times: int
) -> None:
    eager, graphed = Trained(device), Trained(device)
    sample = (torch.ones(3, 4, device=device),)
    interrupter.at, interrupter.times = at, times
    with pytest.raises(KeyboardInterrupt):
        stepgraph.make_graphed_callables(graphed.model, sample)
    assert interrupter.is_past == (times == 1)
    assert_whole()
    assert "forward" not in vars(graphed.model)
    stepgraph.make_graphed_callables(graphed.model, sample)
    for number in range(4):
        eager.step(number)
        graphed.step(number)
    assert_equal(graphed, eager)


@pytest.mark.parametrize("at", [1, 2])
def test_interrupt_in_the_audit_of_callables(device: torch.device, interrupter: Interrupter, at: int) -> None:
    eager, graphed = Trained(device), Trained(device)
    stepgraph.make_graphed_callables(graphed.model, (torch.ones(3, 4, device=device),), audit=1)
    interrupter.at, interrupts = at, 0
    for number in range(4):
        eager.step(number)
        interrupts += train(graphed, number)
    assert (interrupts, interrupter.is_past) == (1, True)
    assert_equal(graphed, eager)


def test_interrupt_while_modules_are_put_in_place(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    add: Callable[..., None] = stepgraph.engine.parts.modules.session.ModuleSession.add
    trained, added = Trained(device), []

    def interrupted(session: Any, manager: Any) -> None:
        add(session, manager)
        if not added:
            signal.raise_signal(signal.SIGINT)
        added.append(manager)

    monkeypatch.setattr(stepgraph.engine.parts.modules.session.ModuleSession, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stepgraph.graph_modules(trained.model, ["0", "2"])
    assert all("forward" not in vars(module) for module in trained.model)
    stepgraph.graph_modules(trained.model, ["0", "2"]).close()


@pytest.fixture
def group(device: torch.device) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", [1, 4])
def test_interrupt_in_a_stages_recording(device: torch.device, interrupter: Interrupter, at: int, times: int) -> None:
    pipeline = Pipeline("ScheduleGPipe", 2, device)
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1)
    pipeline.step()
    pipeline.optimizer.zero_grad()
    before, interrupter.at, interrupter.times = pipeline.state(), at, times
    with pytest.raises(KeyboardInterrupt):
        pipeline.step()
    assert interrupter.is_past == (times == 1)
    assert_whole()
    assert different(before, pipeline.state()) == []
    pipeline.step()
    assert handle.report().steps == {"warm-up": 1, "replay": 1}
    handle.close()
