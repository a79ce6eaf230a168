"""`stepgraph check` on a GPU: torch's own warnings of waits count, and the step's function is captured for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepgraph.tools.checks.check import check
from stepgraph.tools.checks.findings import Api
from tests.check_harness import expected_in, found_by

SCRIPTS = Path(__file__).parents[1] / "scripts"
TRAINING = """\
import torch
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train_step(x, y):
    loss = F.cross_entropy(model(x), y)
{inside}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


for step in range(30):
    x, y = torch.randn(16, 8, device="cuda"), torch.randint(4, (16,), device="cuda")
    loss = train_step(x, y)
    if step % 10 == 0:
        print(loss.item())
"""
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def script(folder: Path, inside: str = "    pass") -> Path:
    path = folder / "train.py"
    path.write_text(TRAINING.format(inside=inside))
    return path


def test_check_captures_a_clean_step_for_real(tmp_path: Path) -> None:
    report = check(str(script(tmp_path)), steps=5, stdout_to_stderr=True)
    assert report.outcome.exception == ""
    assert report.findings == ()
    assert report.verdict.api is Api.CAPTURE
    assert report.shape.function == "train_step"
    assert report.shape.replays > 0


@pytest.mark.parametrize(
    "inside",
    [
        "    lr = loss.cpu()  # finds: host-read",
        "    torch.cuda.synchronize()  # finds: host-read",
        "    first = loss.detach().to('cpu')  # finds: host-read",
        "    loss = loss + F.cross_entropy(model(x[y > 1]), y[y > 1])  # finds: host-read",
        "    loss = loss * torch.tensor(2.0, device='cuda')  # finds: host-data, host-read",
    ],
)
def test_check_finds_waits_on_the_device(tmp_path: Path, inside: str) -> None:
    path = script(tmp_path, inside)
    report = check(str(path), steps=5, stdout_to_stderr=True)
    assert report.outcome.exception == ""
    assert found_by(report) == expected_in(path.read_text())


def test_check_leaves_host_tensors_alone(tmp_path: Path) -> None:
    inside = "    sizes = lengths.tolist()"
    path = script(tmp_path, inside)
    path.write_text("import torch\nlengths = torch.ones(3)\n" + path.read_text())
    assert found_by(check(str(path), steps=4, stdout_to_stderr=True)) == set()


def test_check_finds_random_numbers_of_the_host(tmp_path: Path) -> None:
    path = script(tmp_path, "    noise = torch.rand(3)  # finds: host-random")
    assert found_by(check(str(path), steps=4, stdout_to_stderr=True)) == expected_in(path.read_text())


@pytest.mark.parametrize("name", ["amp_scaler", "gan"])
def test_check_of_scripts_for_a_gpu_on_one(name: str) -> None:
    report = check(str(SCRIPTS / f"{name}.py"), steps=5, stdout_to_stderr=True)
    assert report.outcome.exception == ""
    assert report.findings == ()
