"""The command line: what it prints, and what it exits with."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.bench.demo import MIN_STEPS, run_demo
from stepgraph.cli import app

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def test_demo_json_is_only_json_and_equal() -> None:
    result = runner.invoke(app, ["demo", "--steps", "8", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["equal"] is True
    assert values["parameters_equal"] is True
    assert values["equality"].endswith("losses and all parameters equal eager's, the parameters bit for bit")
    assert values["loss_difference"] == 0.0
    assert values["backend"] == "tape"
    assert values["speedup"] is None
    assert values["steps"] == 8
    assert values["replays"] > 0
    assert values["graphs"] >= 1
    # The plain AdamW stays eager, so it cuts the step.
    assert values["segments"] >= 2


def test_demo_table_says_what_it_shows_without_a_gpu() -> None:
    result = runner.invoke(app, ["demo", "--steps", "6", "--device", "cpu"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in ("step time", "parameters equal", "segments", "capture time", "speed needs a GPU"):
        assert text in result.stdout


@pytest.mark.slow
def test_demo_leaves_torch_settings_as_they_were() -> None:
    torch.manual_seed(7)
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state())
    phases: list[str] = []
    run_demo(MIN_STEPS, 0, torch.device("cpu"), phases.append)
    assert phases == ["eager"] * MIN_STEPS + ["graphed"] * MIN_STEPS
    assert torch.get_num_threads() == before[0]
    assert torch.are_deterministic_algorithms_enabled() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    "arguments",
    [["--device", "abacus"], ["--device", "meta"], ["--device", "cuda:99"], ["--steps", str(MIN_STEPS - 1)]],
)
def test_demo_refuses_what_it_cannot_run(arguments: list[str]) -> None:
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_version_is_the_project_version() -> None:
    result = runner.invoke(app, ["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert result.exit_code == 0
    assert result.stdout == f"stepgraph {project['version']}\n"


def test_unknown_command_exits_with_usage() -> None:
    result = runner.invoke(app, ["no-such-command"])
    assert result.exit_code == 2
    assert "no-such-command" in result.output
