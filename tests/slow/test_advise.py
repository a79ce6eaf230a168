"""`stepgraph advise` with real scripts, in real processes or in this one, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.commands.cli import app
from stepgraph.tools.advice.trial import try_captures
from stepgraph.tools.script.run import Script, Status, run_script
from tests.check_harness import run_here

long = pytest.mark.long
PROBE = "stepgraph.tools.advice.measure:MeasureProbe"
ROOT = Path(__file__).parents[2]
LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train_step(x):
    optimizer.zero_grad(set_to_none=True)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
for _ in range(60):
    train_step(torch.randn(4, 8))
"""
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said without a GPU")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child finds this copy of stepgraph, and works in a folder of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def written(program: str) -> str:
    Path("train.py").write_text(program)
    return "train.py"


def advised(program: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and stderr of the command."""
    done = CliRunner().invoke(app, ["advise", written(program), "--json", *arguments], env={"NO_COLOR": "1"})
    return done.exit_code, json.loads(done.stdout), done.stderr


def measured_here(program: str, folder: Path, steps: int = 3) -> dict[str, Any]:
    """What the probe reports of a program that runs in this process."""
    outcome = run_here(Path(written(program)).resolve(), folder, PROBE, {"steps": steps})
    assert outcome.exception == ""
    return dict(outcome.result)


CAPTURED = "train_step = stepgraph.capture(train_step)"
GRAPHED = {
    "a captured step": ("\nfor _", f"\nimport stepgraph\n{CAPTURED}\nfor _"),
    "graphed modules": ("\nfor _", '\nimport stepgraph\nstepgraph.graph_modules(net, scope=["*"])\nfor _'),
    "a step captured while it is timed": (
        "    train_step(",
        f"    if _ == 6:\n        import stepgraph\n        {CAPTURED}\n    train_step(",
    ),
}


@no_gpu
@pytest.mark.parametrize("case", GRAPHED)
def test_probe_stops_before_graphs_are_disturbed(case: str, tmp_path: Path) -> None:
    found = measured_here(LOOP.replace(*GRAPHED[case]), tmp_path)
    assert found["is_graphed"]
    assert len(found["times_ms"]) <= 1


@no_gpu
def test_probe_reports_optimizers_between_graphs(tmp_path: Path) -> None:
    schedule = (
        "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)\nother = torch.optim.Adam(net[0].parameters())\n"
    )
    program = LOOP.replace("def train_step", f"{schedule}def train_step").replace(
        "    return", "    other.step()\n    return"
    )
    program = program.replace("(4, 8))", "(4, 8))\n    scheduler.step()")
    scheduled, counting = measured_here(program, tmp_path)["optimizers"]
    assert (scheduled["name"], scheduled["inside"]) == ("SGD", False)
    assert scheduled["reason"] == "its numbers change: param_groups[0]['lr']"
    assert (counting["name"], counting["reason"]) == ("Adam", "its step count is on the host")
    assert scheduled["calls"] == counting["calls"] == 1
    assert 0 < scheduled["host_fraction"] < 1


@no_gpu
def test_probe_reports_optimizers_inside_the_graph(tmp_path: Path) -> None:
    (optimizer,) = measured_here(LOOP, tmp_path)["optimizers"]
    assert (optimizer["inside"], optimizer["reason"]) == (True, "SGD uses no step count")


@long
@no_gpu
def test_advise_refuses_a_script_with_graphs() -> None:
    code, values, stderr = advised(LOOP.replace(*GRAPHED["a captured step"]))
    assert (code, values["error"]["rule"]) == (1, "script-graphed")
    assert "stepgraph verify" in values["error"]["fix"]
    assert "the script uses stepgraph already" in stderr


@long
@no_gpu
def test_advise_without_a_gpu_gives_the_checks() -> None:
    code, values, _ = advised(LOOP, "--", "--lr", "1")
    assert code == 1
    assert "no GPU" in values["cannot_judge"][0]
    assert (values["verdict"], values["choice"], values["predictions"]) == ("cannot judge", None, [])
    assert values["check"]["verdict"] == "capture"
    assert [scope["scope"] for scope in values["facts"]["scopes"]] == ["layers"]
    assert values["ladder"][2][1] == 'graphs = stepgraph.graph_modules(net, scope=["*"])'
    assert values["ladder"][5][1] == "train_step = stepgraph.capture(train_step)"
    assert values["next"] == "stepgraph verify train.py --step train_step -- --lr 1"


@long
@pytest.mark.parametrize(
    ("program", "code", "rule"),
    [
        ("import torch\nraise RuntimeError('broken')\n", 3, "script-failed"),
        ("def broken(:\n", 3, "script-failed"),
        ("import torch\nprint(torch.nn.Linear(2, 1)(torch.ones(2)))\n", 1, "no-step"),
        ("raise SystemExit(0)\n", 1, "no-step"),
    ],
)
def test_advise_answers_scripts_without_steps(program: str, code: int, rule: str) -> None:
    found, values, stderr = advised(program)
    assert found == code
    assert values["error"]["rule"] == rule
    assert "stepgraph/tools/advice" not in stderr, "the traceback is the script's alone"


FAILING = {
    "hangs": ("import time\ntime.sleep(600)\n", 3, "script-timeout"),
    "raises": ("raise RuntimeError('broken')\n", 3, "script-failed"),
    "exits": ("raise SystemExit(0)\n", 1, "no-step"),
}


@long
@pytest.mark.parametrize("case", FAILING)
def test_advise_runs_a_script_once_that_fails(case: str) -> None:
    program, code, rule = FAILING[case]
    begun = "with open('starts.txt', 'a') as file:\n    print('start', file=file)\n"
    found, values, _ = advised(begun + program, "--timeout", "12")
    assert (found, values["error"]["rule"]) == (code, rule)
    assert Path("starts.txt").read_text().split() == ["start"]


def test_advise_refuses_a_script_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["advise", "no_such_file.py"], env={"NO_COLOR": "1"})
    assert done.exit_code == 2
    assert "there is no file no_such_file.py" in done.stderr


@long
@no_gpu
def test_probe_goes_through_all_phases() -> None:
    outcome = run_script(Script(written(LOOP)), PROBE, {"steps": 3}, stdout_to_stderr=True)
    found = outcome.result
    assert (outcome.status, outcome.steps, outcome.exception) == (Status.STOPPED, 13, "")
    assert len(found["times_ms"]) == 3
    assert min(*found["times_ms"], found["host_ms"], found["outside_ms"]) > 0
    assert (found["model"]["name"], found["model"]["count"]) == ("net", 1)
    (layers,) = found["scopes"]
    assert layers["calls"] == 3
    assert 0 < layers["host_fraction"] < 1


@long
@no_gpu
def test_trial_captures_the_step_of_the_script() -> None:
    script = Script(written(LOOP), step="train_step")
    plain, compiled = try_captures(script, 3, stdout_to_stderr=True)
    assert (plain.error, plain.name, compiled.name) == ("", "whole step", "whole step + compile")
    assert plain.step_ms is not None
    assert plain.step_ms > 0
    assert plain.replays >= 3
    assert compiled.error == ""
    assert compiled.replays >= 3, "on the tape compiled code runs as its eager operators"
