"""A training program that ends in the way it is told to, for tests that look at how its process ends.

    python tests/exiting.py DEVICE ENDING [FILE]

With FILE it trains with DDP in a process group of one rank that meets there, over gloo or NCCL.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stepgraph
from tests.processes import run_to_end

ROOT = Path(__file__).parents[1]


def end_of(device: str, ending: str, *file: str, eager: bool = False) -> subprocess.CompletedProcess[str]:
    """Run this program in a process of its own; a process that hangs fails the test."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | ({"EAGER": "1"} if eager else {})
    command = [sys.executable, __file__, device, ending, *file]
    return run_to_end([command], environment)[0]


@functools.cache
def code_of_an_interrupt(device: str = "cpu") -> int:
    """What this program ends with, in eager, when it is interrupted: -2, unless a library at its end says else."""
    return end_of(device, "interrupt", eager=True).returncode


def code_of(ending: str, device: str = "cpu") -> int:
    """What a process must end with."""
    codes = {"plain": 0, "exit": 3, "error": 1}
    return codes[ending] if ending in codes else code_of_an_interrupt(device)


class Trainer:
    """A step that is captured and replayed."""

    def __init__(self, device: str, distributed: bool) -> None:
        self.device = device
        self.session = stepgraph.Session(backend="cuda" if device == "cuda" else "tape")
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        if distributed:
            with self.session.stream():
                model = DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.in_step: Callable[[], None] = lambda: None
        captured = stepgraph.capture(self.train, session=self.session, ignore=["self.in_step"])
        self.step: Callable[..., torch.Tensor] = self.train if "EAGER" in os.environ else captured

    def train(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.in_step()
        self.optimizer.step()
        return loss

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.step(torch.randn(4, 8, device=self.device))


def interrupted_soon() -> None:
    """A real signal from outside, while the loop below runs."""
    shell = f"sleep 1; kill -INT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", shell])


def end(ending: str, trainer: Trainer) -> None:
    if ending == "plain":
        return
    if ending == "exit":
        sys.exit(3)
    if ending == "error":
        raise ValueError("the user's own error")
    if ending == "interrupt":
        interrupted_soon()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            trainer.run(1)
    if ending == "interrupt in capture":
        trainer.step.reset()
        trainer.in_step = lambda: signal.raise_signal(signal.SIGINT) if is_capturing(trainer) else None
        trainer.run(20)
    if ending == "destroy":
        dist.destroy_process_group()
    if ending == "destroy at exit":
        atexit.register(dist.destroy_process_group)
    if ending == "close and destroy":
        trainer.step.close()
        trainer.session.close()
        dist.destroy_process_group()


def is_capturing(trainer: Trainer) -> bool:
    return trainer.session.backend.is_capturing()


def main(device: str, ending: str, *file: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, a process ignores it
    if file:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{file[0]}", rank=0, world_size=1)
    trainer = Trainer(device, distributed=bool(file))
    trainer.run(16)
    if isinstance(trainer.step, stepgraph.CapturedStep):
        report = trainer.step.report()
        assert (report.graphs, report.replays) == (1, 5 if file else 13)
    print("trained", flush=True)
    end(ending, trainer)
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
