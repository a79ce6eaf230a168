"""The examples run as they stand, from any directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.processes import run_to_end

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_to_end([[sys.executable, str(example)]], environment, cwd=tmp_path)[0]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replayed" in done.stdout
