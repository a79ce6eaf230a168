"""Starts the ranks of a real process group, each a process of its own, and collects how they ended."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from tests.processes import run_to_end

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """Hold the store over which ranks find each other, as torchrun does, and return the environment that names it.

    A free port that is only looked up may be another program's when rank 0 listens on it, seconds later. Then rank 0
    fails, and the other ranks wait for it for minutes.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), **own}


def run_ranks(worker: str, world: int, store: Path, *args: str) -> list[subprocess.CompletedProcess[str]]:
    """Run `tests/distributed/<worker>.py rank world store ...` for each rank; ranks that hang fail the test."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name(f"{worker}.py"))]
    return run_to_end([[*command, str(rank), str(world), str(store), *args] for rank in range(world)], environment)


def last_lines(ranks: list[subprocess.CompletedProcess[str]]) -> list[str]:
    """What each rank said last; its errors where it failed."""
    return [r.stdout.strip().splitlines()[-1] if r.returncode == 0 and r.stdout.strip() else r.stderr for r in ranks]


def end_together() -> None:
    """In a rank: end the process group. gloo aborts now and then where one process ends and its peer is at work."""
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
