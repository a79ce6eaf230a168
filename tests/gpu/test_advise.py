"""`stepgraph.advise` on a GPU: the verdict on scripts whose answer is known, and figures against what is measured."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

import stepgraph
from stepgraph.core.errors import NoStepError
from stepgraph.tools.advice.advise import is_no
from stepgraph.tools.advice.decide import DO_NOT, Bound, advise_on

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
FRAME = """
import torch
from torch import nn

torch.manual_seed(0)
{setup}
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, capturable=True)
x = torch.randn({shape}, device="cuda")


def train_step(x):
    optimizer.zero_grad(set_to_none=True)
    loss = net(x).square().mean()
    {inside}
    loss.backward()
    optimizer.step()
    return loss


for _ in range(100):
    loss = train_step(x)
    {outside}
"""
SMALL = "net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(30)]).cuda()"
LARGE = "net = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(4)]).cuda().bfloat16()"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child finds this copy of stepgraph, and works in a folder of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


def written(setup: str, shape: str, inside: str = "pass", outside: str = "pass") -> str:
    program = FRAME.format(setup=setup, shape=shape, inside=inside, outside=outside)
    if "bfloat16" in setup:
        program = program.replace('device="cuda")', 'device="cuda", dtype=torch.bfloat16)')
    Path("train.py").write_text(program)
    return "train.py"


def test_tiny_layers_are_launch_bound() -> None:
    report = stepgraph.advise(written(SMALL, "16, 64"), steps=10)
    assert report.advice is not None, report.cannot_judge
    assert report.measured is not None
    assert report.verdict == "launch-bound"
    assert report.advice.choice.choice == "whole step", report.advice
    assert report.measured.kernels > 100
    assert report.measured.small_kernels > 0.9 * report.measured.kernels
    layers = next(one for one in report.measured.regions if one.scope == "layers")
    assert layers.num_modules == 30
    assert 60 <= layers.kernels < report.measured.kernels, "forward and backward, without the optimizer"
    assert layers.host_ms > 0
    assert report.paste[-1].startswith("train_step = stepgraph.capture(train_step)")


def test_large_products_are_left_alone() -> None:
    """Beside other tests a step takes as long as they let it. The time of its own kernels stays what it is."""
    report = stepgraph.advise(written(LARGE, "16384, 8192"), steps=10)
    measured = report.measured
    assert measured is not None, report.cannot_judge
    assert measured.host_ms < measured.busy_ms, "the host is ahead of the GPU"
    assert measured.small_kernels < measured.kernels
    advice = advise_on(dataclasses.replace(measured, step_ms=measured.busy_ms))
    assert (advice.bound, advice.choice.choice) == (Bound.GPU, DO_NOT)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the GPU is this test's alone
        assert is_no(report), report.advice
        assert report.verdict == "GPU-bound"


def test_reads_in_the_step_are_named_with_their_line() -> None:
    script = written(SMALL, "16, 64", inside="print(loss.item())", outside="float(loss)")
    report = stepgraph.advise(script, steps=10)
    lines = Path(script).read_text().splitlines()
    (inside,) = report.facts["waits_inside"]
    (outside,) = report.facts["waits_outside"]
    assert lines[inside["line"] - 1].strip() == "print(loss.item())"
    assert lines[outside["line"] - 1].strip() == "float(loss)"
    assert report.measured is not None
    assert any("host-read" in why for why in report.measured.whole_step_forbidden)
    assert report.measured.outside_syncs == 1


CAPTURED = "train_step = stepgraph.capture(train_step)\n\n\nfor _ in range(100):"


@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_optimizers_between_graphs_are_known(optimizer: str) -> None:
    script = Path(written(SMALL, "16, 64"))
    script.write_text(script.read_text().replace("capturable=True", f"{optimizer}=True"))
    report = stepgraph.advise(str(script), steps=10)
    assert report.measured is not None, report.cannot_judge
    names = [part.name for part in report.measured.eager_parts]
    assert names == ([] if optimizer == "fused" else ["AdamW"])
    assert all(0 < part.host_ms < report.measured.host_ms for part in report.measured.eager_parts)


def test_scripts_with_graphs_are_refused() -> None:
    script = Path(written(SMALL, "16, 64"))
    script.write_text("import stepgraph\n" + script.read_text().replace("for _ in range(100):", CAPTURED))
    with pytest.raises(NoStepError) as refused:
        stepgraph.advise(str(script), steps=10)
    assert refused.value.rule == "script-graphed"


def test_trial_measures_what_was_predicted() -> None:
    report = stepgraph.advise(written(SMALL, "16, 64"), steps=10, tries=True)
    whole, compiled = report.trials
    assert whole.error == compiled.error == ""
    assert report.times is not None
    assert whole.step_ms is not None
    assert whole.replays > 10
    assert whole.step_ms < report.times.median
