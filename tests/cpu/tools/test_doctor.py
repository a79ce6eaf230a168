"""`doctor`: what is there, what is missing, without secrets, also where torch is broken or missing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stepgraph
from stepgraph.commands.cli import app
from stepgraph.core import catalogue
from stepgraph.tools.doctor import DoctorReport, broken_rules, doctor, part, shown_variables

ROOT = Path(__file__).parents[3]
PLAIN = {"NO_COLOR": "1", "COLUMNS": "80"}
runner = CliRunner()
SECRETS = {
    "HF_TOKEN": "hf_plantedplantedplanted",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/secret",
    "NCCL_SECRET": "planted-secret",
    "TORCH_AUTH_HEADER": "Bearer planted",
    "NCCL_NOTE": "hf_plantedShort",
    "TORCH_CONTACT": "ghp_plantedplanted",
    "CUDA_CACHE_ID": "a8f5f167f44f4964e6c998dee827110c",
    "PYTORCH_INDEX": "https://planted:pa%24%24word@host.example/simple?token=plantedtoken#planted",
    "TORCH_PROXY": "socks5://plantedtoken@host.example:1080",
}
"""Each holds `planted`, or is listed below."""
OPEN = {
    "NCCL_DEBUG": "INFO",
    "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8,max_split_size_mb:512",
    "NVTE_FLASH_ATTN": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, ["doctor", *arguments], env=PLAIN)


def status(report: DoctorReport, name: str) -> str:
    (found,) = (each.status for each in report.parts if each.name == name)
    return found


# -- what is found


def test_doctor_reports_this_installation() -> None:
    report = stepgraph.doctor()
    assert (report.stepgraph, report.torch_error) == (stepgraph.__version__, None)
    assert report.torch is not None
    assert (report.torch.version, report.torch.cuda) == (torch.__version__, torch.version.cuda)
    assert report.torch.sees_gpu == torch.cuda.is_available() == bool(report.gpus)
    assert status(report, "torch") == status(report, "Python") == status(report, "typer") == "ok"
    names = {each.name for each in report.parts}
    assert {"Nsight Systems", "APEX", "Transformer Engine", "Megatron core", "C++ guards", "cuda-bindings"} <= names
    assert "accelerate" not in names, "nothing here uses it"
    assert {"torchao", "matplotlib", "nvidia-ml-py", "transformers", "NVIDIA GPU", "CUDA of torch"} <= names
    assert all(each.purpose and each.command for each in report.parts)


def test_doctor_knows_the_oldest_versions_of_the_package() -> None:
    needs = {each.name: each.needs for each in doctor().parts}
    project = (ROOT / "pyproject.toml").read_text()
    assert f"torch{needs['torch'].replace(' ', '')}" in project
    assert f'requires-python = "{needs["Python"].replace(" ", "")}"' in project
    assert (needs["Transformer Engine"], needs["Megatron core"], needs["CUDA of torch"]) == (
        ">= 2.2",
        ">= 0.14",
        ">= 11.0",
    )


@pytest.mark.parametrize(
    ("found", "needs", "expected"),
    [
        (None, "", "missing"),
        (None, ">= 2.2", "missing"),
        ("2.1.0", ">= 2.2", "too old"),
        ("2.2.0", ">= 2.2", "ok"),
        ("2.12.0.dev0+abc", ">= 2.2", "ok"),
        ("0.9", ">= 0.14", "too old"),
        ("1", ">= 0.14", "ok"),
        ("anything", "", "ok"),
    ],
)
def test_part_compares_versions(found: str | None, needs: str, expected: str) -> None:
    made = part("x", needs, found, True, "for", "get")
    assert (made.status, made.is_problem) == (expected, expected != "ok")
    assert not dataclasses.replace(made, is_required=False).is_problem


# -- rules of the environment


def test_doctor_finds_rules_that_the_environment_breaks() -> None:
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (one,) = broken_rules(expandable, (9, 0))
    assert one.rule == "expandable-segments"
    assert (one.why, one.fix) == catalogue.entry("expandable-segments").reason_and_fix()
    assert list(broken_rules({**expandable, "NCCL_GRAPH_REGISTER": "0"}, (9, 0))) == []
    assert [each.rule for each in broken_rules({"TORCH_NCCL_BLOCKING_WAIT": "1"}, None)] == ["nccl-blocking-wait"]
    assert list(broken_rules({"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, None)) == []


def test_doctor_command_exits_with_1_for_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    result = invoke()
    assert result.exit_code == 1
    assert "[expandable-segments]" in result.stdout
    assert "Not fine: the environment breaks expandable-segments." in result.stdout
    assert result.stdout.splitlines()[-1] == "Next: stepgraph explain expandable-segments"


# -- what is shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("user:planted@host:8080", "host:8080"),
        ("//user:planted@host", "host"),
        ("https://user:p@planted@host/x", "https://host/x"),
        ("https://user:planted/x@host", "https://host"),
        ("user:my planted@[::1]:80", "[::1]:80"),
        ("http://a:planted@h1,http://b:planted@h2", "http://h2"),
        ("https%3A%2F%2Fuser%3Aplanted%40host", "(hidden)"),
        ("--password=planted", "(hidden)"),
        ("--password planted", "(hidden)"),
        ("PGPASSWORD=planted psql", "(hidden)"),
        ('{"passwd": "planted"}', "(hidden)"),
        ("host/simple?token=planted", "(hidden)"),
        ("Authorization: Basic planted", "(hidden)"),
        ("bearer planted", "(hidden)"),
        ("https://download.pytorch.org/whl/cu130", "https://download.pytorch.org/whl/cu130"),
        ("/usr/lib/keys:/opt/tokens", "/usr/lib/keys:/opt/tokens"),
    ],
)
def test_shown_variables_hide_secrets_in_any_form(value: str, expected: str) -> None:
    assert shown_variables({"TORCH_SETTING": value}) == {"TORCH_SETTING": expected}


def test_doctor_shows_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**SECRETS, **OPEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", f"{tmp_path}/torch")
    for text in (invoke().stdout, invoke("--json").stdout, str(doctor())):
        flat = "".join(text.split())
        assert "planted" not in flat
        assert "0123456789abcdef" not in flat
        assert "a8f5f167f44f" not in flat
        assert str(tmp_path) not in flat
        assert "NCCL_DEBUG" in flat
    shown = doctor().variables
    assert {name: shown[name] for name in OPEN} == OPEN
    assert shown["TORCH_HOME"] == "~/torch"
    assert shown["PYTORCH_INDEX"] == "https://host.example/simple"
    assert shown["TORCH_PROXY"] == "socks5://host.example:1080"
    assert not {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HOME", "PATH"} & set(shown)


def test_shown_variables_reads_known_prefixes_only() -> None:
    environment = {"CUDA_HOME": "/usr", "TORCHINDUCTOR_X": "1", "MY_NCCL_DEBUG": "1", "NVTE_DEBUG": "1"}
    assert shown_variables(environment) == {"CUDA_HOME": "/usr", "NVTE_DEBUG": "1"}


def test_doctor_text_fits_a_terminal_and_json_is_complete() -> None:
    result = invoke()
    assert [line for line in result.stdout.splitlines() if len(line) > 80] == []
    values = json.loads(invoke("--json").stdout)
    assert values["ok"] == (result.exit_code == 0)
    assert {"python", "system", "torch", "driver", "gpus", "variables", "parts", "broken_rules"} <= set(values)


# -- a torch that does not work


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13: cannot open"),
        ("raise ImportError('planted')", "ImportError: planted"),
        ("", "AttributeError"),
    ],
)
@pytest.mark.usefixtures("new_processes")
def test_doctor_reports_a_torch_that_is_broken(tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "stepgraph", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    values = json.loads(done.stdout)
    assert (values["ok"], values["torch"]) == (False, None)
    assert told in values["torch_error"]
    (row,) = (row for row in values["parts"] if row["name"] == "torch")
    assert (row["status"], row["is_required"]) == ("broken", True)
    assert row["command"] == 'pip install "torch>=2.11"'
