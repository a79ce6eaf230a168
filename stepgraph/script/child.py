"""Runs in the script's process: `python -m stepgraph.script.child REQUEST`.

The script becomes `__main__` as Python makes it: the same `sys.argv`, `sys.path[0]` and attributes of the module.
Around it the probe watches. However the script ends, the probe's result and the script's own traceback, without our
frames, are appended to the answer file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stepgraph.script.request import Request, Status, append

__all__ = ["EarlyStop", "RunningChild", "main"]


class EarlyStop(BaseException):
    """The probe has seen enough. No `Exception`, so that only `except BaseException` or a bare `except` catches it."""


class RunningChild:
    """The running script (`probe.RunningScript`), and the first listener to its steps."""

    def __init__(self, request: Request, *, is_cuda_mapped: bool) -> None:
        self.options: Mapping[str, Any] = request.options
        self.is_cuda_mapped = is_cuda_mapped
        self.is_stopping = False
        self._answer = request.answer
        self._listeners: list[Any] = []
        self._at_synchronize: list[Callable[[str], None]] = []

    def listen(self, listener: Any) -> None:
        self._listeners.append(listener)

    def at_synchronize(self, call: Callable[[str], None]) -> None:
        self._at_synchronize.append(call)

    def synchronizes(self, name: str) -> None:
        """The script is about to wait for the device."""
        for call in self._at_synchronize:
            call(name)

    def stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            self.tell("stop", None)
        raise EarlyStop("stepgraph has seen enough of this script")

    def cannot_judge(self, what: str) -> None:
        self.tell("cannot_judge", what)

    def note(self, what: str) -> None:
        self.tell("note", what)

    def tell(self, kind: str, value: Any) -> None:
        """Append a line to the answer."""
        append(self._answer, kind, value)

    def step_begins(self, index: int) -> None:
        if self.is_stopping:
            self.stop()
        for listener in self._listeners:
            listener.step_begins(index)

    def step_reaches(self, index: int) -> None:
        self.tell("steps", index + 1)
        for listener in self._listeners:
            listener.step_reaches(index)

    def step_ends(self, index: int) -> None:
        for listener in self._listeners:
            listener.step_ends(index)


@contextlib.contextmanager
def watched_steps(running: RunningChild) -> Iterator[None]:
    """Report the steps of the block."""
    from stepgraph.observe.steps import StepEvents, StepFinder

    finder = StepFinder(running)
    with StepEvents(finder).watching():
        try:
            yield
        finally:
            if not running.is_stopping:
                finder.finish()


def run_as_main(request: Request) -> None:
    """Run the script as `__main__`."""
    script = request.script
    path = os.path.abspath(script.target)
    sys.argv[:] = [script.target, *script.args]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main = type(sys)("__main__")
    vars(main).update(__file__=path, __cached__=None, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def ending(running: RunningChild, run: Callable[[], None]) -> tuple[Status, str]:
    """Run the script; return how it ended, and its traceback."""
    try:
        run()
    except EarlyStop:
        return Status.STOPPED, ""
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            return (Status.STOPPED if running.is_stopping else Status.COMPLETED), ""
        text = f"SystemExit: {exit_.code}"
    except BaseException as error:  # noqa: BLE001 - it is the user's, and is reported
        text = script_traceback(error)
    else:
        return (Status.STOPPED if running.is_stopping else Status.COMPLETED), ""
    return (Status.STOPPED if running.is_stopping else Status.FAILED), text


def script_traceback(error: BaseException) -> str:
    """Return the traceback of a script's error, without our frames."""
    from stepgraph.frames import is_engine

    found = traceback.TracebackException.from_exception(error)
    todo, seen = [found], set()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.stack = traceback.StackSummary.from_list([f for f in one.stack if not is_engine(f.filename)])
            todo += [other for other in (one.__cause__, one.__context__) if other is not None]
    return "".join(found.format()).rstrip()


def make_probe(name: str, running: RunningChild) -> Any:
    """Make the probe `package.module:Class`."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)(running)


def main(request_file: str) -> None:
    """Run a request."""
    import torch

    request = Request.from_json(Path(request_file).read_text(encoding="utf-8"))
    running = RunningChild(request, is_cuda_mapped=not torch.cuda.is_available())
    probe = make_probe(request.probe, running)

    def run() -> None:
        with probe.running(), watched_steps(running):
            run_as_main(request)

    status, text = ending(running, run)
    end = {"status": status, "exception": text, "result": dict(probe.result())}
    sys.stdout.flush()
    running.tell("end", end)


if __name__ == "__main__":
    from stepgraph.script import child  # not this `__main__`, which the script's takes the place of

    child.main(sys.argv[1])
