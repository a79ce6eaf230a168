"""Pipelines with graphed stages in real processes over gloo: equal to eager ones, and ending when a rank is gone."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("pipeline ranks")  # one worker: tests share what two ranks did
Ranks = list[subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    store = tmp_path_factory.mktemp("two_ranks") / "store"
    return run_ranks("pipeline_stage_worker", 2, store, "equality", "neighbours")


def test_graphed_stages_of_every_schedule_equal_eager(ranks: Ranks) -> None:
    """1F1B, two virtual stages a rank interleaved, split backwards, and the rest: losses, gradients, all state."""
    assert all("equality: done" in rank.stdout.splitlines() for rank in ranks), [rank.stderr for rank in ranks]


def test_ranks_replay_and_drop_their_graphs_by_themselves(ranks: Ranks) -> None:
    assert [(rank.returncode, rank.stderr) for rank in ranks] == [(0, "")] * 2
    assert all("neighbours: done" in rank.stdout.splitlines() for rank in ranks)


def test_rank_that_is_killed_ends_the_others_with_an_error(tmp_path: Path) -> None:
    *others, last = run_ranks("pipeline_stage_worker", 3, tmp_path / "store", "killed")
    assert (last.returncode, last.stdout.split("\n")[0]) == (-signal.SIGKILL, "killed in a replayed step")
    assert [(other.returncode, other.stdout) for other in others] == [(1, "")] * 2
    assert all("RuntimeError" in other.stderr for other in others)


def test_rank_out_of_order_reports_it_and_ends_the_others(tmp_path: Path) -> None:
    first, second = run_ranks("pipeline_stage_worker", 2, tmp_path / "store", "out of order")
    assert (second.returncode, second.stdout) == (1, "")
    assert "weight gradient of stage 3, microbatch 0" in second.stderr
    assert "[replay-order]" in second.stderr
    assert (first.returncode, first.stdout) == (1, "")
