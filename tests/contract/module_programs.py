"""Training with graphed modules in any order of forwards and backwards, beside the same training in eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.capture.module_report import ModuleReport
from tests.harness import Program, assert_same_history, snapshot

Loss = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Do:
    """One thing that a training loop does: a forward, a backward, letting go of a loss, an evaluation."""

    kind: str
    microbatch: int = 0
    size: int = 4
    """Rows of the microbatch: another number is another signature."""

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


def order(text: str) -> list[Do]:
    """A step from its short form: `F0 F1 B0 B1`; `D` drops a loss, `E` evaluates, `S` is one backward of all losses."""
    return [Do(word[0], int(word[1:].split("x")[0] or 0), int((word.split("x") + ["4"])[1])) for word in text.split()]


@dataclass
class Training:
    """A model, its optimizer, and the loss of one microbatch."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    make: Callable[[torch.Generator, int], torch.Tensor]
    """A microbatch of so many rows."""
    loss: Loss = field(default=lambda x, step: x)
    set_to_none: bool = True


def play(training: Training, steps: Sequence[Sequence[Do]], device: torch.device) -> list[tuple[list[Any], Any]]:
    """Train by this order; the loss and a snapshot after every event and every optimizer step."""
    program = Program(lambda: None, [], [training.model], [training.optimizer])
    draw = torch.Generator().manual_seed(3)
    history: list[tuple[list[Any], Any]] = []
    for number, step in enumerate(steps):
        losses: dict[int, torch.Tensor] = {}
        for event in step:
            made = None
            if event.kind == "F":
                x = training.make(draw, event.size).to(device)
                made = losses[event.microbatch] = training.loss(x, number)
            elif event.kind == "B":
                losses.pop(event.microbatch).backward()
            elif event.kind == "S":
                torch.stack(list(losses.values())).sum().backward()
                losses.clear()
            elif event.kind == "D":
                del losses[event.microbatch]
            elif event.kind == "E":
                training.model.eval()
                with torch.no_grad():
                    made = training.loss(training.make(draw, event.size).to(device), number)
                training.model.train()
            history.append(([] if made is None else [made.detach().clone()], snapshot(program, device)))
        losses.clear()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=training.set_to_none)
        history.append(([], snapshot(program, device)))
    return history


def assert_orders_equal_eager(
    build: Callable[[torch.device], Training],
    steps: Sequence[Sequence[Do]],
    device: torch.device,
    graph: Callable[[Training], AbstractContextManager[Any]],
) -> ModuleReport:
    """Play the order twice from one seed, in eager and with graphs, and compare after every event."""

    def run(around: Callable[[Training], AbstractContextManager[Any]]) -> tuple[Any, ModuleReport | None]:
        torch.manual_seed(7)
        training = build(device)
        torch.manual_seed(11)
        with around(training) as handle:
            history = play(training, steps, device)
            return history, handle.report() if handle is not None else None

    eager = lambda training: nullcontext()  # noqa: E731
    expected, _ = run(eager)
    if device.type == "cuda":
        assert_same_history(expected, run(eager)[0], "eager differs from eager")
    received, report = run(graph)
    assert_same_history(expected, received, "graphed differs from eager")
    assert report is not None
    return report
