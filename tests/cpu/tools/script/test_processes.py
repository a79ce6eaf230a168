"""Programs that hang are told from slow ones by the processor time they get."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests import processes

pytestmark = pytest.mark.usefixtures("new_processes")


def test_programs_that_end_give_their_output() -> None:
    programs = ["print('out')", "import sys; sys.exit('err')"]
    ended = processes.run_to_end([[sys.executable, "-c", program] for program in programs], os.environ)
    assert [(one.returncode, one.stdout, one.stderr) for one in ended] == [(0, "out\n", ""), (1, "", "err\n")]


def test_program_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STALL_S", 0.5)
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        processes.run_to_end([[sys.executable, "-c", program]], os.environ)
    assert caught.value.cmd[0] == sys.executable


def test_error_of_programs_that_hang_says_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STALL_S", 0.5)
    programs = ["import sys; sys.exit('the port is taken')", "import time\ndef wait():\n  time.sleep(1000)\nwait()"]
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        processes.run_to_end([[sys.executable, "-c", program] for program in programs], os.environ)
    failed, waiting = caught.value.__notes__
    assert "ended with 1" in failed
    assert "the port is taken" in failed
    assert "was alive" in waiting
    assert "line 3 in wait" in waiting


def test_program_that_runs_in_circles_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_CPU_S", 0.3)
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run_to_end([[sys.executable, "-c", "while True: pass"]], os.environ)


def test_cpu_seconds_are_those_of_the_session() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as process:
        while processes.cpu_seconds({process.pid}) < 0.05:
            time.sleep(0.01)
        process.kill()
