"""Pipelines of `torch.distributed.pipelining` that train, eager and graphed, compared bit for bit after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import stepgraph
from tests.harness import Program, State, different, same_bits, snapshot
from tests.pipeline import SCHEDULES
from tests.seeding import seed

WIDTH = 8
ROWS = 2
"""Rows of a microbatch."""


class Block(nn.Module):
    """A part of a model with everything that a stage may have: biases, a norm, dropout, a residual, a frozen weight.

    Gradients of its weights need random numbers of the forward, and the gradient of its result as it comes in.
    """

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.add_(1)
        y = self.down(nn.functional.gelu(self.up(self.dropout(self.norm(x)))))
        return x * self.frozen + (y if scale is None else y * scale)


class Pipeline:
    """The part of a pipeline that this rank trains: stages, schedule, optimizer, and a batch for each step."""

    def __init__(
        self,
        name: str,
        num_microbatches: int,
        device: torch.device | str = "cpu",
        block: Callable[[int], nn.Module] = lambda index: Block(),
        loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss,
        keep_grads: bool = False,
        autocast: bool = False,
        **schedule_options: Any,
    ) -> None:
        form, self.rank, ranks = SCHEDULES[name], dist.get_rank(), dist.get_world_size()
        self.device, self.num_microbatches, self._keep_grads = torch.device(device), num_microbatches, keep_grads
        self._autocast = autocast
        self.blocks, self.stages = [], []
        for index in form.stages_of(self.rank, ranks):
            seed(1000 + index)
            self.blocks.append(block(index).to(self.device))
            self.stages.append(PipelineStage(self.blocks[-1], index, form.stages * ranks, self.device))
        given: Any = self.stages if form.stages > 1 else self.stages[0]
        self.schedule = getattr(torch_schedules, name)(given, num_microbatches, loss_fn=loss_fn, **schedule_options)
        parameters = nn.ModuleList(self.blocks).parameters()  # each once, also where stages share one
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self._batches = torch.Generator().manual_seed(7)
        seed(self.rank)

    def step(self, training: bool = True, **kwargs: Any) -> list[Any]:
        """One step, with its optimizer; the losses and the merged output, where this rank has them."""
        size = (ROWS * self.num_microbatches, WIDTH)
        x, target = (torch.randn(size, generator=self._batches).to(self.device) for _ in range(2))
        losses: list[torch.Tensor] = []
        run = self.schedule.step if training else self.schedule.eval
        first, last = (any(getattr(s, what) for s in self.stages) for what in ("is_first", "is_last"))
        if not self._keep_grads:
            self.optimizer.zero_grad()
        with (
            torch.set_grad_enabled(training),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast),
        ):
            output = run(
                *([x] if first else []), target=target if last else None, losses=losses if last else None, **kwargs
            )
        self.gradients = [None if p.grad is None else p.grad.clone() for b in self.blocks for p in b.parameters()]
        if training:
            self.optimizer.step()
        return [output, *losses]

    def state(self) -> State:
        """Everything that must be equal."""
        return snapshot(Program(self.step, (), modules=self.blocks, optimizers=[self.optimizer]), self.device)


def run(pipeline: Pipeline, steps: int, **kwargs: Any) -> list[tuple[list[Any], State]]:
    """Results and state after each step."""
    history = []
    for _ in range(steps):
        results = [None if r is None else r.detach().clone() for r in pipeline.step(**kwargs)]
        history.append((results, pipeline.state()))
    return history


def assert_equal_histories(expected: list[tuple[list[Any], State]], received: list[tuple[list[Any], State]]) -> None:
    """Bit for bit, each step; losses are at hand on the rank of the last stage."""
    assert len(expected) == len(received)
    for step, (one, two) in enumerate(zip(expected, received, strict=True)):
        assert len(one[0]) == len(two[0]), f"step {step}: other results"
        assert all(same_bits(a, b) for a, b in zip(one[0], two[0], strict=True)), f"step {step}: results differ"
        assert different(one[1], two[1]) == [], f"step {step}"


def assert_graphed_equals_eager(
    name: str, num_microbatches: int, *, steps: int = 6, warmup: int = 2, audit: str | int = 2, **options: Any
) -> stepgraph.GraphedStages:
    """Train eagerly and graphed from one seed; the graphed pipeline's handle, still open."""
    expected = run(Pipeline(name, num_microbatches, **options), steps)
    pipeline = Pipeline(name, num_microbatches, **options)
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=warmup, strict=True, audit=audit)
    received = run(pipeline, steps)
    assert_equal_histories(expected, received)
    report = handle.report()
    assert report.steps == {"warm-up": warmup, "replay": steps - warmup}, report.steps
    for row in report.rows:
        assert row.forwards == (steps - warmup) * num_microbatches, row
        assert row.eager_calls == warmup * num_microbatches, row
    return handle
