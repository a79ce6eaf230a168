"""`stepgraph verify` under torchrun: ranks over gloo compare together, the first prints, and all exit alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import NESTED

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("verifying ranks")]
ROOT = Path(__file__).parents[2]
DDP = """
import pathlib, torch, torch.distributed as dist, stepgraph
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
good, bad = (DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))) for _ in range(2))
good_optimizer, bad_optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (good, bad))
config = pathlib.Path(__file__).with_name(f"weight{rank}.txt")

@stepgraph.capture(warmup=1)
def good_step(x):
    good_optimizer.zero_grad()
    loss = good(x).square().mean()
    loss.backward()
    good_optimizer.step()
    return loss.detach()

@stepgraph.capture(warmup=1, audit=False)
def bad_step(x):
    bad_optimizer.zero_grad()
    loss = bad(x).square().mean() * float(config.read_text())
    loss.backward()
    bad_optimizer.step()
    return loss.detach()

torch.manual_seed(rank)
for index in range(16):
    config.write_text("0.5" if rank == 1 and index >= 13 else "1.0")
    good_step(torch.randn(4, 8))
    bad_step(torch.randn(4, 8))
"""
PIPELINE = """
import pathlib, sys, torch, torch.distributed as dist, stepgraph
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = pathlib.Path(__file__).with_name(f"weight{rank}.txt")
config.write_text("1.0")

class Block(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x)) * float(config.read_text())

torch.manual_seed(rank)
model = Block(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stage = PipelineStage(model, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
stepgraph.graph_stage(stage, schedule, warmup=1, audit=False)
for index in range(8):
    config.write_text("0.5" if rank == 1 and index >= 4 and "fault" in sys.argv else "1.0")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    optimizer.zero_grad()
    schedule.step(x) if rank == 0 else schedule.step(target=y)
    optimizer.step()
"""
RANK = """
import os, pathlib, sys
from stepgraph.commands.cli import app

try:
    app(["verify", *sys.argv[1:]])
except SystemExit as ended:
    pathlib.Path(f"code{os.environ['RANK']}").write_text(str(ended.code))
"""
"""Writes its exit code to a file, and ends with 0: torchrun ends all ranks as soon as one fails."""


def verified(folder: Path, script: str, *options: str) -> tuple[str, dict[str, Any]]:
    """Run two ranks of `stepgraph verify --json`; return their exit code, which is the same, and the result."""
    (folder / "train.py").write_text(script)
    (folder / "rank.py").write_text(RANK)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "rank.py", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | NESTED
    command = [*start, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=folder)
    codes = {(folder / f"code{rank}").read_text() for rank in range(2)}
    assert len(codes) == 1, done.stderr
    return codes.pop(), json.loads(done.stdout)


def test_ddp_steps_are_judged_on_both_ranks(tmp_path: Path) -> None:
    """One rank's number is frozen: the gradients of both differ, and all ranks make the experiments together."""
    code, found = verified(tmp_path, DDP, "--steps", "15")
    assert (code, found["verdict"]) == ("1", "different")
    good, bad = found["reports"]
    assert (good["verdict"], good["subject"], bad["verdict"], bad["subject"]) == (
        *("equal", "good_step"),
        *("different", "bad_step"),
    )
    assert good["replays"] > 0
    assert bad["cause"]["rule"] == "frozen-number"
    assert "on rank 1: " in bad["cause"]["what"]
    (own, other) = (rank["reports"][1]["cause"] for rank in found["ranks"])
    assert own == bad["cause"]
    assert other["what"] == own["what"].removeprefix("on rank 1: ")
    assert "config.read_text()" in other["where"]


@pytest.mark.parametrize("has_fault", [False, pytest.param(True, marks=pytest.mark.long)])
def test_graphed_stages_are_judged_on_both_ranks(tmp_path: Path, has_fault: bool) -> None:
    code, found = verified(tmp_path, PIPELINE, "--steps", "6", "--", *(["fault"] if has_fault else []))
    verdicts = [rank["verdicts"] for rank in found["ranks"]]
    if not has_fault:
        assert (code, found["verdict"], verdicts) == ("0", "equal", [["equal"], ["equal"]])
        assert all(rank["reports"][0]["replays"] for rank in found["ranks"])
        return
    assert (code, found["verdict"], verdicts) == ("1", "different", [["different"], ["different"]])
    (second,) = found["ranks"][1]["reports"]
    assert second["first_difference"]["step"] == 4
    assert second["first_module"].startswith("stage 1")
