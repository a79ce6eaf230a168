"""DistributedDataParallel in a captured step, with real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import last_lines, run_ranks


@pytest.mark.parametrize("which", ["equality", pytest.param("equality of others", marks=pytest.mark.long)])
def test_captured_ddp_equals_eager_ddp(tmp_path: Path, which: str) -> None:
    """Three ranks: with two, a division and a multiplication by one half have the same bits."""
    assert last_lines(run_ranks("ddp_worker", 3, tmp_path / "store", which)) == ["done"] * 3


def test_capture_failure_in_ddp_backward_leaves_a_working_ddp(tmp_path: Path) -> None:
    assert last_lines(run_ranks("ddp_worker", 2, tmp_path / "store", "broken")) == ["done"] * 2


def test_ddp_step_that_falls_back_to_modules(tmp_path: Path) -> None:
    """Dropless experts: all ranks graph the same modules, also where one rank alone could graph more."""
    assert last_lines(run_ranks("ddp_worker", 2, tmp_path / "store", "fallback")) == ["done"] * 2


def test_ddp_fallback_of_one_rank_waits_for_none(tmp_path: Path) -> None:
    """Only one rank's capture fails; it goes on in eager after a while."""
    assert last_lines(run_ranks("ddp_worker", 2, tmp_path / "store", "fallback, alone")) == ["done"] * 2


def test_graphed_ddp_equals_eager_ddp(tmp_path: Path) -> None:
    """DDP on two ranks, 11 warm-up iterations, make_graphed_callables, the loop."""
    assert last_lines(run_ranks("ddp_worker", 2, tmp_path / "store", "workflow")) == ["done"] * 2


def test_graphed_young_ddp_makes_the_buckets_of_eager(tmp_path: Path) -> None:
    """Three ranks: the bits of a sum depend on a gradient's place in its bucket, and a graph decides the places."""
    assert last_lines(run_ranks("ddp_worker", 3, tmp_path / "store", "workflow, cold")) == ["done"] * 3


def test_graphed_layers_report_to_the_ddp_around_them(tmp_path: Path) -> None:
    assert last_lines(run_ranks("ddp_worker", 2, tmp_path / "store", "layers inside")) == ["done"] * 2
