"""One rank of a real gloo group: ranks capture together, also one without layers; a vision helper waits for nobody."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph.lab.models import GPTConfig, VisionConfig, VisionEncoder
from tests.distributed.ranks import end_together
from tests.pipeline_rank import BATCH, SEQUENCE, Chunk

TINY = GPTConfig.tiny()


class FirstStage(Chunk):
    """The stage that sees the images."""

    def __init__(self) -> None:
        super().__init__(TINY, 1)
        self.vision_model = VisionEncoder(VisionConfig.tiny())


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    config = SimpleNamespace(hidden_size=TINY.hidden_size, pipeline_model_parallel_size=world, num_microbatches=2)
    chunk = FirstStage() if rank == 0 else nn.Linear(2, 2)
    if rank == 0:  # the others never come here
        vision = stepgraph.VisionTECudaGraphHelper(chunk, VisionConfig.tiny(), 16, BATCH)
        vision.create_cudagraphs()
        assert vision.graphs_created()
    captured = Path(f"{store}.captured")
    helper = stepgraph.TECudaGraphHelper(  # its place in the pipeline is its rank in the group
        chunk, config, SEQUENCE, BATCH, aux_loss_trackers=[SimpleNamespace(clear=captured.touch)]
    )
    if rank == 0:
        time.sleep(1.0)  # the other one is there first
    helper.create_cudagraphs()
    assert helper.graphs_created() is (rank == 0)
    assert captured.exists(), "it went on while another rank captured"
    helper.delete_cuda_graphs()
    end_together()
    print(f"rank {rank}: done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
