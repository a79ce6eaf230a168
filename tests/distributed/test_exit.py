"""How processes with live graphs and process groups end: the right exit code, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import last_lines, run_ranks
from tests.exiting import code_of, end_of


@pytest.mark.parametrize("ending", ["plain", "destroy", "destroy at exit", "close and destroy"])
def test_process_group_ends_cleanly(ending: str, tmp_path: Path) -> None:
    done = end_of("cpu", ending, str(tmp_path / "store"))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["trained", "ended"], "")


@pytest.mark.parametrize("ending", ["exit", "error", "interrupt"])
def test_process_that_is_cut_short_keeps_its_code(ending: str, tmp_path: Path) -> None:
    done = end_of("cpu", ending, str(tmp_path / "store"))
    assert (done.returncode, done.stdout.split()) == (code_of(ending), ["trained"])
    assert "ignored" not in done.stderr


def test_ranks_that_leave_a_step_open_end_cleanly(tmp_path: Path) -> None:
    assert last_lines(run_ranks("ddp_worker", 2, tmp_path / "store", "left open")) == ["done"] * 2


def test_rank_that_dies_takes_no_other_into_a_hang(tmp_path: Path) -> None:
    ranks = run_ranks("ddp_worker", 2, tmp_path / "store", "one dies")
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert ranks[1].stderr.rstrip().endswith("ValueError: the user's own error")
