"""Configurations on a machine with a GPU: the environment is the real one, and the engines capture what it allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepgraph

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def test_environment_reads_the_gpu() -> None:
    found = stepgraph.Environment.read()
    assert found.compute_capability == torch.cuda.get_device_capability()
    assert stepgraph.Environment.read("cuda").device == "cuda"
    assert stepgraph.ConfigContainer().validate(found, run=True).dist.distributed_backend == "nccl"


@pytest.mark.parametrize(("register", "is_refused"), [("0", False), ("1", True)])
def test_expandable_segments_are_refused_by_capability(register: str, is_refused: bool) -> None:
    """In a process of its own: the allocator reads its variable once."""
    program = (
        "import stepgraph, torch\n"
        "torch.ones(1, device='cuda')\n"
        "cfg = stepgraph.ConfigContainer().override(['model.cuda_graph_impl=local'])\n"
        "try:\n"
        "    cfg.validate()\n"
        "except stepgraph.ConfigError as error:\n"
        "    print(error.rule)\n"
    )
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": register}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    is_old = torch.cuda.get_device_capability() < (10, 0)
    assert done.stdout.strip() == ("expandable-segments" if is_refused and is_old else "")
