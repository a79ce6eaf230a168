"""`Ranks` knows the processes of a training, and lets them agree on small numbers.

Training needs a few decisions that all ranks must take alike: whether memory suffices for graphs, whether a signal has
arrived, whether all files of a checkpoint are written. Each is one number, reduced over the ranks. The numbers go
through a gloo group of their own, so that with NCCL too asking does not wait for the GPU.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The processes of a training, of which `pipeline_size` in a row hold the stages of one model.

    Ranks that differ by a multiple of `pipeline_size` hold the same stage and train on different data.
    """

    def __init__(self, pipeline_size: int = 1) -> None:
        self.has_group = dist.is_available() and dist.is_initialized()
        """Whether there is a process group; it may have one rank only."""
        self.rank = dist.get_rank() if self.has_group else 0
        self.size = dist.get_world_size() if self.has_group else 1
        self.pipeline_size = pipeline_size
        self.data_size, self.data_rank = self.size // pipeline_size, self.rank // pipeline_size
        self.stage = self.rank % pipeline_size
        self.stage_group: Any = None
        self.ends_group: Any = None
        """The first and the last stage of a pipeline, on the ranks that hold them: a tied embedding is in both."""
        self.data_group: Any = None
        self._control: Any = None
        if self.size > 1:
            self._control = dist.new_group(backend="gloo")
            if pipeline_size > 1:
                self._make_groups()

    def _make_groups(self) -> None:
        for stage in range(self.pipeline_size):  # every rank takes part in making every group
            group = dist.new_group([r for r in range(self.size) if r % self.pipeline_size == stage])
            self.data_group = group if stage == self.stage else self.data_group
        for start in range(0, self.size, self.pipeline_size):
            group = dist.new_group(list(range(start, start + self.pipeline_size)))
            self.stage_group = group if start <= self.rank < start + self.pipeline_size else self.stage_group
            ends = [start, start + self.pipeline_size - 1]
            group = dist.new_group(ends)
            self.ends_group = group if self.rank in ends else self.ends_group

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def largest(self, value: int) -> int:
        """Return the largest of the numbers that the ranks give; every rank must ask."""
        return int(self._reduced(float(value), dist.ReduceOp.MAX)) if self.size > 1 else value

    def smallest(self, value: int) -> int:
        """Return the smallest of the numbers that the ranks give; every rank must ask."""
        return -self.largest(-value)

    def mean_loss(self, value: float) -> float:
        """Return the mean loss over data-parallel ranks; stages of a pipeline that know no loss give 0."""
        return self._reduced(value, dist.ReduceOp.SUM) / self.data_size if self.size > 1 else value

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.size > 1:
            dist.barrier(self._control)

    def _reduced(self, value: float, how: Any) -> float:
        number = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(number, how, group=self._control)
        return float(number.item())


def start_processes(device: torch.device, backend: str | None = None, timeout_minutes: int = 10) -> bool:
    """Join the process group that torchrun describes; return True if this call created it.

    Ranks on CPUs talk by gloo, whatever the backend is. torchrun keeps one store for all groups of a program, in which
    a second group would find the addresses of the first one. So each has a part of the store of its own.
    """
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return False
    used = (backend or "nccl") if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(used, timeout=timeout)
        return True
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=timeout))
    number = store.add(f"stepgraph/groups_of_{rank}", 1)  # alike on all ranks, which join one group after another
    own = PrefixStore(f"stepgraph/{number}", store)
    dist.init_process_group(used, timeout=timeout, store=own, rank=rank, world_size=size)
    return True
