"""`stepgraph verify SCRIPT`: real scripts in real processes, eager, eager again and graphed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepgraph.commands.base import ExitCode
from stepgraph.commands.cli import app
from stepgraph.tools.script.run import Script
from stepgraph.tools.verification.report import Verdict
from stepgraph.tools.verification.verify_script import ScriptReport, verify_script

HEAD = """
import json, pathlib, sys
import torch
import stepgraph
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
MANY = """
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
head = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1))
other = torch.optim.SGD(head.parameters(), lr=1e-2)
graphed = stepgraph.make_graphed_callables(torch.nn.Linear(16, 16), (torch.randn(4, 16, requires_grad=True),))
with stepgraph.graph_modules(head, ["0"]):
    @stepgraph.capture
    def train_step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @stepgraph.capture
    def evaluate(x):
        with torch.no_grad():
            return model(x).sum()

    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    for x, in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
        train_step(x)
        scheduler.step()
        evaluate(x)
        hidden = torch.randn(4, 16, requires_grad=True)
        other.zero_grad()
        head(graphed(hidden)).sum().backward()
        other.step()
"""
FROZEN = """
config = pathlib.Path(sys.argv[1])

@stepgraph.capture(audit=False)
def train_step(x):
    optimizer.zero_grad()
    weight = json.loads(config.read_text())["weight"]
    loss = model(x).square().mean() * weight
    loss.backward()
    optimizer.step()
    return loss.detach()

for i in range(20):
    config.write_text(json.dumps({"weight": 1.0 if i < 5 else 0.5}))
    train_step(torch.randn(4, 8))
"""


PLAIN = """
class Trainer:
    def train_step(self, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

trainer = Trainer()
for _ in range(20):
    trainer.train_step(torch.randn(4, 8))
"""


def written(folder: Path, text: str, *args: str, **options: Any) -> Script:
    file = folder / "train.py"
    file.write_text(HEAD + textwrap.dedent(text))
    return Script(str(file), args, timeout=120, **options)


def judged(script: Script, **options: Any) -> ScriptReport:
    return verify_script(script, stdout_to_stderr=True, **options)


def test_script_with_all_kinds_of_graphs_is_equal(tmp_path: Path) -> None:
    report = judged(written(tmp_path, MANY), steps=6)
    assert report.verdict is Verdict.EQUAL, report
    kinds = {one.subject: one.kind for one in report.reports}
    assert kinds == {
        "train_step": "captured step",
        "evaluate": "captured step",
        "the training step": "graphed parts",
    }
    assert all(one.replays for one in report.reports)


def test_named_step_of_a_plain_script_is_captured(tmp_path: Path) -> None:
    report = judged(written(tmp_path, PLAIN, step="Trainer.train_step"), steps=6)
    assert report.verdict is Verdict.EQUAL, report
    (one,) = report.reports
    assert (one.subject, one.replays) == ("train_step", 3)


def test_frozen_number_is_named_with_its_line(tmp_path: Path) -> None:
    script = written(tmp_path, FROZEN, str(tmp_path / "config.json"))
    report = judged(script)
    assert report.verdict is Verdict.DIFFERENT
    (one,) = report.reports
    found = one.comparison
    assert found.first is not None
    assert found.first.step == 5
    assert found.cause is not None
    assert (found.cause.rule, "0.5" in found.cause.what) == ("frozen-number", True)
    assert found.cause.where is not None
    assert "* weight" in found.cause.where.source


@pytest.mark.parametrize(
    ("text", "told", "code"),
    [
        ("model(torch.randn(4, 8))", "--step NAME", ExitCode.FINDINGS),
        ("raise ZeroDivisionError('of the script')", "of the script", ExitCode.SCRIPT),
    ],
)
def test_script_that_cannot_be_judged(tmp_path: Path, text: str, told: str, code: ExitCode) -> None:
    script = written(tmp_path, text)
    result = CliRunner().invoke(app, ["verify", script.target], env={"NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    assert told in " ".join(result.output.split())


UNGRAPHED = """
import pathlib, sys
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
steps = pathlib.Path(sys.argv[1], "steps")

def train_step():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()

def never_called():
    pass

try:
    for index in range(int(sys.argv[2])):
        train_step()
        steps.write_text(str(index + 1))
        if index == int(sys.argv[3]):
            torch.save(model.state_dict(), pathlib.Path(sys.argv[1], "model.pt"))
finally:
    torch.save(model.state_dict(), pathlib.Path(sys.argv[1], "model.pt"))
"""


@pytest.mark.parametrize(
    ("command", "words", "steps"),
    [
        (["verify"], ("100", "1000"), 20),
        (["verify"], ("100", "3"), 4),
        (["verify"], ("3", "1000"), 3),
        (["verify", "--step", "never_called"], ("100", "1000"), 20),
        (["frozen"], ("100", "1000"), 20),
        (["frozen", "--step", "never_called"], ("100", "3"), 4),
    ],
)
def test_script_that_graphs_nothing_overwrites_nothing(
    tmp_path: Path, command: list[str], words: tuple[str, str], steps: int
) -> None:
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_text("of a run that counts")
    script = written(tmp_path, UNGRAPHED)
    line = [command[0], script.target, *command[1:], "--json", "--", str(tmp_path), *words]
    result = CliRunner().invoke(app, line, env={"NO_COLOR": "1"})
    assert result.exit_code == ExitCode.FINDINGS, result.output
    assert checkpoint.read_text() == "of a run that counts"
    assert int((tmp_path / "steps").read_text()) == steps
    assert f"in its first {steps} steps, and was stopped" in result.output


@pytest.mark.parametrize("command", ["verify", "frozen"])
def test_script_at_its_time_limit_is_told_with_what_was_seen(tmp_path: Path, command: str) -> None:
    once = "\nstepgraph.capture(lambda x: model(x).sum().detach())(torch.randn(4, 8))\nimport time\ntime.sleep(1000)\n"
    script = written(tmp_path, HEAD + once)
    result = CliRunner().invoke(app, [command, script.target, "--timeout", "12"], env={"NO_COLOR": "1"})
    assert result.exit_code == ExitCode.SCRIPT, result.output
    told = " ".join(result.output.split())
    assert "was ended after 12 s, as --timeout says" in told
    assert "seen until then: " in told.replace("steps seen until then", "")
    assert "lambda" in told


def test_script_that_writes_out_of_reach_cannot_be_judged(tmp_path: Path) -> None:
    text = """
import queue
hidden = queue.SimpleQueue()
hidden.put(torch.zeros(8))

@stepgraph.capture
def step(x):
    tensor = hidden.get()
    tensor.add_(x)
    hidden.put(tensor)
    return x * 2

for _ in range(20):
    step(torch.ones(8))
"""
    report = judged(written(tmp_path, HEAD + text), steps=4)
    assert report.verdict is Verdict.CANNOT_JUDGE
    assert "writes to memory that nothing in its reach holds, at" in report.cannot_judge[0]
