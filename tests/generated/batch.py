"""Runs functions in processes of their own: forks of this one, so torch and stepgraph are imported once."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

CPU_S = 60
"""Processor time that no program needs; a process that takes more is ended."""
STALL_S = 300.0
"""Time on the clock after which a process counts as hanging."""


@dataclass
class Child:
    pid: int
    key: Any
    begun: float
    received: bytearray = field(default_factory=bytearray)


def run_all(
    jobs: Iterator[tuple[Any, Callable[[], dict[str, Any]]]], workers: int, cpu_s: int = CPU_S, stall_s: float = STALL_S
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run each function in a fork of this process; yields its key and what it returned, as they end.

    A process that ends by a signal yields the outcome "killed", and one that takes too long "timeout".
    """
    with selectors.DefaultSelector() as selector:
        running: dict[int, Child] = {}
        more = True
        while more or running:
            while more and len(running) < workers:
                job = next(jobs, None)
                if job is None:
                    more = False
                    break
                end, child = _start(*job, cpu_s)
                running[end] = child
                selector.register(end, selectors.EVENT_READ)
            for key, _ in selector.select(1.0):
                child = running[key.fd]
                part = os.read(key.fd, 1 << 16)
                child.received += part
                if not part:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    del running[key.fd]
                    yield child.key, _outcome(child)
            for child in running.values():
                if time.monotonic() - child.begun > stall_s:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGXCPU)


def _start(key: Any, function: Callable[[], dict[str, Any]], cpu_s: int) -> tuple[int, Child]:
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        with contextlib.suppress(BaseException):
            _child(function, theirs, cpu_s)
        os._exit(0)
    os.close(theirs)
    return ours, Child(pid, key, time.monotonic())


def _child(function: Callable[[], dict[str, Any]], end: int, cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        found = function()
    except BaseException as error:  # noqa: BLE001
        text = "".join(traceback.format_exception(error))[-1500:]
        found = {"outcome": "broken", "rule": type(error).__name__, "detail": text}
    used = resource.getrusage(resource.RUSAGE_SELF)
    found["cpu_s"] = round(used.ru_utime + used.ru_stime, 3)
    with os.fdopen(end, "wb") as pipe:
        pipe.write(json.dumps(found).encode())


def _outcome(child: Child) -> dict[str, Any]:
    _, status = os.waitpid(child.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"outcome": "timeout", "detail": f"exit code {code}"}
    if code != 0 or not child.received:
        return {"outcome": "killed", "rule": str(code), "detail": f"exit code {code}"}
    found: dict[str, Any] = json.loads(child.received)
    return found
