"""Starts Python programs as forks of a server that has imported torch and stepgraph: `python -m tests.forked`.

Most of the time of a short program is spent in importing torch, two to five seconds of processor time. The server
imports it once. `ForkServer.installed()`, which all suites use where there is no GPU, puts a `subprocess.Popen` in
place that has the server fork wherever a command is this interpreter with a file, `-m` or `-c`. Any other command is
started as ever. Nothing else changes for who calls it: streams, folder, environment, session, signals, exit code and
processor time are those of a child process. For the fork is one: the server forks twice, and as its child ends at once,
the grandchild falls to the test's process, which is a "subreaper" meanwhile (Linux only; elsewhere all programs are
started as ever).

A fork differs from a process started anew in what is imported already, and in environment variables that are read when
Python or a library starts: PYTHONPATH, PYTHONFAULTHANDLER and OMP_NUM_THREADS are obeyed, others are not. So tests of
what is imported, of `python -X` and of the command line as a user types it start real processes.

STEPGRAPH_FORKS in a program's environment may say otherwise: `none` for a process started anew, `nested` for a fork
that has such a server, too, for the programs that it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NONE, NESTED = {"STEPGRAPH_FORKS": "none"}, {"STEPGRAPH_FORKS": "nested"}
"""In the environment of a program that is no fork, and of one whose own programs are forks, too."""
IMPORTED = (
    "torch._dynamo",
    "torch.distributed",
    "stepgraph",
    "stepgraph.commands.cli",
    "stepgraph.tools.script.steps",
    "stepgraph.tools.script.child",
    "stepgraph.lab.train",
)
_PR_SET_CHILD_SUBREAPER = 36
_SIZE, _ADOPTED, _PATIENCE_S = 8, b".", 60.0


class ForkServer:
    """The server, as its client sees it: started for the first program, it ends when the connection does."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, program: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Start a program, and return the number of its process, which is a child of this one."""
        connection = self._connection = self._connection or self._started()
        request = json.dumps(program).encode()
        with _adopting():
            socket.send_fds(connection, [len(request).to_bytes(_SIZE)], streams)
            connection.sendall(request)
            pid = int.from_bytes(_received(connection, _SIZE))
            _received(connection, len(_ADOPTED))
            return pid

    def _started(self) -> socket.socket:
        """Start a server in a process of its own."""
        ours, theirs = socket.socketpair()
        # Without PYTHONPATH: what site-packages adds to the path is left out if PYTHONPATH names it, too.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= NONE | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the server; programs go on."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the forking `Popen` in place of `subprocess.Popen`."""
        before = subprocess.Popen
        subprocess.Popen = _forking(self) if sys.platform == "linux" else before  # type: ignore[misc]
        try:
            yield
        finally:
            subprocess.Popen = before  # type: ignore[misc]
            self.close()


def _forking(server: ForkServer) -> type[subprocess.Popen[Any]]:
    class Forking(subprocess.Popen):  # type: ignore[type-arg]
        """A process that the server forks, if it is a Python program."""

        def _execute_child(self, *args: Any) -> None:
            start = super()._execute_child  # type: ignore[misc]
            given = inspect.signature(start).bind(*args).arguments
            if not _is_forked(given):
                start(*args)
                return
            program = {
                "arguments": _program_in(given["args"]),
                "environment": dict(given["env"] if given["env"] is not None else os.environ),
                "folder": os.fspath(given["cwd"] or os.getcwd()),
                "own_session": given["start_new_session"],
                "parent": os.getpid(),
            }
            streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            self.pid = server.fork(program, [number if fd == -1 else fd for number, fd in enumerate(streams)])
            self._child_created = True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]

    return Forking


