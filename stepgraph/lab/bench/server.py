"""Runs jobs one at a time, each in a process that is forked from this one. `JobServer` starts it.

Most of the time of a short job is spent in importing torch and stepgraph. The server imports them once and then forks:
a job inherits the modules and nothing else, for the server starts neither CUDA nor threads nor processes. So each job
has its own CUDA context, allocator and compiled code, as a process started anew would have.

The argument names a module with `prepare()`, which imports what jobs need, and `run(request)`, which does one and
returns its record; it is written to the file that the request names, so that nothing that a library prints can damage
it. A line of JSON on stdin is a job: `request`, `folder` for its stderr, `timeout_s`. Two lines on stdout answer it:
its process, and how it ended. A job ends with its whole session. When stdin ends, so do the job and the server: they do
not outlive who started them, however it ended.

A job on a GPU that cannot start CUDA after the fork, because a library started it in the server, becomes a process
started anew, with `--one`, which reads one request from stdin.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, Any, NoReturn

from stepgraph.core.strict_json import as_json
from stepgraph.tools.script.processes import end_group, own_program

_POLL_S = 0.02
REQUEST, STDERR = "request.json", "stderr.txt"
"""Files of a job's folder: its stdin and its stderr."""


def serve(jobs: ModuleType, requests: IO[bytes], replies: IO[str]) -> None:
    """Run jobs until there are no more requests."""
    jobs.prepare()
    while line := requests.readline():
        job = json.loads(line)
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(replies.fileno())  # so that its end is seen when the server ends
            _become(jobs, job)
        process = _Child(pid)
        try:
            _reply(replies, {"pid": pid})
            ended = process.waited(float(job["timeout_s"]), requests)
        finally:
            end_group(pid, process.poll)
            process.wait()
        _reply(replies, {"timed_out": not ended, "status": process.status})


def _reply(replies: IO[str], values: dict[str, Any]) -> None:
    replies.write(json.dumps(values) + "\n")
    replies.flush()


class _Child:
    """A forked process, waited for once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._reaped(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reaped(0)

    def _reaped(self, options: int) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self._pid, options)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def waited(self, timeout_s: float, requests: IO[bytes]) -> bool:
        """Wait until it has ended; False if its time is over. The end of the requests ends the server."""
        until = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > until:
                return False
            if select.select([requests], [], [], _POLL_S)[0]:  # nothing is sent during a job: this is the end
                sys.exit(0)
        return True


def _become(jobs: ModuleType, job: dict[str, Any]) -> NoReturn:
    """In the forked process: run the job in a session of its own, and exit without unwinding the server."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        folder = Path(job["folder"])
        (folder / REQUEST).write_text(json.dumps(job["request"]), encoding="utf-8")
        for number, path, flags in (
            (0, folder / REQUEST, os.O_RDONLY),
            (1, os.devnull, os.O_WRONLY),
            (2, folder / STDERR, os.O_WRONLY | os.O_CREAT),
        ):
            opened = os.open(path, flags, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        if str(job["request"].get("device", "")).startswith("cuda") and not _cuda_starts():
            os.execv(sys.executable, own_program("stepgraph.lab.bench.server", jobs.__name__, "--one"))
        code = run_one(jobs, job["request"], process="forked")
    except BaseException:  # noqa: BLE001 (an exit, too, must not run the server's own code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _cuda_starts() -> bool:
    import torch

    try:
        torch.cuda.init()
    except RuntimeError:  # a fork cannot use what the server has started
        return False
    return True


def run_one(jobs: ModuleType, request: dict[str, Any], process: str) -> int:
    """Run a job in this process and write its record; `process` says how this one was started."""
    record = jobs.run(request) | {"process": process}
    Path(request["file"]).write_text(as_json(record, default=str), encoding="utf-8")
    return 1 if "error" in record else 0


def attempted(record: dict[str, Any], measuring: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a record with what was measured, or with the error, and the seconds that it took."""
    begun = time.perf_counter()
    try:
        record = record | measuring()
    except Exception as error:  # noqa: BLE001 (whatever fails is the result of this job)
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        record = record | {"error": f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]}
    return record | {"worker_s": time.perf_counter() - begun}


def _own_stdout() -> IO[str]:
    """The stream of replies; what libraries print goes to stderr instead."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main(module: str, *options: str) -> None:
    """Serve the jobs of a module, or with `--one` run one."""
    if options == ("--one",):
        sys.exit(run_one(importlib.import_module(module), json.load(sys.stdin), process="new"))
    signal.signal(signal.SIGTERM, _stop)
    serve(importlib.import_module(module), sys.stdin.buffer, _own_stdout())
