"""Random programs through each engine: none differs in silence, raises a foreign error or ends its process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT
from tests.processes import run_to_end

SEEDS = {"capture": (0, 27, 9), "modules": (100, 112, 6), "callables": (200, 212, 6), "stage": (300, 309, 9)}
"""Of each engine: the first seed, the end, and how many a test takes."""
CHUNKS = [(engine, at, at + count) for engine, (first, end, count) in SEEDS.items() for at in range(first, end, count)]
MANY = 500
"""The seeds of a long test."""


def run(engine: str, first: int, end: int, tmp_path: Path) -> list[dict[str, object]]:
    """The outcomes of these seeds; fails with the scripts of failures."""
    file = tmp_path / "outcomes"
    command = [sys.executable, "-m", "tests.generated", "--seeds", f"{first}:{end}", "--engine", engine]
    given = ["--jobs", "1", "--shrink", "1", "--tries", "60", "--json", str(file)]
    (ended,) = run_to_end([command + given], {**os.environ, "PYTHONPATH": str(ROOT)}, ROOT)
    outcomes = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert ended.returncode == 0, f"{ended.stdout[-20000:]}\n{ended.stderr[-3000:]}"
    assert len(outcomes) == end - first
    return outcomes


@pytest.mark.parametrize(("engine", "first", "end"), CHUNKS)
def test_generated_programs_equal_eager(engine: str, first: int, end: int, tmp_path: Path) -> None:
    outcomes = run(engine, first, end, tmp_path)
    replayed = [outcome for outcome in outcomes if outcome.get("replays")]
    assert len(replayed) >= len(outcomes) // 3, "hardly a program was replayed"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 14_000, MANY))
@pytest.mark.parametrize("engine", SEEDS)
def test_many_generated_programs_equal_eager(engine: str, first: int, tmp_path: Path) -> None:
    run(engine, first, first + MANY // (1 if engine == "capture" else 4), tmp_path)
