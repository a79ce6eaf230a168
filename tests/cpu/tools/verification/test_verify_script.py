"""`verify_script` on scripts that run in this process: each kind of broken graph is caught and named.

Most faults are planted in stepgraph itself, because its guards and copies exist to prevent them. They act where graphs
are replayed, and leave the eager runs of the script alone.
"""

from __future__ import annotations

import gc
import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.engine.backends.tape.graph import TapeGraph
from stepgraph.engine.grads.param_grads import GradSlot
from stepgraph.engine.guards.protocol import GuardSet
from stepgraph.engine.memory.outputs import StaticOutputs
from stepgraph.tools.script.run import Outcome, Script, Status
from stepgraph.tools.verification.agreement import Agreement
from stepgraph.tools.verification.report import Verdict, VerifyReport
from stepgraph.tools.verification.script_trace import VerifyProbe
from stepgraph.tools.verification.verify_script import ScriptReport, verify_script

HEAD = """
import torch
import stepgraph
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
STEP = """
@stepgraph.capture(audit=False, warmup=1)
def train_step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
LOOP = """
for index in range(20):
    between(index)
    train_step(torch.randn(6, 4))
"""
MODULES = """
handle = stepgraph.graph_modules(model, ["0", "2"], audit=False, warmup=1)

def train_step(x):
    optimizer.zero_grad()
    for _ in range(2):
        model(x).square().mean().backward()
    optimizer.step()
"""
CALLABLE = """
model[2] = stepgraph.make_graphed_callables(model[2], (torch.randn(6, 8, requires_grad=True),), audit=False)

def train_step(x):
    optimizer.zero_grad()
    for _ in range(2):
        model(x).square().mean().backward()
    optimizer.step()
"""
MANAGER = """
class Passing(nn.Linear):
    def __call__(self, x):
        return manager(self, (x,), {})

model[2] = Passing(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
manager = stepgraph.CudaGraphManager(num_warmup_steps=1)

def train_step(x):
    optimizer.zero_grad()
    for _ in range(2):
        model(x).square().mean().backward()
    optimizer.step()
"""
INSTALLED = MANAGER.replace("manager = ", "installed = ").replace(
    "1)\n\ndef", "1, base_module=model[2], function_name='forward')\n\ndef"
)
INSTALLED = INSTALLED.replace("return manager(self, (x,), {})", "return super().__call__(x)")
KEPT = """
kept = []

def train_step(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter, old in zip(model.parameters(), kept):
        parameter.grad.add_(old, alpha=0.5)
    kept[:] = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
"""
SCALED = """
class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(config.read_text())

import pathlib
config = pathlib.Path(__file__).with_suffix(".txt")
model[2] = Scaled(8, 1)

def between(index):
    config.write_text("1.0" if index < 3 else "0.5")
between(0)
"""
NOTHING = "def between(index): pass\n"
SWAP = """
def between(index):
    if index == 3:
        model[2].weight.data = model[2].weight.data * 2
"""
HOOK = """
def clip(grad):
    return grad.clamp(-0.01, 0.01)

def between(index):
    if index == 3:
        model[2].weight.register_hook(clip)
"""


class Stopped(BaseException):
    """The probe has seen enough."""


class Running:
    """A script that runs in this process."""

    is_cuda_mapped = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def stop(self) -> None:
        raise Stopped

    def at_write(self, call: Callable[[str], None]) -> None:
        """Files do not matter here."""

    def saw(self, what: str) -> None:
        """No time limit ends the test."""


def run_here(script: Script, _: str, options: Mapping[str, Any], *, stdout_to_stderr: bool = False) -> Outcome:
    """What `run_script` does, in this process."""
    running: Any = Running(options)
    probe = VerifyProbe(running)
    code = compile(Path(script.target).read_text(), script.target, "exec")
    try:
        with probe.running():
            exec(code, {"__name__": "__main__", "__file__": script.target})
    except Stopped:
        pass
    return Outcome(Status.STOPPED, json.loads(json.dumps(dict(probe.result()))), 0)


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., ScriptReport]:
    def verify(*parts: str, **options: Any) -> ScriptReport:
        file = tmp_path / "train.py"
        file.write_text(HEAD + "".join(map(textwrap.dedent, parts)))
        return verify_script(Script(str(file)), runs=run_here, steps=5, **options)

    return verify


def only(report: ScriptReport) -> VerifyReport:
    assert report.verdict is Verdict.DIFFERENT, report
    (one,) = report.reports
    return one


def named(report: ScriptReport) -> str:
    cause = only(report).comparison.cause
    assert cause is not None
    return cause.rule


@pytest.mark.parametrize("graphed", [STEP, MODULES, CALLABLE, MANAGER, INSTALLED])
def test_script_that_is_right_is_equal(judged: Callable[..., ScriptReport], graphed: str) -> None:
    report = judged(NOTHING, graphed, LOOP)
    assert report.verdict is Verdict.EQUAL, report
    assert all(one.replays for one in report.reports)


