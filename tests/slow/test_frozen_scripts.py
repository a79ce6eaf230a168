"""`stepgraph frozen` on whole scripts, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import NESTED

ROOT = Path(__file__).parents[2]

HEAD = """
import os
import sys
import torch
import stepgraph

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weight = 0.5
PARTS = ("HIDDEN", "SCALE")


def train_step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean() * weight * float(os.environ.get("_".join(PARTS), "1"))
    loss.backward()
    optimizer.step()
    return loss

"""
CAPTURED = """
step = stepgraph.capture(train_step)
for i in range(100):
    step(torch.randn(2, 4))
    print("call", i)
"""
TWO = """
other_weight = 2.0
steps = [stepgraph.capture(train_step), stepgraph.capture(lambda x: x * other_weight, ignore=["other_weight"])]
for i in range(1000):
    for step in steps:
        step(torch.randn(2, 4))
"""


def run(tmp_path: Path, text: str, *options: str) -> tuple[int, dict[str, Any], str]:
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "stepgraph", "frozen", "--json", *options, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | NESTED
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    return done.returncode, json.loads(done.stdout), done.stderr


def states(values: dict[str, Any]) -> dict[str, str]:
    return {value["name"]: value["state"] for step in values["steps"] for value in step["values"]}


def test_frozen_command_examines_second_call_and_stops(tmp_path: Path) -> None:
    code, values, shown = run(tmp_path, HEAD + CAPTURED)
    assert (code, values["findings"], values["status"]) == (0, 0, "stopped")
    assert states(values)["weight"] == "watched"
    assert states(values)["optimizer.param_groups[0]['lr']"] == "watched"
    assert "call 0" in shown
    assert "call 1" not in shown


def test_frozen_command_finds_environment_out_of_reach(tmp_path: Path) -> None:
    code, values, _ = run(tmp_path, HEAD + CAPTURED, "--env", "HIDDEN_SCALE=2")
    assert (code, values["findings"]) == (1, 1)
    found = next(value for value in values["steps"][0]["values"] if value["state"] == "baked")
    assert found["name"] == "os.environ['HIDDEN_SCALE']"
    entry = found["entries"][0]
    assert (Path(entry["file"]).name, entry["line"]) == ("train.py", 15)


def test_frozen_command_examines_every_captured_step(tmp_path: Path) -> None:
    code, values, _ = run(tmp_path, HEAD + TWO)
    assert [step["step"] for step in values["steps"]] == ["train_step", "<lambda>"]
    assert (code, states(values)["other_weight"]) == (1, "baked")


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("raise ValueError('mine')", 3, "ValueError: mine"),
        (HEAD + "train_step(torch.ones(2, 4))", 1, "--step"),
        (HEAD + "stepgraph.capture(train_step)(torch.ones(2, 4))", 1, "called only once"),
        (HEAD + "s = stepgraph.capture(lambda x: float(x.sum()))\nfor _ in range(9): s(torch.ones(2))", 1, "host"),
    ],
    ids=["raises", "without a captured step", "called once", "cannot be captured"],
)
def test_frozen_command_tells_what_it_cannot_judge(tmp_path: Path, text: str, code: int, told: str) -> None:
    found, values, _ = run(tmp_path, text)
    assert found == code, values
    assert told in json.dumps([values.get("not_judged"), values.get("error")])


def test_frozen_command_refuses_bad_usage(tmp_path: Path) -> None:
    assert run(tmp_path, HEAD, "--env", "NAME")[0] == 2
    command = [sys.executable, "-m", "stepgraph", "frozen", str(tmp_path / "missing.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "script-missing" in done.stderr


def test_frozen_command_examines_named_function(tmp_path: Path) -> None:
    loop = "for i in range(100):\n    train_step(torch.randn(2, 4))\n"
    code, values, _ = run(tmp_path, HEAD + loop, "--step", "train_step")
    assert (code, values["status"]) == (0, "stopped")
    assert states(values)["weight"] == "watched"
