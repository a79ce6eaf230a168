"""An optimizer of the user's own runs between graphs, at each replay: what it counts by itself is its own affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager


class Counting(torch.optim.Optimizer):
    """Steps that become smaller, by a count on itself; and a log."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0
        self.norms: list[torch.Tensor] = []
        self.last: dict[str, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        grads = [(p, p.grad, group["lr"]) for group in self.param_groups for p in group["params"]]
        for parameter, grad, lr in grads:
            parameter.add_(grad, alpha=-lr / self.count)
        self.norms.append(torch.stack([grad.norm() for _, grad, _ in grads]).sum())
        self.last = {"count": self.count}

    def factor(self) -> float:
        return 1.0 / (1.0 + self.count)


class Trainer:
    """A step that is a method."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Linear(4, 3).to(device)
        self.optimizer = Counting(self.model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss


def batches(device: torch.device) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(2, 4, device=device),) for _ in range(10)]


@pytest.mark.parametrize("kind", ["a method", "a closure"])
def test_own_optimizer_that_counts_is_captured_around(kind: str, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        trainer = Trainer(device)
        model, optimizer = trainer.model, trainer.optimizer

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        chosen = trainer.step if kind == "a method" else step
        return Program(chosen, batches(device), [model], [optimizer])

    report = assert_captured_equals_eager(build, device)
    assert (report.captures, report.recaptures) == (1, 0)
    assert report.eager_reasons == {"warm-up": 3}


def test_own_optimizer_goes_on_counting_in_replays(device: torch.device) -> None:
    trainer = Trainer(device)
    with stepgraph.capture(trainer.step) as step:
        for (x,) in batches(device):
            step(x)
        assert step.report().replays == 7
    assert trainer.optimizer.count == len(trainer.optimizer.norms) == trainer.optimizer.last["count"] == 10


READS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "its count": lambda optimizer, loss: loss * optimizer.count,
    "a method of it": lambda optimizer, loss: loss * optimizer.factor(),
}


@pytest.mark.parametrize("read", READS)
def test_own_optimizer_whose_count_the_step_reads_is_refused(read: str, device: torch.device) -> None:
    trainer, use = Trainer(device), READS[read]
    optimizer = trainer.optimizer

    def step(x: torch.Tensor) -> torch.Tensor:
        return use(optimizer, trainer.step(x))

    with stepgraph.capture(step) as captured, pytest.raises(stepgraph.CaptureError, match=r"count: 2 -> 3") as told:
        for (x,) in batches(device):
            captured(x)
    assert told.value.rule == "host-value"


def test_own_optimizer_that_counts_is_refused_inside(device: torch.device) -> None:
    trainer = Trainer(device)
    with (
        stepgraph.capture(trainer.step, optimizer="inside") as captured,
        pytest.raises(stepgraph.CaptureError, match=r"the step itself changes .*self.optimizer.count"),
    ):
        for (x,) in batches(device):
            captured(x)
