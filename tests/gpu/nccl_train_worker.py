"""One process with a GPU and an NCCL group of one rank: the training loop, its model in DDP, eager and graphed.

python tests/gpu/nccl_train_worker.py IMPLEMENTATION FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stepgraph.lab.train import RunReport, pretrain
from tests.train_harness import gpt, tiny

CUDA = torch.device("cuda", 0)
STEPS = 16


def train(folder: Path, implementation: str) -> RunReport:
    """DDP in the graph of an iteration needs 11 iterations of warm-up; the other implementations keep it outside."""
    cfg = tiny(folder / implementation, implementation, train__train_iters=STEPS, train__global_batch_size=8)
    cfg.model.cuda_graph_warmup_steps = 11 if implementation == "iteration" else 2
    return pretrain(cfg, model_provider=gpt, device=CUDA, quiet=True)


def main(implementation: str, folder: Path) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.set_device(CUDA)
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1, device_id=CUDA
    )
    eager, again, graphed = (train(folder, each) for each in ("eager", "eager", implementation))
    assert eager.losses == again.losses, "eager differs from eager"
    assert graphed.losses == eager.losses, (graphed.losses, eager.losses)
    if implementation != "eager":
        assert graphed.replays > 0, graphed
        assert graphed.eager_reasons == {"warm-up": 11 if implementation == "iteration" else 2}
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
