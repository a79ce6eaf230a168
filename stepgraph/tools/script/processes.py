"""Starts programs of stepgraph, and ends a process with its family: session, group, and all below. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def own_program(module: str, *args: str) -> list[str]:
    """Return the command that runs `main` of a module of ours; the current folder hides no imports (`start`)."""
    return [sys.executable, str(Path(__file__).with_name("start.py")), module, *args]


def end_group(leader: int, poll: Callable[[], object]) -> None:
    """End the leader of a session with all its processes; kill those that are left after some seconds.

    `poll` waits, without blocking, for the leader if it is a child: one that nobody has waited for still counts. An
    exception meanwhile, such as that of a second signal, kills at once.
    """
    family = _family(leader)
    try:
        _signal_all(leader, family, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while _are_alive(leader, family, poll) and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        _signal_all(leader, family | _family(leader), signal.SIGKILL)


def end_below(pid: int, reap: Callable[[], object]) -> None:
    """End all processes below this one, which is given those whose parents have ended. `reap` waits for its children.

    They are asked first, and killed after some seconds, with what they have started meanwhile.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        asked: set[int] = set()
        until = time.monotonic() + GRACE_S
        reap()
        while (left := _family(pid) - {pid}) and time.monotonic() < until:
            for other in left if number == signal.SIGKILL else left - asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(other, number)
            asked |= left
            time.sleep(0.05)
            reap()


def _family(pid: int) -> set[int]:
    """The processes of a session, and those below them; where there is no /proc, none but the group."""
    parents: dict[int, int] = {}
    found = {pid}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            fields = entry.read_text().rpartition(")")[2].split()
            if fields[0] == "Z":
                continue
            number = int(entry.parent.name)
            parents[number] = int(fields[1])
            if int(fields[3]) == pid:
                found.add(number)
    while more := {number for number, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _signal_all(group: int, family: set[int], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
    for pid in family - {group}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _are_alive(leader: int, family: set[int], poll: Callable[[], object]) -> bool:
    poll()
    for pid in family:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0)
            return True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, 0)
        return True
    return False
