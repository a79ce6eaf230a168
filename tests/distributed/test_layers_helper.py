"""Layers captured ahead on the ranks of a pipeline, with real processes over gloo."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import last_lines, run_ranks


def test_helper_ranks_capture_together_also_one_without_layers(tmp_path: Path) -> None:
    done = run_ranks("layers_helper_worker", 2, tmp_path / "store")
    assert last_lines(done) == ["rank 0: done", "rank 1: done"]