@pytest.mark.parametrize("graphed", [STEP, MODULES, CALLABLE, MANAGER, INSTALLED])
@pytest.mark.parametrize(
    ("between", "rule", "told"),
    [(SWAP, "stale-parameter", ".weight`"), (HOOK, "skipped-hook", "clip on ")],
    ids=["parameter", "hook"],
)
def test_script_with_unguarded_change_is_named(
    judged: Callable[..., ScriptReport],
    monkeypatch: pytest.MonkeyPatch,
    graphed: str,
    between: str,
    rule: str,
    told: str,
) -> None:
    monkeypatch.setattr(GuardSet, "changed", lambda guards: ())
    report = judged(between, graphed, LOOP)
    assert named(report) == rule
    found = only(report).comparison
    assert found.cause is not None
    assert told in found.cause.what
    assert (found.cause.where is not None) == (between is HOOK), "the hook's own line, where it is new"
    assert found.first is not None
    assert found.first.step == 3


@pytest.mark.parametrize("graphed", [STEP, MODULES, CALLABLE])
def test_script_with_frozen_number_is_named(judged: Callable[..., ScriptReport], graphed: str) -> None:
    """A file is out of reach of the guards, and audits are off."""
    report = judged(SCALED, graphed, LOOP)
    assert named(report) == "frozen-number"
    cause = only(report).comparison.cause
    assert cause is not None
    assert "with 1.0 at step 2 and with 0.5 at step 3" in cause.what
    assert cause.where is not None
    assert "config.read_text()" in cause.where.source


@pytest.mark.parametrize("graphed", [MODULES, CALLABLE])
def test_script_with_kept_gradients_is_named(
    judged: Callable[..., ScriptReport], monkeypatch: pytest.MonkeyPatch, graphed: str
) -> None:
    """The script keeps gradients over `zero_grad`; the planted fault lets replays use their memory."""
    graphed = graphed.partition("def")[0] + KEPT
    assert judged(NOTHING, graphed, LOOP).verdict is Verdict.EQUAL

    def is_free(slot: GradSlot) -> bool:
        slot.given = None
        return True

    monkeypatch.setattr(GradSlot, "is_free", is_free)
    assert named(judged(NOTHING, graphed, LOOP)) == "aliased-gradient"


def test_script_with_reused_outputs_is_named(
    judged: Callable[..., ScriptReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StaticOutputs, "copier", lambda outputs: lambda: outputs.tree)
    report = judged(NOTHING, STEP, LOOP)
    assert (named(report), only(report).comparison.first) == ("reused-output", None)
    asked = STEP.replace("warmup=1", 'warmup=1, outputs="static"')
    assert judged(NOTHING, asked, LOOP).verdict is Verdict.EQUAL


def test_script_with_unregistered_random_state_is_named(
    judged: Callable[..., ScriptReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = TapeGraph.replay

    def without_state(graph: TapeGraph) -> None:
        before = torch.get_rng_state()
        replay(graph)
        torch.set_rng_state(before)

    monkeypatch.setattr(TapeGraph, "replay", without_state)
    dropout = "model.insert(1, nn.Dropout(0.5))\n"
    assert named(judged(dropout, NOTHING, STEP, LOOP)) == "rng-not-registered"


def test_script_whose_capture_touches_buffers_is_named(
    judged: Callable[..., ScriptReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a capture would whose warm-up is not undone: the statistics of BatchNorm are moved once more."""
    end = TapeGraph.end

    def and_count(graph: TapeGraph) -> None:
        end(graph)
        for module in [one for one in gc.get_objects() if type(one) is torch.nn.BatchNorm1d]:
            module.running_mean.add_(1.0)

    norm = "model.insert(1, nn.BatchNorm1d(8))\n"
    assert judged(norm, NOTHING, STEP, LOOP).verdict is Verdict.EQUAL
    monkeypatch.setattr(TapeGraph, "end", and_count)
    report = judged(norm, NOTHING, STEP, LOOP)
    assert named(report) == "buffers-at-warm-up"
    assert only(report).comparison.module == "model.1: buffers"


def test_agreement_decides_for_all_ranks() -> None:
    seen: list[Any] = []

    def gather(value: Any) -> list[Any]:
        seen.append(value)
        return [value, "other" if isinstance(value, str | None) else 3]

    both = Agreement(gather)
    assert (both.least(5), both.any(False), both.all(True)) == (3, True, True)
    assert both.first("own") == ("own", None)
    assert both.first(None) == ("other", 1)
    assert seen == [5, False, True, "own", None], "every rank gives its value at every decision"
    assert Agreement.of_process_group().first(None) == (None, None)
