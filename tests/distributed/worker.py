"""One rank of a real gloo group: a data-parallel step with collectives, eager and captured, compared bit for bit."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from tests.distributed.ranks import end_together


def train(captured: bool, rank: int, functional: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world = dist.get_world_size()

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            if functional:
                reduced = torch.distributed._functional_collectives.all_reduce(parameter.grad, "sum", dist.group.WORLD)
                parameter.grad.copy_(reduced / world)
            else:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    run = stepgraph.capture(step) if captured else step
    torch.manual_seed(100 + rank)
    losses = [run(torch.randn(4, 8)).detach() for _ in range(12)]
    replays = run.report().replays if captured else 0
    if captured:
        run.close()
    return losses, [p.detach() for p in model.parameters()], replays


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for functional in (False, True):
        expected, parameters, _ = train(False, rank, functional)
        received, captured, replays = train(True, rank, functional)
        assert replays == 9
        assert all(torch.equal(a, b) for a, b in zip(expected, received, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(parameters, captured, strict=True))
    end_together()
    print(f"rank {rank}: equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
