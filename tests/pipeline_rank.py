"""One rank of a pipeline in one process: its chunks run in the order of a schedule, on tensors as they would arrive.

What a neighbour would send is drawn from a seed: the input of a chunk, and the gradient of its result. So an eager run
and one with graphs get the same, and everything the rank computes can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stepgraph.engine.order import Kind, read_order
from stepgraph.lab.models.attention import RotaryPositions
from stepgraph.lab.models.gpt import Block, GPTConfig
from tests.harness import Program, State, assert_same_history, snapshot
from tests.seeding import seed

SEQUENCE, BATCH = 8, 2
STEPS, WARM = 5, 2
"""Steps that are compared, and those of them before the capture."""


class Chunk(nn.Module):
    """Layers of a GPT between two ranks: hidden states in, hidden states out."""

    def __init__(self, config: GPTConfig, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(num_layers))
        self.rotary = RotaryPositions(config.head_size, config.max_seq_len, config.rope_base)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return x * self.scale


class Rank:
    """The chunks of a rank with their optimizer, and a step that runs them in an order."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        order: Sequence[float],
        width: int,
        *,
        before_forward: Callable[[nn.Module, int], None] = lambda chunk, microbatch: None,
        weight_gradients: Callable[[nn.Module, int], None] = lambda chunk, microbatch: None,
    ) -> None:
        self.chunks, self.order, self.width = list(chunks), order, width
        self.entries = read_order(order)
        self.optimizer = torch.optim.AdamW([p for c in chunks for p in c.parameters() if p.requires_grad], lr=1e-2)
        self.before_forward, self.weight_gradients = before_forward, weight_gradients

    def step(self, number: int) -> list[Any]:
        """Run the order once; what each forward and each backward gave."""
        weight = next(self.chunks[0].parameters())
        generator = torch.Generator().manual_seed(1000 + number)
        shape = (BATCH, SEQUENCE, self.width)

        def drawn() -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

        self.optimizer.zero_grad()
        under_way: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        seen: list[Any] = []
        for entry in self.entries:
            chunk, key = self.chunks[entry.chunk - 1], (entry.chunk, entry.microbatch)
            if entry.kind is Kind.FORWARD:
                self.before_forward(chunk, entry.microbatch)
                x = drawn().requires_grad_()
                under_way[key] = (x, chunk(x * 1.0))
                seen.append(under_way[key][1].detach().clone())
                continue
            if entry.kind is Kind.WEIGHT_GRAD:
                self.weight_gradients(chunk, entry.microbatch)
            else:
                x, out = under_way.pop(key)
                out.backward(drawn())
                seen.append(x.grad.clone())
            if entry.kind is not Kind.INPUT_GRAD:  # there the weights' come later
                seen += [None if p.grad is None else p.grad.clone() for p in chunk.parameters()]
        self.optimizer.step()
        return seen

    def run(self, steps: range, device: torch.device) -> list[tuple[list[Any], State]]:
        """Some steps: what each saw, and the state after it."""
        program = Program(self.step, (), self.chunks, [self.optimizer])
        return [(self.step(number), snapshot(program, device)) for number in steps]


def assert_rank_equals_eager(
    make: Callable[[torch.device], Rank],
    graph: Callable[[Rank], Any],
    device: torch.device,
) -> Any:
    """Run a rank eagerly, and again with graphs from some step on; compare all after each step.

    Returns what `graph` has returned.
    """
    seed(7)
    eager = make(device)
    seed(11)
    expected = eager.run(range(STEPS), device)
    seed(7)
    rank = make(device)
    seed(11)
    received = rank.run(range(WARM), device)
    graphed = graph(rank)
    received += rank.run(range(WARM, STEPS), device)
    assert_same_history(expected, received, "graphed differs from eager")
    return graphed
