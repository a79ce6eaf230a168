"""The process above a script, which ends with it whatever it has started.

A process whose parent has ended falls to the first process of the system, and nobody knows any more who started it: a
server in a session of its own, or a worker that forked twice. On Linux a process may ask to be given what is orphaned
below it ("child subreaper"). The script's own process must not ask for that: it would have children that it does not
know. So a process that does nothing else stands between the command and the script. It leaves when the script has
ended and nothing is left below it, and ends as the script did. Elsewhere there is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

from stepgraph.tools.script.processes import end_below

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PARENT_DIED = signal.SIGHUP
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, _PARENT_DIED)
"""The command sends SIGTERM to the script and to all below it; the keeper waits until they have ended."""
_POLL_S = 0.5


def keep() -> None:
    """Go on in a new process, which becomes the script's, while this one keeps it to its end and exits."""
    if sys.platform != "linux":
        return
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_PDEATHSIG, int(_PARENT_DIED))
    control(_PR_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    keeper, script = os.getpid(), os.fork()
    if script:
        _end_as(_kept(script))
    control(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != keeper:  # it was killed meanwhile
        os._exit(1)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kept(script: int) -> int:
    """Wait for the script, or for the end of the command; end the rest; return the script's status."""
    ended: dict[int, int] = {}
    told = None
    while script not in ended and told is None:
        told = signal.sigtimedwait((_PARENT_DIED, signal.SIGCHLD), _POLL_S)
        told = told if told is not None and told.si_signo == _PARENT_DIED else None
        _reap(ended)
    end_below(os.getpid(), lambda: _reap(ended))
    return ended.get(script, 0)


def _reap(ended: dict[int, int]) -> None:
    """Note the statuses of children that have ended, those that were given to this process included."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]


def _end_as(status: int) -> NoReturn:
    """End with the status of another process."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        os.kill(os.getpid(), -code)
    os._exit(max(code, 1) if code < 0 else code)
