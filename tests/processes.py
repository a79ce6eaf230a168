"""Runs programs to their end, and tells one that hangs from one that is slow.

How long a program takes depends on what else the machine does, so no wall-clock limit is right. A program that hangs
uses no processor time; one that runs in circles uses more than it ever needs. Both show in the time that the processor
gave to it and to the processes it started, whatever the load. Of programs that hang, the error has what each of them
has written, and where its threads are.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

STALL_S = 60.0
"""Wall time within which programs that are alive must get on."""
LEAST_CPU_S = 0.3
"""The processor time within STALL_S that counts as getting on: threads that only wait use less."""
MOST_CPU_S = 400.0
"""Processor time that no program of the suites needs."""


def run_to_end(
    commands: Sequence[Sequence[str]],
    env: Mapping[str, str] | Sequence[Mapping[str, str]],
    cwd: Path | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Start all programs at once and wait for as long as they get on; raises `TimeoutExpired` if they do not.

    Args:
        commands: The words of each program.
        env: The environment of all, or one for each.
        cwd: The folder of all; this one if not given.
    """
    environments = [env] * len(commands) if isinstance(env, Mapping) else env
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        running = []
        for command, one, (out, err) in zip(commands, environments, files, strict=True):
            given = {**one, "PYTHONFAULTHANDLER": "1"}
            process = subprocess.Popen(command, stdout=out, stderr=err, env=given, cwd=cwd, start_new_session=True)
            stack.callback(_end, process)
            running.append(process)
        try:
            _wait(running)
        except subprocess.TimeoutExpired as error:
            for process, (_, err) in zip(running, files, strict=True):
                code = process.poll()
                _abort(process)
                state = f"ended with {code}" if code is not None else "was alive"
                error.add_note(f"{process.pid} {state} and wrote:\n{_whole(err)[-3000:]}")
            raise
        return [
            subprocess.CompletedProcess(process.args, process.returncode, _whole(out), _whole(err))
            for process, (out, err) in zip(running, files, strict=True)
        ]


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> None:
    used, waited, before = 0.0, 0.0, time.monotonic()
    while alive := [process for process in running if process.poll() is None]:
        now = cpu_seconds({process.pid for process in alive})
        if abs(now - used) > LEAST_CPU_S:  # less than before, where one of them has ended
            used, waited = now, 0.0
        waited += min(time.monotonic() - before, 1.0)  # a machine that was paused made nobody get on
        before = time.monotonic()
        if now > MOST_CPU_S or waited > STALL_S:
            raise subprocess.TimeoutExpired(alive[0].args, waited)
        time.sleep(0.05)


def _abort(process: subprocess.Popen[bytes]) -> None:
    """Make a Python program write where its threads are, and end."""
    if process.poll() is None:
        if hasattr(resource, "prlimit"):  # on Linux
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


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
