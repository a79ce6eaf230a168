"""The training loop on real gloo ranks: DDP gives eager's losses for every implementation, bit for bit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_to_end

ROOT = Path(__file__).parents[2]


def train(folder: Path, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run `torchrun`'s environment without torchrun: one process for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    done = run_ranks(folder, *arguments, ranks=ranks)
    assert [rank.returncode for rank in done] == [0] * ranks, [rank.stderr[-3000:] for rank in done]
    return [json.loads((folder / f"result_{rank}.json").read_text()) for rank in range(ranks)]


def run_ranks(folder: Path, *arguments: str, ranks: int) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    commands = [
        ["env", f"RANK={rank}", sys.executable, str(ROOT / "tests" / "train_worker.py"), str(folder), *arguments]
        for rank in range(ranks)
    ]
    return run_to_end(commands, os.environ | given | {"MASTER_ADDR": "127.0.0.1"}, ROOT)


@pytest.mark.parametrize(
    "implementations", [("iteration", "te"), pytest.param(("scopes",), marks=pytest.mark.long)], ids=str
)
def test_ddp_losses_equal_eager(tmp_path: Path, implementations: tuple[str, ...]) -> None:
    """DDP warms up for 11 iterations before the graph of an iteration is captured."""
    given = ["train.train_iters=14", "train.global_batch_size=8"]
    eager = train(tmp_path / "eager", "eager", *given)
    assert eager[0]["losses"] == eager[1]["losses"], "every rank reports the mean"
    for implementation in implementations:
        graphed = train(tmp_path / implementation, implementation, *given)
        assert [rank["losses"] for rank in graphed] == [rank["losses"] for rank in eager], implementation
        assert all(rank["replays"] > 0 for rank in graphed), (implementation, graphed)


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, id="pipeline", marks=pytest.mark.long), pytest.param(4, id="pipeline and data parallel")]
)
def test_pipeline_losses_equal_eager(tmp_path: Path, ranks: int) -> None:
    given = ["model.pipeline_model_parallel_size=2", "train.global_batch_size=16", "train.train_iters=6"]
    given += ["train.eval_interval=3", "train.eval_iters=1"]
    eager = train(tmp_path / "eager", "eager", *given, ranks=ranks)
    graphed = train(tmp_path / "graphed", "layers", *given, ranks=ranks)
    assert [rank["losses"] for rank in graphed] == [rank["losses"] for rank in eager]
    assert all(rank["replays"] > 0 for rank in graphed), graphed


@pytest.mark.parametrize(
    "implementations", [("te",), pytest.param(("scopes", "te layers"), marks=pytest.mark.long)], ids=str
)
def test_parts_of_stages_train_as_in_eager(tmp_path: Path, implementations: tuple[str, ...]) -> None:
    """With a tied embedding, whose copies on the first and the last stage stay equal."""
    given = ["model.pipeline_model_parallel_size=2", "train.global_batch_size=8", "train.train_iters=5"]
    given += ["train.eval_interval=3", "train.eval_iters=1", "model.share_embeddings_and_output_weights=true"]
    eager = train(tmp_path / "eager", "eager", *given)
    for implementation in implementations:
        saved = tmp_path / implementation / "saved"
        more = ["model.cuda_graph_scope=[]"] if implementation.endswith("layers") else []
        more.append(f"checkpoint.save={saved}")
        graphed = train(tmp_path / implementation, implementation.split()[0], *given, *more)
        assert [rank["losses"] for rank in graphed] == [rank["losses"] for rank in eager], implementation
        assert all(rank["replays"] > 0 for rank in graphed), (implementation, graphed)
        first, last = (weights(saved, 5, stage) for stage in (0, 1))
        assert torch.equal(first["state.model.embedding.weight"], last["state.model.head.weight"])


def test_one_rank_short_of_memory_means_all_are_eager(tmp_path: Path) -> None:
    found = train(tmp_path, "te", "train.global_batch_size=8", "--short", "1")
    for rank in found:
        assert rank["replays"] == 0
        assert sum(count for reason, count in rank["eager"].items() if reason.startswith("memory")) == 4


def weights(folder: Path, step: int, stage: int = 0) -> dict[str, torch.Tensor]:
    path = folder / f"step_{step:08d}" / f"shard_{stage:05d}.pt"
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return {name: tensor for name, tensor in found.items() if name.startswith("state.model")}


GATHERED = "ddp.overlap_param_gather=true"


@pytest.mark.parametrize(
    "implementation", ["te", *(pytest.param(name, marks=pytest.mark.long) for name in ("eager", "scopes"))]
)
def test_gathered_parameters_equal_plain_ones(tmp_path: Path, implementation: str) -> None:
    """After each step: a checkpoint gathers all parameters, of which a rank has updated a share."""
    given = ["train.global_batch_size=8", "train.train_iters=6", "checkpoint.save_interval=1"]
    runs = {"plain": ["eager"], "gathered": [implementation, GATHERED]}
    found = {
        name: train(tmp_path / name, *arguments, *given, f"checkpoint.save={tmp_path / name / 'saved'}")
        for name, arguments in runs.items()
    }
    assert [rank["losses"] for rank in found["gathered"]] == [rank["losses"] for rank in found["plain"]]
    assert all((rank["replays"] > 0) == (implementation != "eager") for rank in found["gathered"])
    for step in range(1, 7):
        one, other = (weights(tmp_path / run / "saved", step) for run in runs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), step


@pytest.mark.parametrize("implementation", ["te", pytest.param("scopes", marks=pytest.mark.long)])
def test_hooks_gather_before_each_use(tmp_path: Path, implementation: str) -> None:
    """No checkpoint gathers between the steps: every loss depends on what hooks gathered, also after a resume."""
    given = ["train.global_batch_size=8", "train.train_iters=6"]
    plain = train(tmp_path / "plain", "eager", *given)
    saved = ["checkpoint.save_interval=4", f"checkpoint.save={tmp_path / 'saved'}"]
    gathered = train(tmp_path / "gathered", implementation, GATHERED, *given, *saved)
    assert [rank["losses"] for rank in gathered] == [rank["losses"] for rank in plain]
    loading = f"checkpoint.load={tmp_path / 'saved' / 'step_00000004'}"
    resumed = train(tmp_path / "again", implementation, GATHERED, *given, loading)
    late = {step: loss for step, loss in plain[0]["losses"].items() if int(step) > 4}
    assert resumed[0]["losses"] == late
