"""Ctrl-C while a step is captured: the state is whole, and the program can go on."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_same_history, different, run, snapshot


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Python's own handler: a process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_twice() -> None:
    interrupt()
    interrupt()


def program(device: torch.device, in_call: dict[int, Callable[[], None]]) -> Program:
    """A training program in whose n-th run of the step something happens, after its backward."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    runs: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        in_call.pop(len(runs), lambda: None)()
        runs.append(1)
        optimizer.step()
        return loss

    batches = [(torch.randn(3, 4, device=device),) for _ in range(8)]
    return Program(step, batches, [model], [optimizer])


@pytest.mark.parametrize("happens", [interrupt, interrupt_twice])
def test_interrupt_in_a_capture_restores_the_earlier_state(device: torch.device, happens: Callable[[], None]) -> None:
    torch.manual_seed(7)
    eager = program(device, {})
    torch.manual_seed(11)
    expected = run(eager, eager.step, device)
    torch.manual_seed(7)
    captured = program(device, {3: happens})
    torch.manual_seed(11)
    interrupts = []
    with stepgraph.capture(captured.step, ignore=["runs", "in_call"]) as step:

        def stubborn(x: torch.Tensor) -> torch.Tensor:
            before = snapshot(captured, device)
            try:
                return step(x)
            except KeyboardInterrupt:
                interrupts.append(1)
                assert different(before, snapshot(captured, device)) == []
                assert gc.isenabled()
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                assert not step._session.backend.is_capturing()
            return step(x)

        assert_same_history(expected, run(captured, stubborn, device), "captured differs from eager")
        report = step.report()
    assert interrupts == [1]
    assert (report.captures, report.replays) == (1, 5)


class Dying:
    """Something that can be referred to weakly."""


def test_interrupt_in_a_weak_references_callback_is_not_lost(device: torch.device) -> None:
    """Python prints and forgets what such a callback raises; the tape has one for each tensor."""

    def die() -> None:
        mortal = Dying()
        reference = weakref.ref(mortal, lambda _: interrupt())
        del mortal
        assert reference() is None

    interrupted = program(device, {3: die})
    with stepgraph.capture(interrupted.step, ignore=["runs", "in_call"]) as step:
        for batch in interrupted.batches[:3]:
            step(*batch)
        with pytest.raises(KeyboardInterrupt):
            step(*interrupted.batches[3])


class InterruptedSGD(torch.optim.SGD):
    """Runs between graphs, and meets a Ctrl-C in the middle of its fourth step: the one right after the capture."""

    steps = 0

    def step(self, closure: None = None) -> None:
        self.steps += 1
        if self.steps == 4:
            interrupt()
        super().step()


def test_interrupt_in_the_replay_after_a_capture_is_raised_last(device: torch.device) -> None:
    def weights_after(calls: int, captured: bool) -> torch.Tensor:
        torch.manual_seed(7)
        model = nn.Linear(4, 2).to(device)
        kind = InterruptedSGD if captured else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        batches = [torch.randn(3, 4, device=device) for _ in range(calls)]
        with stepgraph.capture(step, ignore=["optimizer.steps"]) as run_step:
            for x in batches[:-1]:
                (run_step if captured else step)(x)
            if captured:
                with pytest.raises(KeyboardInterrupt):
                    run_step(batches[-1])
                assert run_step.report().replays == 1
            else:
                step(batches[-1])
        return model.weight.detach().clone()

    assert torch.equal(weights_after(4, captured=True), weights_after(4, captured=False))


def test_interrupt_outside_a_capture_is_raised_at_once(device: torch.device) -> None:
    reached = []

    def in_warm_up() -> None:
        interrupt()
        reached.append(1)

    warmed = program(device, {1: in_warm_up})
    with stepgraph.capture(warmed.step, ignore=["runs", "in_call"]) as step:
        step(*warmed.batches[0])
        with pytest.raises(KeyboardInterrupt):
            step(*warmed.batches[1])
    assert reached == []


def test_interrupt_goes_to_the_users_handler(device: torch.device) -> None:
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        handled = program(device, {3: interrupt, 4: interrupt})
        with stepgraph.capture(handled.step, ignore=["runs", "in_call"]) as step:
            for batch in handled.batches:
                step(*batch)
            assert step.report().replays == 5
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] * 2, "in the capture and in the first audit"


def test_capture_in_another_thread_works(device: torch.device) -> None:
    threaded = program(device, {})
    with stepgraph.capture(threaded.step, ignore=["runs", "in_call"]) as step:
        worker = threading.Thread(target=lambda: [step(*batch) for batch in threaded.batches])
        worker.start()
        worker.join()
        assert step.report().replays == 5
