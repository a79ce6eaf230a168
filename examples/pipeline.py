"""Two processes, a model cut into four stages, a zero-bubble schedule: eager, then replayed from graphs.

Run it as it stands: `python examples/pipeline.py`. Each process is a rank of `torch.distributed.pipelining` with two
stages. The schedule splits backwards into gradients of inputs and gradients of weights. Both trainings start from one
seed, and every parameter ends with the same bits. It runs on the CPU over gloo, where graphs are recorded and replayed
without a GPU; on a machine with two GPUs, give each rank its own device and use NCCL.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

import stepgraph

NUM_RANKS, NUM_STAGES, NUM_MICROBATCHES, STEPS, WIDTH = 2, 4, 4, 8, 16


def train(rank: int, *, graphed: bool) -> tuple[list[nn.Module], stepgraph.GraphedStages | None]:
    """Train this rank's stages, which are rank, rank + 2."""
    parts, stages = [], []
    for index in range(rank, NUM_STAGES, NUM_RANKS):
        torch.manual_seed(index)
        part = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        parts.append(part)
        stages.append(PipelineStage(part, index, NUM_STAGES, torch.device("cpu")))
    schedule = ScheduleInterleavedZeroBubble(stages, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2)

    # The line that is new. The first steps warm up, then the graphs are captured in the schedule's order.
    handle = stepgraph.graph_stage(stages, schedule) if graphed else None

    torch.manual_seed(100)
    for _ in range(STEPS):
        batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=target)  # the last stage is here
        optimizer.step()
        optimizer.zero_grad()
    return parts, handle


def run_rank(rank: int, store: str) -> None:
    """Train eagerly and with graphs, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    eager, _ = train(rank, graphed=False)
    replayed, handle = train(rank, graphed=True)
    assert handle is not None
    one, two = nn.ModuleList(eager).parameters(), nn.ModuleList(replayed).parameters()
    pairs = list(zip(one, two, strict=True))
    same = sum(torch.equal(a, b) for a, b in pairs)
    if rank == 0:
        print(handle.report())
    replays = sum(row.forwards for row in handle.report().rows)
    print(f"rank {rank}: {same} of {len(pairs)} parameters have the same bits after {replays} replays", flush=True)
    handle.close()
    dist.destroy_process_group()
    assert same == len(pairs)


def main() -> None:
    """Start the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (str(Path(folder) / "store"),), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
