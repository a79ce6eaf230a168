"""Watches what Python does in a script's steps, beside tensors: files, random draws, prints, logging, tokenizers.

A replay runs no Python, so all of it vanishes. Three sources see it, each with the line: Python's audit events see
files that are opened; a profile function sees calls, of Python and of C; a trace function sees the lines of the
user's own code, between which the states of the host's random generators are compared. It also notes which lines ran,
by which the changes of host values find theirs.

A debugger, a profiler or a coverage tool that the script runs under keeps its place: then lines are not known, and
`is_hidden` says so.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from stepgraph.core.errors import Location
from stepgraph.core.executed_code import ExecutedCode
from stepgraph.core.frames import is_engine
from stepgraph.engine.backends.random.host_random import HostRandomWatch
from stepgraph.tools.checks.places import is_own_code, is_plumbing, package_of, stack_of

Note = Callable[..., None]
"""Takes a rule, what happened, a frame, and its line if that is another one."""
_PACKAGES = MappingProxyType(
    {
        **dict.fromkeys(("tokenizers", "sentencepiece", "tiktoken", "youtokentome"), "tokenizer"),
        **dict.fromkeys(
            ("wandb", "mlflow", "comet_ml", "neptune", "loguru", "tensorboardX", "clearml", "aim", "tqdm", "rich"),
            "host-logging",
        ),
    }
)
"""The rule that calls of a library break, by the library's name."""
_TENSORBOARD = os.path.join("torch", "utils", "tensorboard", "")
_TOKENIZATION = ("tokenization_", "processing_")
"""How files of transformers begin that turn texts into ids."""
_READERS = frozenset(("linecache.py", "tokenize.py", "traceback.py", "inspect.py", "warnings.py", "pkgutil.py"))
"""Files of Python's own library that read source code."""
_NOT_DATA = ("/proc/", "/sys/", "/dev/")
_LAYERS = tuple(os.path.join(os.path.dirname(torch.__file__), "nn", name) for name in ("functional.py", "modules"))
_SEEDING = (torch.random.__file__, torch.cuda.random.__file__)
_SEEDS = frozenset(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_state"))
_GENERATOR = torch.Generator  # the mapping of cuda puts another class in its place
_LOGGED = logging.Logger.handle.__code__
_SCHEDULERS = torch.optim.lr_scheduler.__file__
_SET_PROFILE, _SET_TRACE = sys.setprofile, sys.settrace


class HostWork:
    """Reports the host's work in steps. `note` takes a rule, what happened, and a frame, or a frame and its line."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self.lines: Callable[[types.FrameType], None] = lambda frame: None
        """Is told each line of the user's code that runs, by its frame."""
        self.ran = ExecutedCode()
        self.is_active = self.is_hidden = False
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._rules: dict[types.CodeType, str | None] = {}
        self._owners: dict[type, str | None] = {}
        self._random: HostRandomWatch | None = None
        self._device = torch.device("cpu")
        self._at: tuple[types.FrameType, int] | None = None

    # -- when it watches

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps in this block. Audit hooks stay for good, and then do nothing."""
        sys.addaudithook(functools.partial(_audit, weakref.ref(self)))
        threading.setprofile(self._profile_thread)
        try:
            yield
        finally:
            threading.setprofile(None)
            self.stop()

    def start(self, device: torch.device) -> None:
        """A step begins."""
        self._device = device
        self._random = self._states()
        self.is_active = True
        self.is_hidden = self.is_hidden or sys.getprofile() not in (None, self._profile)
        self.is_hidden = self.is_hidden or sys.gettrace() not in (None, self._trace)
        if not self.is_hidden:
            for frame in stack_of(sys._getframe(1)):
                if is_own_code(frame.f_code):
                    frame.f_trace = self._local
                    if self._at is None:
                        self._at = (frame, frame.f_lineno or 0)
                        self.lines(frame)
            _SET_TRACE(self._trace)
            _SET_PROFILE(self._profile)

    def paused(self) -> _Paused:
        """Run a block of our own without being called for each line and call of it."""
        return _Paused()

    def stop(self) -> None:
        """A step is over."""
        if self._is_ours():
            self.settle()
        self.is_active = False
        self._at = None
        if sys.gettrace() == self._trace:
            _SET_TRACE(None)
        if sys.getprofile() == self._profile:
            _SET_PROFILE(None)

    def _is_ours(self) -> bool:
        return self.is_active and threading.get_ident() == self._thread and os.getpid() == self._process

    # -- files

    def opens(self, path: Any, mode: Any, flags: int) -> None:
        """A file is about to be opened."""
        if not self._is_ours():
            return
        if isinstance(path, int) or str(path).startswith(_NOT_DATA) or self._reads_code(sys._getframe(2)):
            return
        writes = any(letter in str(mode) for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
        verb = "writes" if writes else "reads"
        self._note("host-file", f"{verb} {os.path.basename(os.fsdecode(path))}", sys._getframe(2))

    def _reads_code(self, frame: types.FrameType) -> bool:
        """Whether Python imports a module or looks up source code, as for a warning, or stepgraph opened it."""
        is_librarys = False
        for one in stack_of(frame):
            file = one.f_code.co_filename
            if is_own_code(one.f_code):
                return False
            if file.startswith("<frozen importlib") or os.path.basename(file) in _READERS:
                return True
            if is_engine(file) and not is_librarys:
                return True
            is_librarys = is_librarys or package_of(file) != ""
        return True  # no line of the user's

    # -- calls

    def _profile(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.ran.note(frame, event, arg)
            code = frame.f_code
            if code in self._rules:
                rule = self._rules[code]
            else:
                rule = self._rules[code] = self._rule_of(code)
            if rule is not None and self.is_active:
                self._call(rule, frame)
        elif event == "c_call" and self.is_active and is_own_code(frame.f_code):
            self._c_call(frame, arg)

    def _rule_of(self, code: types.CodeType) -> str | None:
        file = code.co_filename
        if code is _LOGGED:
            return "logging"
        if file in _SEEDING and code.co_name in _SEEDS:
            return "reseed"
        if file == _SCHEDULERS and code.co_name == "step":
            return "host-value"
        if _TENSORBOARD in file:
            return "host-logging"
        package = package_of(file)
        if package == "transformers":
            return "tokenizer" if os.path.basename(file).startswith(_TOKENIZATION) else None
        return _PACKAGES.get(package)

    def _call(self, rule: str, frame: types.FrameType) -> None:
        caller = frame.f_back
        if rule == "logging":
            self._note("host-logging", "logs a message", frame)
        elif rule == "reseed":
            outer = next((one for one in stack_of(caller) if not is_plumbing(one.f_code.co_filename)), None)
            if outer is not None and is_own_code(outer.f_code):
                self._note(rule, f"calls {frame.f_code.co_name}()", outer)
        elif rule == "host-value":
            if caller is not None and caller.f_code.co_filename != _SCHEDULERS:
                self._note(rule, "calls scheduler.step(), which changes the optimizer's numbers", frame)
        elif caller is not None and is_own_code(caller.f_code) and frame.f_code.co_name not in ("<module>", "__init__"):
            self._note(rule, f"calls {frame.f_code.co_name}()", caller)

    def _c_call(self, frame: types.FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if function is builtins.print or (
            isinstance(owner, io.TextIOBase) and function.__name__ == "write" and owner in (sys.stdout, sys.stderr)
        ):
            self._note("host-print", "prints", frame)
        elif owner is not None and not isinstance(owner, types.ModuleType):
            kind = type(owner)
            if kind is _GENERATOR and function.__name__ in _SEEDS:
                self._note("reseed", f"calls Generator.{function.__name__}()", frame)
            if kind not in self._owners:
                self._owners[kind] = _PACKAGES.get(str(kind.__module__).partition(".")[0])
            rule = self._owners[kind]
            if rule is not None:
                self._note(rule, f"calls {function.__name__}()", frame)

    def _profile_thread(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """The profile function of threads that the script starts."""
        if not self.is_active or os.getpid() != self._process or event not in ("call", "c_call"):
            return
        if event == "c_call":
            is_torchs = is_own_code(frame.f_code) and _is_torchs(arg)
        else:
            caller = frame.f_back
            is_torchs = frame.f_code.co_filename.startswith(_LAYERS)
            is_torchs = is_torchs and caller is not None and is_own_code(caller.f_code)
        if is_torchs:
            self._note("other-thread", f"runs in the thread {threading.current_thread().name}", frame)

    # -- lines

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event != "call" or not is_own_code(frame.f_code):
            return None
        self._move_to(frame)
        return self._local

    def _local(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._move_to(frame)
        elif event == "return":
            back = next((one for one in stack_of(frame.f_back) if is_own_code(one.f_code)), None)
            self._move_to(back)
        return self._local

    def _move_to(self, frame: types.FrameType | None) -> None:
        """The user's code goes on at this frame's line: what was drawn since was drawn by the line before."""
        if not self._is_ours():
            return
        self.settle()
        self._at = (frame, frame.f_lineno or 0) if frame is not None else None
        if frame is not None:
            self.lines(frame)

    def settle(self) -> None:
        """Note what was drawn since the last line began."""
        if self._random is None:
            return
        drawn = self._drawn()
        if drawn and self._at is not None:
            frame, line = self._at
            for source in drawn:
                where = Location(frame.f_code.co_filename, line, frame.f_code.co_name)
                self._note("host-random", f"draws from {source}", frame, where)
        if drawn:
            self._random = self._states()

    def _drawn(self) -> list[str]:
        assert self._random is not None
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return self._random.advanced()

    def _states(self) -> HostRandomWatch:
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return HostRandomWatch(self._device)


class _Paused(contextlib.AbstractContextManager[None]):
    """Python's trace and profile functions are set aside. A class: it is entered for each operation."""

    def __enter__(self) -> None:
        self._trace, self._profile = sys.gettrace(), sys.getprofile()
        _SET_PROFILE(None)
        _SET_TRACE(None)

    def __exit__(self, *_: Any) -> None:
        _SET_TRACE(self._trace)
        _SET_PROFILE(self._profile)


def _audit(watching: weakref.ref[HostWork], event: str, args: tuple[Any, ...]) -> None:
    """An audit hook, which Python keeps for good: it keeps nothing else."""
    work = watching() if event == "open" else None
    if work is not None:
        work.opens(*args)


def _is_torchs(function: Any) -> bool:
    """Whether a function of C is an operation of torch's."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Tensor):
        return function.__name__ not in ("size", "dim", "stride", "data_ptr", "is_pinned")
    return owner is None and getattr(torch, function.__name__, None) is function
