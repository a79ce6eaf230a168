"""SIGINT and SIGTERM to training processes parked at each stage: they save, end in order, and resume exactly."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepgraph.lab.train import pretrain
from stepgraph.lab.train.checkpoint import checkpoints_in
from tests.distributed.ranks import meeting_place
from tests.train_harness import gpt, tiny

ROOT = Path(__file__).parents[2]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
LIMIT_S = 120
"""For a process that hangs; no test asks how long one takes."""


@contextlib.contextmanager
def started(folder: Path, *arguments: str, ranks: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a worker for each rank; those still alive at the end are killed."""
    found = []
    with meeting_place() as place:
        for rank in range(ranks):
            group = {"RANK": str(rank), "WORLD_SIZE": str(ranks), **place}
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | (group if ranks > 1 else {})
            command = [sys.executable, str(ROOT / "tests" / "train_worker.py"), str(folder), *arguments]
            with (folder / f"err_{rank}").open("wb") as log:
                found.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT))
        try:
            yield found
        finally:
            for process in found:
                process.kill()
                process.wait()


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)


@functools.cache
def whole_losses(implementation: str, ranks: int) -> dict[str, float]:
    """The losses of an unbroken run."""
    with tempfile.TemporaryDirectory() as folder:
        return losses_of(Path(folder), implementation, ranks=ranks)


def losses_of(folder: Path, *arguments: str, ranks: int = 1) -> dict[str, float]:
    """Train to the end: a single rank in this process, several in processes of their own."""
    if ranks == 1:
        cfg = tiny(folder, arguments[0]).override(arguments[1:])
        report = pretrain(cfg, model_provider=gpt, device="cpu", quiet=True)
        return {str(step): loss for step, loss in report.losses.items()}
    with started(folder, *arguments, ranks=ranks) as processes:
        codes = [process.wait(LIMIT_S) for process in processes]
    assert codes == [0] * ranks, (folder / "err_0").read_text()
    found: dict[str, float] = json.loads((folder / "result_0.json").read_text())["losses"]
    return found


CASES = [
    ("warmup", "te", signal.SIGINT, 1),
    ("capture", "te", signal.SIGTERM, 1),
    pytest.param("recording", "iteration", signal.SIGINT, 1, marks=pytest.mark.long),
    ("recording", "iteration", signal.SIGTERM, 1),
    ("replay", "iteration", signal.SIGTERM, 1),
    ("checkpoint", "scopes", signal.SIGINT, 1),
    ("replay", "te", signal.SIGINT, 2),
    pytest.param("warmup", "te", signal.SIGTERM, 2, marks=pytest.mark.long),
    pytest.param("checkpoint", "te", signal.SIGTERM, 2, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("place", "implementation", "number", "ranks"), CASES)
def test_signal_saves_and_resumes_exactly(
    tmp_path: Path, place: str, implementation: str, number: signal.Signals, ranks: int
) -> None:
    saved = tmp_path / "saved"
    given = [implementation, f"checkpoint.save={saved}", "checkpoint.save_interval=5"]
    with started(tmp_path, *given, "--park", place, ranks=ranks) as processes:
        for rank, process in enumerate(processes):
            wait_for(tmp_path / f"parked_{rank}", process, tmp_path / f"err_{rank}")
        processes[-1].send_signal(number)
        time.sleep(0.2)
        assert processes[-1].poll() is None, "the signal waits for the end of the step, the capture or the save"
        (tmp_path / "go_on").touch()
        codes = [process.wait(LIMIT_S) for process in processes]
    assert codes == [CODES[number]] * ranks, (tmp_path / "err_0").read_text()
    step = checkpoints_in(saved)[-1][0]
    assert 0 < step < 6
    assert not list(saved.glob("*.partial"))
    resumed = losses_of(tmp_path, *given, f"checkpoint.load={saved}", ranks=ranks)
    whole = whole_losses(implementation, ranks)
    assert resumed == {at: loss for at, loss in whole.items() if int(at) > step}


@pytest.mark.usefixtures("new_processes")
@pytest.mark.parametrize("number", CODES)
def test_second_signal_leaves_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, "te", "--park", "replay") as (process,):
        wait_for(tmp_path / "parked_0", process, tmp_path / "err_0")
        process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None, "the first one waits for the end of the step"
        process.send_signal(number)
        assert process.wait(LIMIT_S) == CODES[number]
