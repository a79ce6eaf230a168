"""Nothing global is changed by a name, a module, a call or a command, but what each says that it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepgraph.commands.cli import COMMANDS

ROOT = Path(__file__).parents[2]
SEEDED = {"random", "numpy.random", "torch's generator"}
NAMES = sorted(function.__name__ for functions in COMMANDS.values() for function in functions)
RUNS = {
    "advise": ["tests/scripts/plain_loop.py"],
    "bench": ["--dry-run"],
    "check": ["tests/scripts/plain_loop.py"],
    "demo": ["--steps", "2", "--device", "cpu", "--plot", "none"],
    "doctor": [],
    "explain": ["hang"],
    "frozen": ["tests/scripts/captured.py"],
    "native": [],
    "recipes": [],
    "rules": [],
    "train": ["train.train_iters=2", "--device", "cpu"],
    "verify": ["tests/scripts/captured.py", "--steps", "4"],
}
"""The arguments of a short run of each command."""


def changes(*words: str) -> dict[str, list[str]]:
    """What a program of `tests.leaves_alone` has found, run in a process of its own."""
    command = [sys.executable, "-m", "tests.leaves_alone", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.usefixtures("new_processes")
def test_names_and_modules_change_nothing_global() -> None:
    assert changes("names") == {}


def test_calls_change_nothing_global() -> None:
    assert changes("uses") == {}


@pytest.mark.parametrize("name", NAMES)
def test_help_of_commands_changes_nothing_global(name: str) -> None:
    assert changes("command", name, "--help") == {}


@pytest.mark.parametrize("name", NAMES)
def test_commands_change_nothing_global(name: str, tmp_path: Path) -> None:
    found = changes("command", name, *RUNS[name])
    if name == "train":  # which seeds, as it says
        found = {command: rest for command, what in found.items() if (rest := sorted({*what} - SEEDED))}
    assert found == {}


SCRIPT = """
import random, sys
from pathlib import Path
import numpy, torch
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drawn = []
for index in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    if index == 1:
        import stepgraph
        stepgraph.capture, stepgraph.graph_modules
    drawn += [random.random(), numpy.random.rand(), torch.rand(()).item()]
Path(sys.argv[1]).write_text(repr((drawn, model.weight.tolist())))
"""


@pytest.mark.usefixtures("new_processes")
@pytest.mark.parametrize("command", [["python"], ["check", "--steps", "9"], ["frozen"], ["verify"], ["advise"]])
def test_script_that_seeds_draws_the_same_numbers(command: list[str], tmp_path: Path) -> None:
    """Whether it imports stepgraph or not, and whoever runs it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    (tmp_path / "plain.py").write_text(
        "".join(line for line in SCRIPT.splitlines(True) if "stepgraph" not in line).replace("    if index == 1:\n", "")
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    started = ["script.py"] if command == ["python"] else ["-m", "stepgraph", *command, "script.py", "--"]
    for words in (["plain.py"], started):
        file = str(tmp_path / words[0].partition(".")[0])
        subprocess.run([sys.executable, *words, file], env=environment, capture_output=True, cwd=tmp_path)
    results = [(tmp_path / words[0].partition(".")[0]).read_text() for words in (["plain.py"], started)]
    assert results[0] == results[1]
