"""DDP over NCCL with one rank, each scenario in a process of its own: a hang fails its test and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepgraph
from tests.processes import run_to_end

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("nccl_worker.py")


def run_worker(scenario: str, store: Path, worker: Path = WORKER) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_DEBUG": "WARN"}
    command = [sys.executable, str(worker), scenario, str(store)]
    return run_to_end([command], environment)[0]


@pytest.mark.parametrize(
    "scenario", ["equality", "side stream", "default stream", "trained before", "hundredth iteration"]
)
def test_captured_ddp_equals_eager_ddp(scenario: str, tmp_path: Path) -> None:
    done = run_worker(scenario, tmp_path / "store")
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stderr


def test_graphed_ddp_equals_eager_ddp(tmp_path: Path) -> None:
    """DDP on a side stream, 11 warm-up iterations, make_graphed_callables, the loop."""
    done = run_worker("workflow", tmp_path / "store")
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stderr
    assert_quiet(done.stdout + done.stderr)


@pytest.mark.parametrize("implementation", ["eager", "scopes", "layers", "iteration", "te"])
def test_loop_with_nccl_ddp_trains_as_in_eager(implementation: str, tmp_path: Path) -> None:
    done = run_worker(implementation, tmp_path, WORKER.with_name("nccl_train_worker.py"))
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stderr
    assert_quiet(done.stdout + done.stderr)


def assert_quiet(log: str) -> None:
    found = [line for line in log.splitlines() if re.search(r"NCCL WARN|illegal memory access|CUDA error", line)]
    assert not found


@pytest.mark.parametrize("scenario", ["kept loss", "blocking wait"])
def test_ddp_that_cannot_be_captured_is_refused(scenario: str, tmp_path: Path) -> None:
    done = run_worker(scenario, tmp_path / "store")
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stderr


def test_default_stream_is_not_the_sessions() -> None:
    backend = stepgraph.backend_for("cuda")
    assert not backend.can_record_here()
    with stepgraph.Session(backend=backend) as session, session.stream():
        assert backend.can_record_here()
