"""Benchmarks that also run on the tape do run, reach what does not depend on speed, and say what they ran."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_around_the_step_trains_bit_equal_to_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--steps", "6", "--only", "training", "--out", str(tmp_path / "results")]
    assert load("around_the_step").main(options) == 0
    record = json.loads((tmp_path / "results" / "around_the_step.json").read_text())
    assert record == json.loads(capsys.readouterr().out)
    assert record["command"] == "python benchmarks/around_the_step.py --device cpu --steps 6 --only training"
    plain, scaled, whole = record["training"]
    for run in record["training"]:
        assert sum(run["differing"].values()) == 0
        assert run["train_step"]["replays"] == 3
        assert run["evaluate"]["replays"] == 2
    assert plain["skipped_steps"] == 0
    assert scaled["skipped_steps"] == whole["skipped_steps"] > 0
    assert [run["train_step"]["recaptures"] for run in record["training"]] == [0, 1, 0]
    assert whole["train_step"]["segments"] == 1


def test_around_the_step_counts_what_differs() -> None:
    module = load("around_the_step")
    one = {"losses": [torch.ones(2), torch.zeros(2)], "numbers": [{"lr": 0.1}]}
    two = {"losses": [torch.ones(2), -torch.zeros(2)], "numbers": [{"lr": 0.2}]}
    assert module.differing(one, one) == {"losses": 0, "numbers": 0}
    assert module.differing(one, two) == {"losses": 1, "numbers": 1}


def test_around_the_step_measures_the_memory_of_signatures() -> None:
    record = load("around_the_step").measure_memory(torch.device("cpu"))
    assert record["largest_first"]["graphs"] == record["smallest_first"]["graphs"] == 8
    assert 1.0 <= record["largest_first"]["pool_ratio"] <= min(1.3, record["smallest_first"]["pool_ratio"])
