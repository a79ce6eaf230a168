"""Orders read from torch's pipeline schedules against what two real processes over gloo then run."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import last_lines, run_ranks


def test_step_of_every_schedule_runs_the_order_of_its_rank(tmp_path: Path) -> None:
    assert last_lines(run_ranks("pipeline_order_worker", 2, tmp_path / "store")) == ["done"] * 2
