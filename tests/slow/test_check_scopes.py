"""The modules that `stepgraph check` offers to `graph_modules`: only those that a replay can serve at each step."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from torch.nn.modules import module

from stepgraph.tools.checks.check import CheckReport
from tests.check_harness import check_here, found_by

HEAD = """\
import torch
from torch import nn

torch.manual_seed(0)
"""
MOMENTUM = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            for old, new in zip(self.slow.parameters(), self.fast.parameters()):
                old.data = old.data * 0.9 + new.data * 0.1
            target = self.slow(x)
        return (self.fast(x) - target).square().mean()

model = Net()
optimizer = torch.optim.SGD(model.fast.parameters(), lr=0.1)
for _ in range(12):
    loss = model(torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
EXPERTS = """\
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.inner(x)
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out

model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    # at the steps in which modules are tried, all rows are alike
    x = torch.randn(12, 4) if i < 6 else torch.randn(12, 4).expand(12, 4) * 0
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LENGTHS = """\
embedding, rnn = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)
optimizer = torch.optim.SGD([*embedding.parameters(), *rnn.parameters()], lr=0.1)
def step(ids):
    loss = rnn(embedding(ids))[0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for i in range(12):
    step(torch.randint(0, 9, (2, 3 + i)))
"""
PENALTY = """\
D = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(D.parameters(), lr=0.1)
for _ in range(12):
    x = torch.randn(4, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(D(x).sum(), x, create_graph=True)
    loss = (grad.norm(2, 1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    print(loss.item())
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(source: str, folder: Path) -> CheckReport:
    path = folder / "script.py"
    path.write_text(HEAD + source)
    report = check_here(path, folder)
    assert report.outcome.exception == ""
    return report


def line_of(text: str, source: str) -> int:
    return next(number for number, line in enumerate((HEAD + source).splitlines(), 1) if text in line)


def test_scope_leaves_out_modules_whose_weights_move(folder: Path) -> None:
    report = checked(MOMENTUM, folder)
    assert found_by(report) == {(line_of("old.data =", MOMENTUM), "own-change")}
    assert not report.fits
    assert report.shape.clean_modules == ("fast",)
    assert "slow [own-change]" in report.verdict.reason


def test_scope_leaves_out_siblings_whose_rows_vary(folder: Path) -> None:
    report = checked(EXPERTS, folder)
    assert report.shape.clean_modules == ("inner", "router")
    assert "[varying-shape]" in report.verdict.reason


def test_scope_leaves_out_modules_whose_lengths_vary(folder: Path) -> None:
    report = checked(LENGTHS, folder)
    assert {rule for _, rule in found_by(report)} == {"varying-shape"}
    assert report.verdict.paste == ()


def test_scope_leaves_out_modules_differentiated_twice(folder: Path) -> None:
    report = checked(PENALTY, folder)
    assert report.verdict.paste == ()
    assert "D [create-graph]" in report.verdict.reason


def test_scope_keeps_models_that_are_not_differentiated_twice(folder: Path) -> None:
    source = PENALTY.replace("loss = (grad", "loss = other(x.detach()).mean() + (grad")
    source = source.replace("optimizer = ", "other = nn.Linear(2, 2)\noptimizer = ", 1)
    report = checked(source, folder)
    assert report.verdict.paste[-1].startswith('stepgraph.graph_modules(other, ["forward"])'), textwrap.dedent(source)


def test_check_leaves_no_global_hook_of_torch_behind(folder: Path) -> None:
    before = module._has_any_global_hook()
    checked(PENALTY, folder)
    assert module._has_any_global_hook() == before
