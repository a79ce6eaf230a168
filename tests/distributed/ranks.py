"""Starts the ranks of a real process group, each a process of its own, and collects how they ended."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from tests.processes import run_to_end

ROOT = Path(__file__).parents[2]


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
