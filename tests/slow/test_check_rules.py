"""Each rule of `stepgraph check`: scripts that break it, found at the line, and their fixed forms."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from stepgraph.tools.checks.findings import GROUPS
from tests.check_harness import check_here, expected_in, found_by

HEAD = """\
import logging
import queue
import random
import threading

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
"""
LOOP = """\
{before}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(5):
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
{outside}
    out = model(x)
{inside}
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
{after}
"""


def loop(inside: str = "", before: str = "", outside: str = "", after: str = "") -> str:
    """A training loop with these lines in its step, before the loop, before the step and after it."""
    parts = {"inside": inside, "outside": outside, "after": after}
    return HEAD + LOOP.format(before=before, **{name: textwrap.indent(text, "    ") for name, text in parts.items()})


BAD = {
    "host-file": [
        loop("bias = torch.load('bias.pt')  # finds: host-file\nout = out + bias"),
        loop("with open('log.txt', 'a') as file:  # finds: host-file\n    file.write('step')"),
    ],
    "tokenizer": [
        loop("ids = Tokenizer.encode('a text')  # finds: tokenizer", before="from tokenizers import Tokenizer"),
        loop(
            "ids = tokenizer.encode('a text')  # finds: tokenizer",
            before="import tiktoken\n\ntokenizer = tiktoken.Encoding()",
        ),
    ],
    "host-random": [
        loop("if random.random() < 2:  # finds: host-random\n    out = out * 2"),
        loop("np.random.shuffle(order)  # finds: host-random", before="order = [1, 2, 3]"),
    ],
    "host-print": [
        loop("print('shape', out.shape)  # finds: host-print"),
        loop("if i % 2 == 0:\n    print('step', i)  # finds: host-print"),
    ],
    "host-logging": [
        loop("log.info('step %d', i)  # finds: host-logging", before="log = logging.getLogger()\nlog.setLevel('INFO')"),
        loop("logging.warning('a step')  # finds: host-logging"),
    ],
    "host-value": [
        loop("history.append(i)  # finds: host-value", before="history = []"),
        loop(
            "out = count(out)",
            before="class State:\n    calls = 0\n\nstate = State()\ndef count(out):\n"
            "    state.calls += 1  # finds: host-value\n    return out",
        ),
        loop("seen += 1  # finds: host-value", before="seen = 0"),
    ],
    "iterator": [
        loop("out = out + next(noise)  # finds: iterator", before="noise = iter(torch.zeros(20, 4))"),
        loop("kept = next(numbers)  # finds: iterator", before="import itertools\n\nnumbers = itertools.count()"),
    ],
    "reseed": [
        loop("torch.manual_seed(3)  # finds: reseed\nout = F.dropout(out, 0.5)"),
        loop(
            "g.manual_seed(i)  # finds: reseed\nout = out + torch.rand(4, generator=g)", before="g = torch.Generator()"
        ),
    ],
    "own-change": [
        loop(
            "out = norm(out)",
            before="class Norm(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('mean', torch.zeros(()))\n    def forward(self, x):\n"
            "        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()"
            "  # finds: own-change\n        return x - self.mean\nnorm = Norm()",
        ),
        loop(
            "out = out + gate.weight.sum()\ngate.weight = nn.Parameter(torch.ones(2))  # finds: own-change",
            before="gate = nn.Linear(2, 1)",
        ),
        loop(
            "for old, new in zip(average.parameters(), model.parameters()):\n"
            "    old.data = old.data * 0.9 + new.data * 0.1  # finds: own-change\nout = out + average.weight.sum()",
            before="average = nn.Linear(8, 16)",
        ).replace("model.parameters()):", "model[0].parameters()):"),
        loop(
            "for gate in gates:\n    set_gate(gate)  # finds: own-change\n    out = out + gate.weight.sum()",
            before="gates = [nn.Linear(2, 1)]\nset_gate = eval('lambda gate: setattr(gate, "
            "\\'weight\\', nn.Parameter(gate.weight + 1))')",
        )
        .replace("  # finds: own-change", "")
        .replace("out = model(x)", "out = model(x)  # finds: own-change"),
    ],
    "host-read": [
        loop("scale = out.abs().max().item()  # finds: host-read, varying-number\nout = out / scale")
        .replace("host-read, varying-number", "host-read")
        .replace("out = out / scale", "out = out / scale  # finds: varying-number"),
        loop("out = out + out[out > 0].mean()  # finds: host-read"),
        loop("values = out.tolist()  # finds: host-read"),
    ],
    "library-call": [
        loop("values = torch.linalg.svd(out)[1]  # finds: library-call\nout = out / values[0].detach()"),
        loop("values = torch.linalg.eigh(out.T @ out)[0]  # finds: library-call"),
    ],
    "varying-shape": [
        loop("out = out + x[: i + 1].mean()  # finds: varying-shape"),
        loop("out = model(x[: 4 + i % 2])  # finds: varying-shape\ny = y[: 4 + i % 2]"),
    ],
    "varying-number": [
        loop("out = out * (1 + i)  # finds: varying-number"),
        loop("out = F.softmax(out / temperature, -1)  # finds: varying-number", outside="temperature = 2.0 - 0.1 * i"),
    ],
    "varying-operations": [
        loop("if i % 2:  # finds: varying-operations\n    out = out.relu()"),
        loop("for _ in range(1 + i % 3):  # finds: varying-operations\n    out = out.tanh()"),
    ],
    "moving-address": [
        loop("mean = 0.9 * mean + 0.1 * out.detach().mean()  # finds: moving-address", before="mean = torch.zeros(())"),
        loop("out, h = out + h, torch.tanh(out.detach() + h)  # finds: moving-address", before="h = torch.zeros(6, 4)"),
    ],
    "host-data": [
        loop("out = out * torch.tensor([1.0, 2.0, 3.0, 4.0])  # finds: host-data"),
        loop("out = out + torch.as_tensor(np.ones(4, dtype=np.float32))  # finds: host-data"),
    ],
    "legacy-stream": [
        loop("with torch.cuda.stream(torch.cuda.default_stream()):  # finds: legacy-stream\n    out = out * 2"),
        loop(
            "side.wait_stream(torch.cuda.default_stream())  # finds: legacy-stream\nwith torch.cuda.stream(side):\n"
            "    out = out * 2\ntorch.cuda.current_stream().wait_stream(side)",
            before="side = torch.cuda.Stream()",
        ),
    ],
    "other-thread": [
        loop(
            "thread = threading.Thread(target=work)\nthread.start()\nthread.join()",
            before="def work():\n    return torch.ones(3).sum()  # finds: other-thread",
        ),
        loop(
            "todo.put(1)\ndone.get()",
            before="todo, done = queue.Queue(), queue.Queue()\ndef serve():\n    while todo.get():\n"
            "        done.put(torch.zeros(2) + 1)  # finds: other-thread\n"
            "threading.Thread(target=serve, daemon=True).start()",
        ),
    ],
    "optimizer-closure": [
        loop(after="lbfgs.step(lambda: F.mse_loss(model(x), x[:, :4]))  # finds: optimizer-closure").replace(
            "for i in", "lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1)\nfor i in"
        ),
        HEAD + "w = nn.Linear(2, 1)\noptimizer = torch.optim.LBFGS(w.parameters(), max_iter=2)\nx = torch.randn(5, 2)\n"
        "def closure():\n    optimizer.zero_grad()\n    loss = w(x).square().mean()\n    loss.backward()\n"
        "    return loss\n"
        "for _ in range(4):\n    optimizer.step(closure)  # finds: optimizer-closure\n",
    ],
}
"""Scripts that break each rule. What is to be found stands in the line."""
GOOD = {
    "host-file": [
        loop("out = out + bias", outside="bias = torch.load('bias.pt')"),
        loop(after="with open('log.txt', 'a') as file:\n    file.write('step')"),
    ],
    "tokenizer": [
        loop(outside="ids = Tokenizer.encode('a text')", before="from tokenizers import Tokenizer"),
        loop(after="ids = tokenizer.encode('a')", before="import tiktoken\n\ntokenizer = tiktoken.Encoding()"),
    ],
    "host-random": [
        loop("out = out + 0.1 * torch.randn_like(out)", outside="scale = random.random()"),
        loop(after="np.random.shuffle(order)", before="order = [1, 2, 3]"),
    ],
    "host-print": [loop(after="print(i, loss)"), loop(outside="print('shape', x.shape)")],
    "host-logging": [
        loop(after="logging.warning('loss %f', loss.item())"),
        loop("log.debug('not shown')", before="log = logging.getLogger('quiet')\nlog.setLevel('ERROR')"),
    ],
    "host-value": [
        loop(after="history.append(loss.item())", before="history = []"),
        loop("parts = []\nfor part in out.split(2):\n    parts.append(part)\nout = torch.cat(parts)"),
    ],
    "iterator": [
        loop("out = out + noise", outside="noise = next(noises)", before="noises = iter(torch.zeros(20, 4))"),
        loop(after="kept = next(numbers)", before="import itertools\n\nnumbers = itertools.count()"),
    ],
    "reseed": [
        loop("out = F.dropout(out, 0.5)", outside="torch.manual_seed(i)"),
        loop("out = out + torch.rand(4, generator=g)", before="g = torch.Generator().manual_seed(3)"),
    ],
    "own-change": [
        loop("out = nn.functional.dropout(out, 0.1)"),
        loop("mean.mul_(0.9).add_(out.detach().mean(), alpha=0.1)", before="mean = torch.zeros(())"),
        loop(
            "kept = gate.weight.data\ngate.weight.data = kept * 2\nout = out + gate.weight.sum()\n"
            "gate.weight.data = kept",
            before="gate = nn.Linear(2, 1)",
        ),
        loop(outside="gate.weight.data = gate.weight.data * 2", before="gate = nn.Linear(2, 1)"),
        HEAD + "gate = nn.Linear(2, 1)\noptimizer = torch.optim.SGD(gate.parameters(), lr=0.1)\ndef step(x):\n"
        "    gate.weight.requires_grad = True\n    loss = gate(x).square().mean()\n    loss.backward()\n"
        "    optimizer.step()\n    gate.weight.requires_grad = False\n"
        "for _ in range(6):\n    step(torch.randn(4, 2))\n",
    ],
    "host-read": [
        loop("out = torch.where(out > 0, out, 0.1 * out)"),
        loop("one = F.one_hot(y, 4)\nout = out * one.float().mean()", after="print(loss.item())"),
    ],
    "library-call": [
        loop("out = out / torch.linalg.vector_norm(out.detach())"),
        loop(after="print(torch.linalg.svd(out.detach())[1])"),
    ],
    "varying-shape": [loop("out = out + x[:3].mean()"), loop(outside="x = x.repeat(1, 1)")],
    "varying-number": [
        loop("out = out * weight", outside="weight.fill_(i)", before="weight = torch.zeros(())"),
        loop(outside="for group in optimizer.param_groups:\n    group['lr'] = 0.1 / (1 + i)"),
    ],
    "varying-operations": [
        loop("if i % 2:\n    pass\nout = out.relu()"),
        loop("for layer in range(3):\n    out = out.tanh()"),
    ],
    "moving-address": [
        loop("mean.lerp_(out.detach().mean(), 0.1)\nout = out - mean", before="mean = torch.zeros(())"),
        loop("h = torch.zeros(6, 4)\nout = torch.tanh(out + h)"),
    ],
    "host-data": [
        loop("out = out * scale", before="scale = torch.tensor([1.0, 2.0, 3.0, 4.0])"),
        loop("out = out * torch.full((4,), 2.0) + torch.arange(4)", outside="z = torch.tensor([1.0, i])"),
    ],
    "legacy-stream": [
        loop(outside="torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())"),
        loop(
            "side.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(side):\n    out = out * 2\n"
            "torch.cuda.current_stream().wait_stream(side)",
            before="side = torch.cuda.Stream()",
        ),
    ],
    "other-thread": [
        loop(before="thread = threading.Thread(target=lambda: torch.ones(3).sum())\nthread.start()\nthread.join()"),
        loop("thread = threading.Thread(target=lambda: sum(range(9)))\nthread.start()\nthread.join()"),
    ],
    "optimizer-closure": [
        loop(after="optimizer.state_dict()"),
        HEAD + "w = nn.Linear(2, 1)\noptimizer = torch.optim.Rprop(w.parameters())\nx = torch.randn(5, 2)\n"
        "for _ in range(4):\n    loss = w(x).square().mean()\n    optimizer.zero_grad()\n    loss.backward()\n"
        "    optimizer.step()\n",
    ],
}
"""The same rules kept."""
PACKAGES = {
    "tokenizers": "class Tokenizer:\n    @staticmethod\n    def encode(text):\n        return [len(text)]\n",
    "tiktoken": "class Encoding:\n    def encode(self, text):\n        return [len(text)]\n",
}
"""Stand-ins of libraries, in a folder that looks like an installed one."""
CASES = [
    (rule, kind, n) for kind, table in (("bad", BAD), ("good", GOOD)) for rule in table for n in range(len(table[rule]))
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import torch

    installed = tmp_path / "site-packages"
    for name, text in PACKAGES.items():
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", ["", str(installed), *sys.path])
    monkeypatch.chdir(tmp_path)
    torch.save(torch.ones(4), tmp_path / "bias.pt")
    return tmp_path


def test_rules_have_two_scripts_of_each_kind() -> None:
    applied = {rule for rules in GROUPS.values() for rule in rules}
    for table in (BAD, GOOD):
        assert set(table) == applied
        assert all(len(scripts) >= 2 for scripts in table.values())


@pytest.mark.parametrize(("rule", "kind", "number"), CASES, ids=lambda value: str(value))
def test_check_finds_what_a_script_breaks(rule: str, kind: str, number: int, folder: Path) -> None:
    source = (BAD if kind == "bad" else GOOD)[rule][number]
    path = folder / "script.py"
    path.write_text(source)
    report = check_here(path, folder)
    assert report.outcome.exception == ""
    expected = expected_in(source)
    assert found_by(report) == expected
    assert (rule in {one for _, one in expected}) == (kind == "bad")
    assert report.fits == (kind == "good")
