"""The command line: what it prints, and what it exits with."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.bench.demo import MIN_STEPS, DemoResult, DemoRun, run_demo
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
    assert values["eager_losses"] == values["graphed_losses"]
    assert len(values["graphed_times_ms"]) == 8


def test_demo_shows_a_table_a_chart_and_what_tape_times_mean() -> None:
    arguments = ["demo", "--steps", "6", "--device", "cpu", "--plot", "none"]
    result = runner.invoke(app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in ("parameters equal", "segments", "capture time", "its step times say nothing about a GPU's"):
        assert text in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    (loss,) = (line for line in lines if line[:2] == ["loss", "eager"])
    assert len(loss[2]) == 6, "a letter for each step"
    (time,) = (line for line in lines if line[:3] == ["step", "time", "eager"])
    assert time[3].startswith("█")
    assert time[-1] == "ms"
    assert "peak memory" not in result.stdout, "the tape has no figure"


@pytest.mark.parametrize("name", ["runs.svg", "runs.png"])
def test_demo_draws_a_picture_where_asked(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    from stepgraph.bench.demo_view import draw_demo

    run = DemoRun(losses=(3.0, 2.0, 1.5, 1.2, 1.0, 0.9), times_ms=(9.0, 3.0, 3.0, 40.0, 2.0, 1.0), peak_bytes=None)
    result = DemoResult("cpu", "tape", "2.13", 0, run, run, (), {"replays": 3, "audits": 1})
    draw_demo(result, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


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
    [
        ["--device", "abacus"],
        ["--device", "meta"],
        ["--device", "cuda:99"],
        ["--steps", str(MIN_STEPS - 1)],
        ["--plot", "runs.txt"],
        ["--plot", "no/such/folder/runs.png"],
    ],
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
