"""The training loop on real gloo ranks: DDP gives eager's losses for every implementation, bit for bit."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_to_end

pytestmark = pytest.mark.xdist_group("training ranks")  # one worker: tests share what two ranks trained
ROOT = Path(__file__).parents[2]
Result = list[dict[str, Any]]
"""What each rank reported of a run."""


def train(folder: Path, runs: Mapping[str, Sequence[str]], ranks: int = 2) -> dict[str, Result]:
    """Run `torchrun`'s environment without torchrun: a process for each rank, which does one run after another."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    arguments: list[str] = []
    for name, wanted in runs.items():
        (folder / name).mkdir(parents=True)
        arguments += [*(["--then"] if arguments else []), str(folder / name), *wanted]
    commands = [
        ["env", f"RANK={rank}", sys.executable, str(ROOT / "tests" / "train_worker.py"), *arguments]
        for rank in range(ranks)
    ]
    done = run_to_end(commands, os.environ | given | {"MASTER_ADDR": "127.0.0.1"}, ROOT)
    assert [rank.returncode for rank in done] == [0] * ranks, [rank.stderr[-3000:] for rank in done]
    return {
        name: [json.loads((folder / name / f"result_{rank}.json").read_text()) for rank in range(ranks)]
        for name in runs
    }


LONGER = ["train.train_iters=14", "train.global_batch_size=8"]
"""DDP warms up for 11 iterations before the graph of an iteration is captured."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Result]:
    """All runs of two ranks, by name."""
    saving = ["train.global_batch_size=8", "train.train_iters=7", "checkpoint.save_interval=4"]
    gathered = "ddp.overlap_param_gather=true"
    last = folder / "te gathered" / "saved" / "step_00000004"
    return train(
        folder,
        {
            "eager": ["eager", *LONGER],
            "iteration": ["iteration", *LONGER],
            "te": ["te", *LONGER],
            "short": ["te", "train.global_batch_size=8", "--short", "1"],
            "plain": ["eager", *saving, f"checkpoint.save={folder / 'plain' / 'saved'}"],
            "eager gathered": ["eager", gathered, *saving, f"checkpoint.save={folder / 'eager gathered' / 'saved'}"],
            "te gathered": ["te", gathered, *saving, f"checkpoint.save={folder / 'te gathered' / 'saved'}"],
            "resumed": ["te", gathered, *saving, f"checkpoint.load={last}"],
        },
    )


def losses_of(result: Result) -> list[dict[str, float]]:
    return [rank["losses"] for rank in result]


@pytest.mark.parametrize("implementation", ["iteration", "te"])
def test_ddp_losses_equal_eager(trained: dict[str, Result], implementation: str) -> None:
    first, second = losses_of(trained["eager"])
    assert first == second, "every rank reports the mean"
    graphed = trained[implementation]
    assert losses_of(graphed) == [first, second]
    assert all(rank["replays"] > 0 for rank in graphed), graphed


@pytest.mark.long
def test_ddp_losses_of_scopes_equal_eager(trained: dict[str, Result], tmp_path: Path) -> None:
    graphed = train(tmp_path, {"scopes": ["scopes", *LONGER]})["scopes"]
    assert losses_of(graphed) == losses_of(trained["eager"])
    assert all(rank["replays"] > 0 for rank in graphed), graphed


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, id="pipeline", marks=pytest.mark.long), pytest.param(4, id="pipeline and data parallel")]
)
def test_pipeline_losses_equal_eager(tmp_path: Path, ranks: int) -> None:
    given = ["model.pipeline_model_parallel_size=2", "train.global_batch_size=16", "train.train_iters=6"]
    given += ["train.eval_interval=3", "train.eval_iters=1"]
    found = train(tmp_path, {"eager": ["eager", *given], "graphed": ["layers", *given]}, ranks)
    assert losses_of(found["graphed"]) == losses_of(found["eager"])
    assert all(rank["replays"] > 0 for rank in found["graphed"]), found["graphed"]


def test_one_rank_short_of_memory_means_all_are_eager(trained: dict[str, Result]) -> None:
    for rank in trained["short"]:
        assert rank["replays"] == 0
        assert sum(count for reason, count in rank["eager"].items() if reason.startswith("memory")) == 4


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"step_{step:08d}" / "shard_00000.pt", weights_only=True)
    return {name: tensor for name, tensor in found.items() if name.startswith("state.model")}


def test_gathered_parameters_equal_plain_ones(folder: Path, trained: dict[str, Result]) -> None:
    """Every loss depends on what hooks gathered; parameters are compared at the checkpoints, after 4 and 7 steps."""
    for name in ("eager gathered", "te gathered"):
        assert losses_of(trained[name]) == losses_of(trained["plain"]), name
        for step in (4, 7):
            one, other = (weights(folder / run / "saved", step) for run in ("plain", name))
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), (name, step)
    assert all(rank["replays"] > 0 for rank in trained["te gathered"])


def test_gathered_run_resumes_exactly(trained: dict[str, Result]) -> None:
    late = {step: loss for step, loss in trained["plain"][0]["losses"].items() if int(step) > 4}
    assert trained["resumed"][0]["losses"] == late