def _is_forked(given: Mapping[str, Any]) -> bool:
    """Only plain Python programs, and only with what `fork` takes over."""
    environment = os.environ if given["env"] is None else given["env"]
    plain = ("shell", "executable", "preexec_fn", "pass_fds", "gid", "gids", "uid")
    is_plain = not any(given[name] for name in plain) and given["umask"] < 0 and given["process_group"] < 0
    return is_plain and not NONE.items() <= environment.items() and _program_in(given["args"]) != []


def _program_in(command: Any) -> list[str]:
    """A file or `-m` or `-c` with what follows; nothing if the command is no Python program, or has other options."""
    words = [] if isinstance(command, str | bytes | os.PathLike) else [os.fspath(word) for word in command]
    if words[:1] != [sys.executable]:
        return []
    words = words[2:] if words[1:2] == ["-u"] else words[1:]  # torchrun's; streams are flushed at the end
    is_program = words and (not words[0].startswith("-") or (words[0] in ("-m", "-c") and len(words) > 1))
    return words if is_program else []


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of a grandchild whose parent ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError("the fork server has ended")
        found += part
    return found


# -- the server


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork until the connection ends, which ends the server; in a fork, return the program that it is to become."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for programs
    while True:
        size, streams, _, _ = socket.recv_fds(connection, _SIZE, 3)
        if not size:
            sys.exit(0)
        size += _received(connection, _SIZE - len(size))
        program: dict[str, Any] = json.loads(_received(connection, int.from_bytes(size)))
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a fork has one thread, the server has {len(threads)}"
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child != 0:
                connection.sendall(child.to_bytes(_SIZE))
                os._exit(0)
            connection.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for stream in streams:
                os.close(stream)
            return program
        os.waitpid(between, 0)
        connection.sendall(_ADOPTED)
        for stream in streams:
            os.close(stream)


def become(program: dict[str, Any]) -> Callable[[], object]:
    """Make this process what Python would have started, and return what runs the program."""
    until = time.monotonic() + _PATIENCE_S
    while os.getppid() != program["parent"]:  # the process between has not ended yet
        if time.monotonic() > until:
            sys.exit("the process that wanted this program is gone")
        time.sleep(0.001)
    if program["own_session"]:
        os.setsid()
    os.chdir(program["folder"])
    environment = program["environment"]
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    torch = sys.modules["torch"]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if NESTED.items() <= environment.items():
        _serve_below()
    first, *rest = program["arguments"]
    named = first in ("-m", "-c")
    sys.argv = [first, *(rest[1:] if named else rest)]
    folder = {"-m": os.getcwd(), "-c": ""}.get(first, os.path.dirname(os.path.realpath(first)))
    own = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [folder, *own, *(part for part in _without_own_path() if part not in own)]
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    if first == "-m":
        return lambda: runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    if first != "-c":
        vars(main).update(__file__=os.path.abspath(first), __cached__=None)
    source, name = (rest[0], "<string>") if first == "-c" else (Path(first).read_bytes(), os.path.abspath(first))
    code = compile(source, name, "exec", dont_inherit=True)
    return lambda: exec(code, vars(main))


def _without_own_path() -> list[str]:
    """Where Python looks without PYTHONPATH: what follows the standard library."""
    library = os.path.dirname(os.__file__)
    start = min(i for i, part in enumerate(sys.path) if part == library or part.endswith(".zip"))
    return sys.path[start:]


def _serve_below() -> None:
    """Fork a server from this process, while it is as it was forked, and let `Popen` use it."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _run(serve(theirs))
    theirs.close()
    subprocess.Popen = _forking(ForkServer(ours))  # type: ignore[misc]


def _run(program: dict[str, Any]) -> None:
    """Run a program to its end; what it raises is reported without the frames of this file."""
    sys.excepthook = _own_frames_only
    atexit.register(gc.unfreeze)  # Triton counts what is left at the end
    become(program)()
    sys.exit(0)


def _own_frames_only(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def main() -> None:
    """Import what takes long, and serve."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _run(serve(connection))


if __name__ == "__main__":
    main()
