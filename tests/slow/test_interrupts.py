"""Ctrl-C at random moments of a program with graphs: it goes on with eager's bits, and nothing is left behind."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_stack

import stepgraph

SECONDS = 4.0
"""For each engine."""


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    """A timer sends the signal from inside the process: a signal from outside comes some milliseconds late."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, alarm)
    signal.signal(signal.SIGINT, before)


class Trained:
    """A model, an optimizer, and a step that may have graphs."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.run = self.step

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def graphed_by(self, engine: str) -> Callable[[], None]:
        """Give it graphs, and return what frees them."""
        if engine == "modules":
            return stepgraph.graph_modules(self.model, ["0", "2"], audit=1).close
        if engine == "callables":
            return stepgraph.make_graphed_callables(self.model, (torch.ones(2, 4),), audit=1).reset
        self.run = stepgraph.capture(self.step, audit=1)
        return self.run.close

    def bits(self, calls: int) -> list[torch.Tensor]:
        """Losses and weights after some calls from a known random state."""
        torch.manual_seed(11)
        losses = [self.run(torch.ones(2, 4)) for _ in range(calls)]
        return [*losses, *(p.detach().clone() for p in self.model.parameters())]


def interrupted(engine: str, after: float) -> tuple[Trained, Callable[[], None], bool]:
    """A program that is interrupted after so many seconds, and still has graphs or gets them again."""
    trained, free = Trained(), None
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        free = trained.graphed_by(engine)
        for _ in range(8):
            trained.run(torch.ones(2, 4))
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return trained, free or trained.graphed_by(engine), True
    return trained, free, False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops what a `__del__` raises
@pytest.mark.parametrize("engine", ["capture", "modules", "callables"])
def test_interrupt_at_any_moment_leaves_all_whole(engine: str) -> None:
    moments, hits, begun = random.Random(7), 0, time.perf_counter()
    interrupted(engine, 100.0)[1]()  # the first use of an engine imports and compiles
    usual = -time.perf_counter()
    interrupted(engine, 100.0)[1]()
    usual += time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        trained, free, was_hit = interrupted(engine, moments.uniform(1e-5, usual))
        hits += was_hit
        assert dispatch_stack() == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        eager = Trained()
        eager.model.load_state_dict(trained.model.state_dict())
        assert all(map(torch.equal, trained.bits(6), eager.bits(6)))
        free()
    assert hits > 0
