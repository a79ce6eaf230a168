"""Models that FSDP2 shards, with real processes over gloo: refused by name, or trained on in eager; no crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import last_lines, run_ranks


@pytest.mark.parametrize(
    "engines",
    [("raise", "eager", "modules", "unreached", "first_version"), ("graph_modules", "callables")],
    ids=["capture", "pairs"],
)
def test_sharded_model_is_refused_by_name_or_runs_eagerly(engines: tuple[str, ...], tmp_path: Path) -> None:
    """A rank that ends by a signal has a negative exit code, and its lines are not these."""
    ranks = run_ranks("fsdp_worker", 2, tmp_path / "store", *engines)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert last_lines(ranks) == ["done"] * 2
    assert [rank.stdout.split()[:-1] for rank in ranks] == [list(engines)] * 2
