"""Collectives inside a captured step, with real processes over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_collectives_in_a_captured_step_equal_eager(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("worker.py")
    command = [sys.executable, str(worker)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert [output.strip().splitlines()[-1] for output in outputs] == ["rank 0: equal", "rank 1: equal"]
