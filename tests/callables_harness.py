"""A rank of a pipeline run from its order, eager and by graphed callables, compared bit for bit after every entry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import stepgraph
from stepgraph.engine.order import Entry, Kind, count_microbatches, read_order
from tests.harness import assert_same_history
from tests.module_harness import MIN_STEPS, Layer, Note, Training
from tests.seeding import seed

WIDTH = 8


@dataclass
class Rank:
    """The chunks of one rank, and the order it runs them in."""

    device: torch.device
    order: Sequence[float]
    layers: Sequence[int]
    """Layers a chunk."""
    make: Callable[[], nn.Module] = Layer
    batch: int = 4
    zero: str = "none"
    kwargs: dict[str, Any] = field(default_factory=dict)
    between: Callable[[Callable[..., Any], torch.Tensor], torch.Tensor] = lambda call, hidden: call(hidden)
    """How a layer is called on what the layer before has returned."""
    model: nn.ModuleList = field(init=False)
    graphed: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        self.model = nn.ModuleList(self.make() for _ in range(sum(self.layers))).to(self.device)
        self.num_microbatches = count_microbatches(self.order)
        self.entries = read_order(self.order)

    def start(self, chunk: int) -> int:
        return sum(self.layers[:chunk])

    def sample(self, chunk: int, microbatch: int, layer: int) -> int:
        return self.start(chunk) * self.num_microbatches + microbatch * self.layers[chunk] + layer

    def samples(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Sample arguments, one set for each layer and microbatch."""
        count = sum(self.layers) * self.num_microbatches
        return tuple((torch.randn(self.batch, WIDTH, device=self.device, requires_grad=True),) for _ in range(count))

    def capture(self, **options: Any) -> Sequence[Any]:
        """Graph all layers."""
        self.graphed = stepgraph.make_graphed_callables(
            tuple(self.model), self.samples(), order=self.order, num_layers_per_chunk=list(self.layers), **options
        )
        return self.graphed

    def chunk(self, entry: Entry) -> list[Callable[..., Any]]:
        """What an entry calls, layer by layer."""
        chunk = entry.chunk - 1
        if self.graphed is None:
            return list(self.model[self.start(chunk) : self.start(chunk) + self.layers[chunk]])
        return [self.graphed[self.sample(chunk, entry.microbatch, i)] for i in range(self.layers[chunk])]

    def training(self, steps: int = MIN_STEPS) -> Training:
        """The loop that runs the order."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        shape = (len(self.layers), self.num_microbatches, self.batch, WIDTH)
        batches = [torch.randn(shape, device=self.device) for _ in range(steps)]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            if self.zero != "never":
                optimizer.zero_grad(set_to_none=self.zero == "none")
            losses = self.run(batch, note)
            optimizer.step()
            return losses

        return Training(self.model, step, batches, [optimizer])

    def run(self, batch: torch.Tensor, note: Callable[..., None] = lambda *_: None) -> torch.Tensor:
        """One step of the order; what comes out is noted after every entry."""
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        groups: dict[tuple[int, int], Any] = {}
        losses = []
        for entry in self.entries:
            key = (entry.chunk, entry.microbatch)
            calls = self.chunk(entry)
            if entry.kind is Kind.FORWARD:
                hidden = inputs[key] = batch[entry.chunk - 1, entry.microbatch].clone().requires_grad_()
                for layer, call in enumerate(calls):
                    called = functools.partial(call, **self.kwargs)
                    hidden = self.between(called, hidden) if layer else called(hidden)
                outputs[key] = hidden
                note(hidden)
            elif entry.kind is Kind.WEIGHT_GRAD:
                if self.graphed is None:
                    stage_backward_weight(self._weights(entry), groups.pop(key))
                else:
                    for call in reversed(calls):
                        call.backward_dw()
                note()
            else:
                losses.append(self._backward(entry, outputs.pop(key), inputs[key], groups))
                note(inputs.pop(key).grad)
        return torch.stack(losses)

    def _weights(self, entry: Entry) -> Any:
        chunk = entry.chunk - 1
        layers = self.model[self.start(chunk) : self.start(chunk) + self.layers[chunk]]
        return layers.parameters()

    def _backward(self, entry: Entry, output: torch.Tensor, x: torch.Tensor, groups: dict[Any, Any]) -> torch.Tensor:
        loss = output.pow(2).mean()
        if entry.kind is Kind.INPUT_GRAD and self.graphed is None:
            with torch.enable_grad():
                edge = output.detach().requires_grad_()
                grad = torch.autograd.grad(edge.pow(2).mean(), edge)[0]
            _, groups[entry.chunk, entry.microbatch] = stage_backward_input([output], [grad], [x], self._weights(entry))
        else:
            loss.backward()
        return loss.detach()


def assert_rank_equals_eager(build: Callable[[], Rank], *, steps: int = MIN_STEPS, **options: Any) -> Rank:
    """Build a rank twice from one seed, run it eager and graphed, and compare after every entry and step."""
    seed(7)
    eager = build()
    seed(11)
    training = eager.training(steps)
    expected = training.run(eager.device)
    seed(7)
    graphed = build()
    graphed.capture(**options)
    seed(11)
    training = graphed.training(steps)
    received = training.run(graphed.device)
    assert_same_history(expected, received, "graphed differs from eager")
    return graphed
