"""Runs in the script's process, which begins in `start`, below its `keeper`.

The script becomes `__main__` (`main_module`). Around it the probe watches, files are listed (`files`), and without a
GPU `cuda` stands for the CPU (`cuda_on_cpu`). However the script ends, the probe's result and the script's own
traceback, without our frames, are appended to the answer file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from stepgraph.core.errors import StepgraphError, refusal_in
from stepgraph.core.torch_import import importing_torch
from stepgraph.tools.script.keeper import keep
from stepgraph.tools.script.request import Request, Status, append

__all__ = ["EarlyStop", "RunningChild", "main"]

_PASSES_ON = "__torch_function__"
"""The name of a function of ours that only passes calls of torch on, where `cuda` stands for the CPU."""


_PLUMBING = tuple(
    os.path.join("torch", *name)
    for name in (("_compile.py",), ("_dynamo", "eval_frame.py"), ("_ops.py",), ("overrides.py",))
)
"""Files of torch that hand calls on to modes, and from them to operators."""


class EarlyStop(BaseException):
    """The probe has seen enough. No `Exception`, so that only `except BaseException` or a bare `except` catches it."""


class RunningChild:
    """The running script (`probe.RunningScript`), and the first listener to its steps."""

    def __init__(self, request: Request, *, is_cuda_mapped: bool) -> None:
        self.options: Mapping[str, Any] = request.options
        self.is_cuda_mapped = is_cuda_mapped
        self.is_stopping = False
        self.at_stop: Callable[[], None] = lambda: None
        self.refuse_writes: Callable[[], None] = lambda: None
        self._answer = request.answer
        self._listeners: list[Any] = []
        self._at_synchronize: list[Callable[[str], None]] = []
        self._at_write: list[Callable[[str], None]] = []

    def listen(self, listener: Any) -> None:
        self._listeners.append(listener)

    def at_synchronize(self, call: Callable[[str], None]) -> None:
        self._at_synchronize.append(call)

    def at_write(self, call: Callable[[str], None]) -> None:
        self._at_write.append(call)

    def synchronizes(self, name: str) -> None:
        """The script is about to wait for the device."""
        for call in self._at_synchronize:
            call(name)

    def stop(self) -> NoReturn:
        if not self.is_stopping:
            self.is_stopping = True
            self.tell("stop", None)
            self.at_stop()
        raise EarlyStop("stepgraph has seen enough of this script")

    def cannot_judge(self, what: str) -> None:
        self.tell("cannot_judge", what)

    def refuse(self, name: str) -> NoReturn:
        """End the script at a name that has no meaning without a GPU."""
        self.cannot_judge(f"{name} needs a GPU")
        self.stop()

    def note(self, what: str) -> None:
        self.tell("note", what)

    def saw(self, what: str) -> None:
        self.tell("seen", what)

    def writes(self, path: str, refused: bool) -> None:
        """The script opens a file for writing."""
        for call in () if self.is_stopping else self._at_write:
            call(path)
        self.tell("file", {"path": path, "after_stop": self.is_stopping, "refused": refused})

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
    from stepgraph.tools.script.steps import StepEvents, StepFinder

    finder = StepFinder(running)
    with StepEvents(finder).watching():
        yield
        if not running.is_stopping:
            finder.finish()


@contextlib.contextmanager
def surroundings(request: Request, running: RunningChild) -> Iterator[None]:
    """List files, and map `cuda` where there is none."""
    from stepgraph.tools.script.files import FileWatch

    warnings.filterwarnings("ignore", message=".*there are global hooks on modules")  # ours, which begin steps
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings_at_own_lines())
        if running.is_cuda_mapped:
            from stepgraph.tools.script.cuda_on_cpu import CudaOnCpu

            mapping = CudaOnCpu(running.synchronizes, running.refuse, running.note)
            stack.enter_context(mapping.mapped())
        files = FileWatch(running.writes, os.path.dirname(request.answer), refuses=not request.script.writes)
        running.at_stop, running.refuse_writes = files.forget, files.refuse
        tempfile.gettempdir()  # which tries to write once
        if not request.script.writes:
            sys.dont_write_bytecode = True
        stack.enter_context(files.watching())
        yield


@contextlib.contextmanager
def warnings_at_own_lines() -> Iterator[None]:
    """Show a warning at the script's line where it would name ours, which only hands calls of torch on."""
    from stepgraph.core.frames import is_engine, is_installed, is_users_code

    show = warnings.showwarning

    def shown(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        frame: FrameType | None = sys._getframe(1) if is_engine(filename) else None
        while frame is not None:
            code = frame.f_code
            if is_users_code(code) and not is_installed(code.co_filename):
                filename, lineno, line = code.co_filename, frame.f_lineno, None
                break
            frame = frame.f_back
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = shown
    try:
        yield
    finally:
        if warnings.showwarning is shown:
            warnings.showwarning = show


def run_watched(request: Request, running: RunningChild, probe: Any) -> None:
    """Run the script as `__main__`, with all that watches it."""
    from stepgraph.tools.script.main_module import MainModule, NamedStep
    from stepgraph.tools.script.steps import StepCalls

    name = request.script.step
    calls = StepCalls(running)  # whose method a probe may replace
    step = None if name is None else NamedStep(name, lambda function: calls.wrapped(function))
    main_module = MainModule(request.script, step)
    steps = watched_steps(running) if step is None else contextlib.nullcontext()
    with surroundings(request, running), probe.running(), steps:
        main_module.run()
        if not running.is_stopping:
            calls.finish()
    if step is not None and not step.is_found:
        raise step.not_found(f"the script never imports {step.module}; it")


def ending(running: RunningChild, run: Callable[[], None]) -> dict[str, Any]:
    """Run the script; return how it ended, and its traceback."""
    done = Status.COMPLETED
    text = ""
    try:
        run()
    except EarlyStop:
        done = Status.STOPPED
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            done, text = Status.FAILED, f"SystemExit: {exit_.code}"
    except BaseException as error:  # noqa: BLE001 (it is the script's, and is reported)
        refusal = _refusal(error)
        if refusal is not None:
            return {"status": Status.FAILED, "exception": "", "refusal": refusal}
        done, text = Status.FAILED, script_traceback(error)
        missing = _missing_gpu(error) if running.is_cuda_mapped else None
        if missing is not None:
            running.cannot_judge(f"the script needs a GPU: {missing}")
            done = Status.STOPPED
    return {"status": Status.STOPPED if running.is_stopping else done, "exception": text}


def _refusal(error: BaseException) -> dict[str, Any] | None:
    """What the user asked for that cannot be done, found in this process."""
    refused = refusal_in(error)
    if isinstance(refused, StepgraphError) and refused.rule in ("step-name", "script-missing"):
        return {"what": refused.what, "rule": refused.rule}
    return None


def _missing_gpu(error: BaseException) -> str | None:
    from stepgraph.tools.script.cuda_on_cpu import missing_gpu

    return missing_gpu(error)


def script_traceback(error: BaseException) -> str:
    """Return the traceback of a script's error, without our frames; of an error of our own, with all of them.

    A refusal that a library has wrapped stands once more at the end, where one looks first.
    """
    from stepgraph.core.frames import is_engine

    found = traceback.TracebackException.from_exception(error)
    raised = [f for f in found.stack if not (f.name == _PASSES_ON and is_engine(f.filename))]
    if raised and is_engine(raised[-1].filename) and refusal_in(error) is None:
        return "".join(found.format()).rstrip()
    todo, seen = [found], set()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.stack = traceback.StackSummary.from_list(_own_frames(one.stack))
            todo += [other for other in (one.__cause__, one.__context__) if other is not None]
    text, refused = "".join(found.format()).rstrip(), refusal_in(error)
    if refused is None or refused is error:
        return text
    return f"{text}\n\nThe refusal behind it:\n{type(refused).__name__}: {refused}"


def _own_frames(stack: Sequence[traceback.FrameSummary]) -> Iterator[traceback.FrameSummary]:
    """The frames of a stack without ours, and without those of torch that lead to ours and on from them."""
    from stepgraph.core.frames import is_engine

    hidden: list[traceback.FrameSummary] = []
    for frame in stack:
        if is_engine(frame.filename) or frame.filename.endswith(_PLUMBING):
            hidden.append(frame)
            continue
        yield from () if any(is_engine(one.filename) for one in hidden) else hidden
        hidden = []
        yield frame
    yield from () if any(is_engine(one.filename) for one in hidden) else hidden


def make_probe(name: str, running: RunningChild) -> Any:
    """Make the probe `package.module:Class`."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)(running)


def main(request_file: str) -> None:
    """Run a request in a process that is made for it, below one that keeps it."""
    keep()
    carry_out(request_file)


def carry_out(request_file: str) -> None:
    """Run a request in this process."""
    with importing_torch():
        import torch

    request = Request.from_json(Path(request_file).read_text(encoding="utf-8"))
    running = RunningChild(request, is_cuda_mapped=not torch.cuda.is_available())
    probe = make_probe(request.probe, running)
    end = ending(running, lambda: run_watched(request, running, probe)) | {"time": time.time()}
    sys.stdout.flush()
    running.tell("end", end | {"result": dict(probe.result())})
