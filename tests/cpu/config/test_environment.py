"""The environment is read once, into a record."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

import stepgraph
from stepgraph.config.environment import numbers_of


def test_environment_reads_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = stepgraph.Environment.read()
    assert dict(found.variables) == {"NCCL_GRAPH_REGISTER": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert found.has_expandable_segments
    assert (found.world_size, found.device) == (4, None)
    assert (found.compute_capability is None) == (not torch.cuda.is_available())
    assert (found.te_version is None) == (importlib.util.find_spec("transformer_engine") is None)
    assert stepgraph.Environment.read("cpu").compute_capability is None
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert stepgraph.Environment.read().world_size == 1


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.12.0", (2, 12, 0)), ("2.13.0rc1+abc", (2, 13, 0)), ("2.9.dev0", (2, 9)), ("x", ())]
)
def test_versions_are_compared_by_number(version: str, numbers: tuple[int, ...]) -> None:
    assert numbers_of(version) == numbers


@pytest.mark.usefixtures("new_processes")
def test_configurations_need_no_torch() -> None:
    program = (
        "import sys, stepgraph\n"
        "cfg = stepgraph.ConfigContainer().override(['model.cuda_graph_impl=local', 'train.train_iters=3'])\n"
        "cfg.validate(stepgraph.Environment()).to_toml()\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
