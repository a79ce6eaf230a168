"""Programs that random search once found to differ from eager: each equals eager, or is refused by a rule."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from tests.forked import ROOT
from tests.generated.found import FOUND
from tests.generated.shrink import FAILED
from tests.processes import run_to_end

pytestmark = pytest.mark.xdist_group("found programs")  # one worker: one process runs them all


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The outcome of each program."""
    file = tmp_path_factory.mktemp("found") / "outcomes"
    command = [sys.executable, "-m", "tests.generated", "--found", "--jobs", "1", "--shrink", "0", "--json", str(file)]
    run_to_end([command], {**os.environ, "PYTHONPATH": str(ROOT)}, ROOT)
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {outcome["seed"]: outcome for outcome in found}


@pytest.mark.parametrize("name", FOUND)
def test_found_program_equals_eager(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    engine, program = FOUND[name]
    assert outcome["outcome"] not in (*FAILED, "invalid", "unstable"), f"{engine}: {outcome}\n{program}"
