"""Collectives inside a captured step, with real processes over gloo."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import last_lines, run_ranks


def test_collectives_in_a_captured_step_equal_eager(tmp_path: Path) -> None:
    assert last_lines(run_ranks("worker", 2, tmp_path / "store")) == ["rank 0: equal", "rank 1: equal"]


def test_rank_that_records_alone_communicates_nothing(tmp_path: Path) -> None:
    """Every collective of gloo, a loss that is reduced, DDP: rank 0 captures again, or audits, and rank 1 replays."""
    ranks = run_ranks("one_recorder_worker", 2, tmp_path / "store", "collectives", "reduced loss", "ddp", "audits")
    assert last_lines(ranks) == ["done", "done"]
