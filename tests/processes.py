"""Runs programs to their end, and tells one that hangs from one that is slow.

How long a program takes depends on what else the machine does, so no wall-clock limit is right. A program that hangs
uses no processor time; one that runs in circles uses more than it ever needs. Both show in the time that the processor
gave to it and to the processes it started, whatever the load.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STALL_S = 60.0
"""Wall time within which programs that are alive must get on."""
LEAST_CPU_S = 0.3
"""The processor time within STALL_S that counts as getting on: threads that only wait use less."""
MOST_CPU_S = 400.0
"""Processor time that no program of the suites needs."""


def run_to_end(
    commands: Sequence[Sequence[str]], env: Mapping[str, str], cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Start all programs at once and wait for as long as they get on; raises `TimeoutExpired` if they do not."""
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        running = []
        for command, (out, err) in zip(commands, files, strict=True):
            process = subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True)
            stack.callback(_end, process)
            running.append(process)
        _wait(running)
        for pair in files:
            for file in pair:
                file.seek(0)
        return [
            subprocess.CompletedProcess(process.args, process.returncode, out.read(), err.read())
            for process, (out, err) in zip(running, files, strict=True)
        ]


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> None:
    used, since = 0.0, time.monotonic()
    while alive := [process for process in running if process.poll() is None]:
        now = cpu_seconds({process.pid for process in alive})
        if abs(now - used) > LEAST_CPU_S:  # less than before, where one of them has ended
            used, since = now, time.monotonic()
        if now > MOST_CPU_S or time.monotonic() - since > STALL_S:
            raise subprocess.TimeoutExpired(alive[0].args, time.monotonic() - since)
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cpu_seconds(sessions: set[int]) -> float:
    """Processor time of all processes of these sessions so far; wall time where the system does not tell (no /proc)."""
    if not Path("/proc/self/stat").exists():
        return time.monotonic()
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
