"""What the server of a comparison has imported before it forks can be inherited: no CUDA, no threads, no processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.forked import NONE

PROGRAM = """
import json, os, pathlib
from stepgraph.lab.bench import worker
worker.prepare()
import torch
children = [pathlib.Path(f"/proc/self/task/{task}/children") for task in os.listdir("/proc/self/task")]
print(json.dumps({
    "threads": len(children),
    "children": "".join(path.read_text() for path in children if path.exists()),
    "cuda": torch.cuda.is_initialized(),
    "variables": [name for name in ("TORCH_WARM_POOL", "PYTORCH_NVML_BASED_CUDA_CHECK") if name in os.environ],
}))
if (pid := os.fork()) == 0:
    os._exit(torch.cuda._is_in_bad_fork())
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_server_imports_what_a_fork_can_inherit() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"} | NONE
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    facts, is_bad_fork = done.stdout.splitlines()
    assert json.loads(facts) == {"threads": 1, "children": "", "cuda": False, "variables": []}
    assert is_bad_fork == "0"
