"""`stepgraph check` on whole scripts, as users write them: no false alarm, no miss, the line exact.

What is to be found stands in the scripts (`# finds: RULE`). Most run one after another in this process; the shorter
list runs as the command does, in processes of its own, and `make test-long` runs all of them so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepgraph.tools.checks.check import check
from stepgraph.tools.checks.findings import Api
from stepgraph.tools.script.request import Status
from tests.check_harness import check_here, expected_in, found_by
from tests.forked import NESTED, NONE
from tests.processes import run_to_end

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
FITS = {
    "accelerated": Api.CAPTURE,
    "accumulation": Api.CAPTURE,
    "amp_scaler": Api.CAPTURE,
    "batch_norm": Api.CAPTURE,
    "branch_on_loss": Api.MODULES,
    "clipping": Api.CAPTURE,
    "compiled": Api.CAPTURE,
    "contrastive": Api.CAPTURE,
    "curriculum": Api.NOTHING,
    "distillation": Api.CAPTURE,
    "ema": Api.CAPTURE,
    "function_whole": Api.MODULES,
    "gan": Api.CAPTURE,
    "hf_bert": Api.MODULES,
    "hf_gpt2": Api.MODULES,
    "hf_llama": Api.CAPTURE,
    "hf_vit": Api.CAPTURE,
    "lbfgs": Api.MODULES,
    "lightning_module": Api.MODULES,
    "lr_by_hand": Api.CAPTURE,
    "mamba_like": Api.CAPTURE,
    "masked": Api.MODULES,
    "mixup": Api.MODULES,
    "plain_loop": Api.CAPTURE,
    "reinforce": Api.CAPTURE,
    "rnn": Api.CAPTURE,
    "scheduler": Api.CAPTURE,
    "step_function": Api.CAPTURE,
    "trainer_class": Api.CAPTURE,
    "two_optimizers": Api.CAPTURE,
    "workers": Api.CAPTURE,
}
"""Each script with what fits it. `ddp` runs under torchrun."""
LIBRARIES = {"accelerated": "accelerate", "lightning_module": "lightning", "hf": "transformers"}


def needs(name: str) -> None:
    """Skip a script whose library is not installed."""
    library = LIBRARIES.get(name, LIBRARIES.get(name.partition("_")[0]))
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def assert_as_marked(report: Any, name: str) -> None:
    path = SCRIPTS / f"{name}.py"
    assert report.outcome.status in (Status.COMPLETED, Status.STOPPED), report.outcome.exception
    assert report.outcome.cannot_judge == ()
    assert found_by(report) == expected_in(path.read_text())
    assert all(finding.where is not None and finding.where.file == str(path) for finding in report.findings)
    assert report.verdict.api is FITS[name]
    assert report.fits == (FITS[name] is Api.CAPTURE)


def command(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"} | (env or NESTED)
    return run_to_end([[sys.executable, "-m", *words]], settings)[0]


@pytest.mark.parametrize("name", FITS)
def test_check_of_a_whole_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(name)
    monkeypatch.chdir(tmp_path)
    assert_as_marked(check_here(SCRIPTS / f"{name}.py", tmp_path), name)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FITS)
def test_check_of_a_whole_script_in_its_process(name: str) -> None:
    needs(name)
    assert_as_marked(check(str(SCRIPTS / f"{name}.py"), stdout_to_stderr=True), name)


@pytest.mark.timeout(300)
def test_check_command_prints_findings_and_exits_with_one() -> None:
    done = command("stepgraph", "check", str(SCRIPTS / "masked.py"), "--steps", "4", "--json", env=NONE)
    assert done.returncode == 1, done.stderr
    values = json.loads(done.stdout)
    assert values["verdict"] == "graph_modules"
    (finding,) = values["findings"]
    assert (finding["rule"], finding["steps"]) == ("host-read", 4)
    assert "F.cross_entropy(logits[mask], tokens[mask])" in finding["source"]
    assert values["next"] == "stepgraph rules host-read"


@pytest.mark.timeout(300)
def test_check_command_of_a_clean_script_exits_with_zero() -> None:
    done = command("stepgraph", "check", str(SCRIPTS / "step_function.py"))
    assert done.returncode == 0, done.stderr
    assert "The whole step can be captured: stepgraph.capture fits." in done.stdout
    assert "train_step = stepgraph.capture(train_step)  # before the loop" in done.stdout
    assert "step_function.py:23" in done.stdout, "the print between the steps is listed"


@pytest.mark.timeout(300)
def test_check_command_of_a_failing_script_exits_with_three(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(3))\n")
    done = command("stepgraph", "check", str(script))
    assert done.returncode == 3
    assert "script-failed" in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("forks", [NESTED, pytest.param(NONE, marks=pytest.mark.long)], ids=["forks", "new processes"])
def test_check_under_torchrun_prints_once(forks: dict[str, str]) -> None:
    words = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "stepgraph", "check", str(SCRIPTS / "ddp.py"))
    done = command(*words, "--steps", "5", env=forks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("The whole step can be captured") == 1


def test_check_captures_the_steps_function_where_asked(tmp_path: Path) -> None:
    """On a GPU by default; here on the tape."""
    script = tmp_path / "script.py"
    script.write_text((SCRIPTS / "step_function.py").read_text().replace("range(8)", "range(20)"))
    report = check_here(script, tmp_path, 4, captures=True)
    assert report.verdict.api is Api.CAPTURE
    assert report.shape.replays == 3
    assert "The step was captured, and replayed 3 times." in report.verdict.reason


def test_check_reports_a_capture_that_fails(tmp_path: Path) -> None:
    """A result that no graph can return is seen by a capture only."""
    script = tmp_path / "script.py"
    source = (SCRIPTS / "step_function.py").read_text().replace("range(8)", "range(20)")
    script.write_text(
        source.replace("    return loss\n", "    return loss, object()\n").replace("loss = tr", "loss, _ = tr")
    )
    report = check_here(script, tmp_path, 4, captures=True)
    assert {finding.rule for finding in report.findings} == {"varying-output"}
    assert report.verdict.api is Api.MODULES


def test_check_of_a_script_with_graphs_points_to_verify(tmp_path: Path) -> None:
    report = check_here(ROOT / "examples" / "plain_loop.py", tmp_path)
    assert report.verdict.api is Api.UNKNOWN
    assert report.is_graphed
    assert "stepgraph verify" in report.verdict.reason
