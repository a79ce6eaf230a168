"""Training with graphed modules in any order of forwards and backwards, beside the same training in eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph import ModuleReport
from tests.harness import Program, assert_same_history, snapshot
from tests.seeding import seed

Stage = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Do:
    """One thing that a training loop does."""

    kind: str
    """F: all of a forward, or the rest of it. N: its next stage. B: backward. S: one backward of the sum of all losses.
    D: let go of a microbatch. E: an evaluation."""
    microbatch: int = 0
    size: int = 4
    """Rows of the microbatch: another number is another signature."""

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"x{self.size}" if self.size != 4 else "")


def order(text: str) -> list[Do]:
    """A step from its short form: `F0 F1x3 B0 B1`, where x3 gives the rows."""
    found = []
    for word in text.split():
        microbatch, _, size = word[1:].partition("x")
        found.append(Do(word[0], int(microbatch or 0), int(size or 4)))
    return found


@dataclass
class Training:
    """A model, its optimizer, and how a microbatch goes through it."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    make: Callable[[torch.Generator, int], torch.Tensor]
    """A microbatch of so many rows."""
    stages: Callable[[int], Sequence[Stage]]
    """The way of a microbatch in a step of this number; the last stage gives the loss."""
    set_to_none: bool = True
    after_step: Callable[[], None] = lambda: None
    modules: Sequence[torch.nn.Module] = field(default=())
    """Further modules whose state is compared."""


class _Loop:
    """One step of training: its microbatches under way."""

    def __init__(self, training: Training, draw: torch.Generator, device: torch.device, number: int) -> None:
        self._training, self._draw, self._device = training, draw, device
        self._stages = training.stages(number)
        self._under_way: dict[int, tuple[torch.Tensor, list[Stage]]] = {}

    def do(self, event: Do) -> torch.Tensor | None:
        if event.kind in "FN":
            x, left = self._under_way.pop(event.microbatch, None) or self._new(event.size)
            todo = 1 if event.kind == "N" else len(left)
            for stage in left[:todo]:
                x = stage(x)
            self._under_way[event.microbatch] = (x, left[todo:])
            return x
        if event.kind == "E":
            self._training.model.eval()
            with torch.no_grad():
                x, left = self._new(event.size)
                for stage in left:
                    x = stage(x)
            self._training.model.train()
            return x
        if event.kind == "B":
            self._under_way.pop(event.microbatch)[0].backward()
        elif event.kind == "S":
            torch.stack([loss for loss, _ in self._under_way.values()]).sum().backward()
            self._under_way.clear()
        else:
            del self._under_way[event.microbatch]
        return None

    def _new(self, size: int) -> tuple[torch.Tensor, list[Stage]]:
        return self._training.make(self._draw, size).to(self._device), list(self._stages)


def play(training: Training, steps: Sequence[Sequence[Do]], device: torch.device) -> list[tuple[list[Any], Any]]:
    """Train by this order; what a forward gave, and a snapshot, after every event and every optimizer step."""
    program = Program(lambda: None, [], [training.model, *training.modules], [training.optimizer])
    draw = torch.Generator().manual_seed(3)
    history: list[tuple[list[Any], Any]] = []
    for number, step in enumerate(steps):
        loop = _Loop(training, draw, device, number)
        for event in step:
            made = loop.do(event)
            history.append(([] if made is None else [made.detach().clone()], snapshot(program, device)))
            del made
        del loop
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=training.set_to_none)
        training.after_step()
        history.append(([], snapshot(program, device)))
    return history


Build = Callable[[torch.device], Training]
Graph = Callable[[Training], AbstractContextManager[Any]]


def assert_orders_equal_eager(
    build: Build, steps: Sequence[Sequence[Do]], device: torch.device, graph: Graph
) -> ModuleReport:
    """Play the order twice from one seed, in eager and with graphs, and compare after every event."""
    (report,) = assert_ways_equal_eager(build, steps, device, {"graphed": graph}).values()
    return report


def assert_ways_equal_eager(
    build: Build, steps: Sequence[Sequence[Do]], device: torch.device, ways: Mapping[str, Graph]
) -> dict[str, ModuleReport]:
    """The same for several ways to graph one training, each compared with one run in eager."""

    def run(around: Graph) -> tuple[Any, Any]:
        seed(7)
        training = build(device)
        seed(11)
        with around(training) as handle:
            history = play(training, steps, device)
            return history, handle.report() if handle is not None else None

    expected, _ = run(lambda training: nullcontext())
    if device.type == "cuda":  # equality with eager means nothing where eager differs from itself
        assert_same_history(expected, run(lambda training: nullcontext())[0], "eager differs from eager")
    reports = {}
    for way, graph in ways.items():
        received, reports[way] = run(graph)
        assert_same_history(expected, received, f"{way} differs from eager")
        assert isinstance(reports[way], ModuleReport)
    return reports
