"""The server of jobs: each job is a process of its own, and none outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepgraph.lab.bench.jobs import JobServer
from stepgraph.tools.script.processes import own_program

pytestmark = pytest.mark.usefixtures("new_processes")
ROOT, JOBS = Path(__file__).parents[4], "tests.bench_jobs"
WAIT_S = 20.0


@pytest.fixture(scope="module")
def jobs() -> Iterator[JobServer]:
    with JobServer(JOBS, [ROOT]) as server:
        yield server


def run(jobs: JobServer, do: str, timeout_s: float = WAIT_S, **more: str) -> dict[str, Any]:
    return jobs.run({"do": do, **more}, timeout_s)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_gone(*pids: int) -> bool:
    until = time.monotonic() + WAIT_S
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def told(path: Path) -> dict[str, Any]:
    """What a job wrote about itself, once it is there."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(path.read_text()))
        time.sleep(0.01)
    raise AssertionError("the job did not begin")


def test_jobs_are_processes_of_one_server(jobs: JobServer) -> None:
    first, second = run(jobs, "write"), run(jobs, "write")
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["session"] == first["pid"], "so that it ends with what it started"
    assert json.loads(first["stdin"])["do"] == "write", "a new process could read its request there"
    assert first["process"] == "forked"
    assert is_gone(first["pid"], second["pid"])


@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("raise", "exit status 1: ValueError: the job is wrong"),
        ("exit", "exit status 1: SystemExit: 5"),
        ("die", "exit status -9: "),
        ("nothing", "exit status 0: "),
    ],
)
def test_job_without_a_record_says_how_it_ended(jobs: JobServer, do: str, error: str) -> None:
    assert run(jobs, do) == {"error": error}


@pytest.mark.slow
def test_files_of_the_current_folder_hide_no_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    with JobServer(JOBS, [ROOT]) as server:
        assert "error" not in run(server, "write")


def test_one_job_runs_without_a_server(tmp_path: Path) -> None:
    request = {"do": "write", "file": str(tmp_path / "record.json")}
    command = own_program("stepgraph.lab.bench.server", JOBS, "--one")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "request.json").write_text(json.dumps(request))
    with (tmp_path / "request.json").open() as given:
        done = subprocess.run(command, stdin=given, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path / "record.json")["process"] == "new"


@pytest.mark.slow
def test_job_out_of_time_ends_with_its_children(jobs: JobServer, tmp_path: Path) -> None:
    record = run(jobs, "hang", timeout_s=0.3, told=str(tmp_path / "told"))
    assert record["error"] == "no result within 0 s"
    facts = told(tmp_path / "told")
    assert is_gone(facts["pid"], facts["child"])
    assert run(jobs, "write")["parent"] == facts["parent"], "the server goes on"


@pytest.mark.slow
def test_server_that_dies_is_started_again(tmp_path: Path) -> None:
    with JobServer(JOBS, [ROOT]) as jobs:
        record = run(jobs, "kill the server", told=str(tmp_path / "told"))
        assert record["error"].startswith("the server of jobs ended with -9")
        facts = told(tmp_path / "told")
        assert is_gone(facts["pid"]), "the job that it left is ended"
        again = run(jobs, "write")
        assert again["parent"] != facts["parent"]
    assert is_gone(again["parent"])


def test_server_that_cannot_prepare_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_TEST_PREPARE", "fail")
    with JobServer(JOBS, [ROOT]) as jobs:
        record = run(jobs, "write")
    assert record["error"] == "the server of jobs ended with 1: RuntimeError: cannot prepare"


PROGRAM = """
import sys
from stepgraph.lab.bench.jobs import JobServer
with JobServer("tests.bench_jobs") as jobs:
    jobs.run({"do": "hang", "told": sys.argv[1]}, 1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_job_ends_with_who_started_it(number: int, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "told")], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        facts = told(tmp_path / "told")
        process.send_signal(number)
    assert process.returncode != 0
    assert is_gone(facts["pid"], facts["child"], facts["parent"])
