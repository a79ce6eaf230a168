"""Finds which code has run, and the names in it: a library is searched as far as that, and no further.

A recorded call depends on the code that ran and on the values which that code has read. A function that did not run has
read none. This matters for libraries: a layer of Hugging Face's can name thousands of functions, down to those that
download weights, and runs twenty. Where a profiler has taken Python's only place for one, or code is compiled, nothing
is known of what runs, and everything counts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import opcode
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from stepgraph.core.frames import is_called_for_an_operator, is_engine, is_installed, is_users_code

_AT_LARGE = frozenset(
    (
        *("getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "getmembers"),
        *("asdict", "astuple", "eval", "exec"),
    )
)
"""Names of functions that read attributes which the code does not spell."""
MAKING = frozenset(("__init__", "__post_init__", "__repr__", "__str__"))
"""Methods that name every attribute, but that a step seldom calls."""
_MAX_UNSEEN = 512
"""The limit of functions that count only for a name in code that may run unseen."""
_TRIES = 1000
_MAX_STRING = 64
"""Longer strings are texts, not names."""


class Names:
    """The names and short strings in code, which that code may look up."""

    def __init__(self) -> None:
        self.spelled: set[str] = set()
        """Those in code of the user and of libraries."""
        self.platforms: set[str] = set()
        """Those in torch's and Python's own code."""
        self.uses_dynamic_names = False
        """True if user code calls getattr, vars or eval: any attribute may be read."""

    def add(self, code: types.CodeType) -> set[str]:
        """Read some code. Returns the new names."""
        found = strings_in(code)
        if not is_users_code(code):
            if not is_engine(code.co_filename):
                self.platforms |= found
            return set()
        if not is_installed(code.co_filename):
            self.uses_dynamic_names = self.uses_dynamic_names or not _AT_LARGE.isdisjoint(found)
        new = found - self.spelled
        self.spelled |= new
        return new

    def copy(self) -> Names:
        made = copy.copy(self)
        made.spelled, made.platforms = set(self.spelled), set(self.platforms)
        return made


def strings_in(code: types.CodeType) -> set[str]:
    """The names and short strings in code, also of inner functions."""
    return set(_strings_in(code))


def _strings_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    waiting: list[Any] = [code.co_consts]
    while waiting:
        for constant in waiting.pop():
            kind = type(constant)
            if kind is str:
                if len(constant) <= _MAX_STRING:
                    yield constant
            elif kind is tuple or kind is frozenset:
                waiting.append(constant)
            elif kind is types.CodeType:
                yield from _strings_in(constant)


_GLOBALS = tuple(
    (opcode.opmap[name], int(name == "LOAD_GLOBAL"))  # whose lowest bit is a flag
    for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    if name in opcode.opmap
)


def globals_in(code: types.CodeType) -> set[str]:
    """The names in code that are globals: a loop's variable `loss` is not the `output.loss` of a step."""
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    found: set[str] = set()
    for operation, shift in _GLOBALS:
        at = operations.find(operation)
        while at >= 0:
            argument, before = arguments[at], at
            while operations[before - 1] == opcode.EXTENDED_ARG and before > 0:
                before -= 1
                argument |= arguments[before] << (8 * (at - before))
            found.add(code.co_names[argument >> shift])
            at = operations.find(operation, at + 1)
    if "globals" in found:
        found.update(_strings_in(code))
    return found.union(*(globals_in(inner) for inner in code.co_consts if type(inner) is types.CodeType))


_SIMPLE = frozenset((int, float, bool, str, type(None), tuple, list, dict, types.MemberDescriptorType))


def functions_behind(value: Any) -> list[types.FunctionType]:
    """The functions that run for an attribute of a class (a method, a getter), and those that they wrap."""
    if type(value) is types.FunctionType and not vars(value):
        return [value]
    if type(value) in _SIMPLE:
        return []
    found: list[types.FunctionType] = []
    waiting = [value]
    while waiting and len(found) < 16:
        value = waiting.pop()
        kind = type(value)
        if kind is types.FunctionType:
            found.append(value)
        if issubclass(kind, property):
            waiting += (value.fget, value.fset)
        elif issubclass(kind, (staticmethod, classmethod, types.MethodType)):
            waiting.append(value.__func__)
        elif issubclass(kind, (functools.partial, functools.cached_property, functools.partialmethod)):
            waiting.append(value.func)
        elif issubclass(kind, functools.singledispatchmethod):
            waiting.append(value.dispatcher)
        elif not issubclass(kind, type):
            try:
                waiting.append(object.__getattribute__(value, "__dict__").get("__wrapped__"))
            except AttributeError:
                continue
    return found


class ExecutedCode:
    """The code that was seen to run in some calls."""

    def __init__(self) -> None:
        self._codes: dict[int, types.CodeType] = {}
        """By id; kept, so that no other code takes the id of one."""
        self._operators: dict[types.CodeType, dict[str, Any]] = {}
        """Those that torch has called for an operator, with their globals."""
        self._of_collector: frozenset[types.CodeType] = frozenset()
        """Callbacks of the garbage collector. Python runs them at any moment, whatever the code does."""
        self._is_whole = True
        self._is_elsewhere = False
        self._names, self._num_read = Names(), 0

    @property
    def is_known(self) -> bool:
        """Whether a call was observed, and all of them were."""
        return self._is_whole and bool(self._codes)

    @property
    def is_hidden(self) -> bool:
        """Whether running code cannot be seen."""
        return not self._is_whole

    def __contains__(self, code: types.CodeType) -> bool:
        return id(code) in self._codes

    def codes(self) -> list[types.CodeType]:
        return list(self._codes.values())

    def operators(self) -> dict[types.CodeType, dict[str, Any]]:
        """The user's functions that torch has called for an operator, its kernel or its gradient, by code: globals."""
        return self._operators

    def names(self) -> Names:
        """The names in the code that ran: a copy, to be added to."""
        for code in self.codes()[self._num_read :]:
            self._names.add(code)
            self._num_read += 1
        return self._names.copy()

    def give_up(self) -> None:
        self._is_whole = False

    def noted(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, with what runs in it noted."""

        def run() -> Any:
            with self.noting():
                return call()

        return run

    @contextlib.contextmanager
    def noting(self, backwards_on: torch.device | None = None) -> Iterator[None]:
        """Note the code that runs in this block, in this thread, and in that of backwards on a device.

        Where Python has events for it (3.12), each piece of code is reported once, whichever thread runs it.
        """
        self._of_collector = frozenset(one.__code__ for callback in gc.callbacks for one in functions_behind(callback))
        events = getattr(sys, "monitoring", None)
        tool = next((tool for tool in (3, 4) if events.get_tool(tool) is None), None) if events is not None else None
        if tool is not None:
            with self._monitoring(tool):
                yield
            return
        found = sys.getprofile()
        outer = getattr(found, "__self__", None)
        if found is not None and type(outer) is not ExecutedCode:
            self.give_up()
            yield
            return
        _profile_by(self.note)
        try:
            if backwards_on is not None:
                in_a_backward(backwards_on, self._begin)
            yield
        finally:
            if backwards_on is not None:
                in_a_backward(backwards_on, self._end)
            if sys.getprofile() == self.note:
                _profile_by(found)
            else:  # the block has used a profiler, or ended one that it found
                self.give_up()
            if type(outer) is ExecutedCode:
                outer._codes |= self._codes
                outer._operators |= self._operators
                outer._is_whole = outer._is_whole and self._is_whole

    @contextlib.contextmanager
    def _monitoring(self, tool: int) -> Iterator[None]:
        events: Any = sys.monitoring  # type: ignore[attr-defined]

        def started(code: types.CodeType, _: int) -> Any:
            self._see(code, sys._getframe(1))
            return events.DISABLE

        events.use_tool_id(tool, "stepgraph")
        try:
            events.register_callback(tool, events.events.PY_START, started)
            events.restart_events()  # of code that was reported in an earlier block
            events.set_events(tool, events.events.PY_START)
            yield
        finally:
            events.set_events(tool, 0)
            events.free_tool_id(tool)

    def _begin(self) -> None:
        self._is_elsewhere = sys.getprofile() is None  # else autograd uses this very thread, or has a profiler
        if self._is_elsewhere:
            _profile_by(self.note)

    def _end(self) -> None:
        if self._is_elsewhere and sys.getprofile() == self.note:
            _profile_by(None)

    def note(self, frame: types.FrameType, event: str, _: Any) -> None:
        """Note a call, as Python's profile function."""
        if event == "call":
            self._see(frame.f_code, frame)

    def _see(self, code: types.CodeType, frame: types.FrameType) -> None:
        if id(code) not in self._codes and code not in self._of_collector:
            self._codes[id(code)] = code
            if is_users_code(code) and code.co_name not in MAKING and is_called_for_an_operator(frame):
                self._operators[code] = frame.f_globals


class Running:
    """Decides which functions count: those that ran, and those that may run unseen.

    Unseen are a step that was not called yet, a function whose result a cache has kept, a backward or a hook in another
    thread, with all that they call by name. Where nothing is known (`is_known`), all of the user's functions count and
    those of libraries that they name; where running code cannot be seen, those of libraries that these name, too.
    """

    def __init__(self, ran: ExecutedCode | None) -> None:
        self.is_known = ran is not None and ran.is_known
        self._ran = ran if ran is not None else ExecutedCode()
        self.names = self._ran.names() if self.is_known else Names()
        self._is_hidden = self._ran.is_hidden
        self._unseen: set[types.CodeType] = set()
        self._called: set[str] = set()
        """The names in code that may run unseen."""
        self._num_unseen = 0
        self._reached: set[types.CodeType] = set()
        """The code of all functions that a name has led to."""

    def admit(self, *values: Any) -> None:
        """Let these functions, methods or their wrappers count: they may run unseen."""
        self._unseen.update(function.__code__ for value in values for function in functions_behind(value))

    def kernels(self) -> list[types.FunctionType]:
        """The functions of operators that ran and that no name has led to: torch keeps them, the collector knows."""
        unknown = {code: scope for code, scope in self._ran.operators().items() if code not in self._reached}
        found = [one for one in gc.get_referrers(*unknown) if type(one) is types.FunctionType] if unknown else []
        kernels = [function for function in found if function.__code__ in unknown]
        hidden = unknown.keys() - {function.__code__ for function in kernels}  # by `gc.freeze`
        return kernels + [types.FunctionType(code, unknown[code]) for code in hidden if not code.co_freevars]

    def has(self, code: types.CodeType) -> bool:
        """Whether code was seen to run."""
        return self.is_known and code in self._ran

    def runs(self, functions: Iterable[types.FunctionType]) -> bool:
        """Whether one of these functions is known to count."""
        return any(self.has(f.__code__) or f.__code__ in self._unseen for f in functions)

    def names_in(self, classes: Iterable[type]) -> frozenset[str]:
        """The names in and of those methods of classes that ran; or that may run, if that is not known."""
        found: set[str] = set()
        for kind in classes:
            for name, item in vars(kind).items():
                is_asked = name in self.names.spelled or (name.startswith("__") and name not in MAKING)
                functions = functions_behind(item)
                if functions and (self.runs(functions) if self.is_known else is_asked):
                    found.update((name, *(string for one in functions for string in strings_in(one.__code__))))
        return frozenset(found)

    def counts(self, function: types.FunctionType, is_near: bool) -> bool:
        """Whether a function counts; `is_near`: it is the user's, or the user's code names it."""
        code = function.__code__
        self._reached.add(code)
        if self.has(code):
            if not is_installed(code.co_filename):
                self._called.update(*map(strings_in, self._unseen_in(code)))
            return True
        if code not in self._unseen and (self.is_known or not is_near):
            if not (self._is_hidden or function.__name__ in self._called) or self._num_unseen >= _MAX_UNSEEN:
                return False
            self._num_unseen += 1
        self._called |= strings_in(code)
        return True

    def names_beside(self, kind: type, method: str) -> set[str]:
        """The names in the user's code that ran, without a method of a class and the methods that it calls."""
        found = {name: functions_behind(item) for base in reversed(kind.__mro__) for name, item in vars(base).items()}
        own: set[types.CodeType] = set()
        waiting = {method}
        while waiting:
            codes = {function.__code__ for function in found.pop(waiting.pop(), ())}
            own |= codes
            waiting.update(*(strings_in(code) & found.keys() for code in codes))
        others = [code for code in self._ran.codes() if code not in own and is_users_code(code)]
        return set().union(*map(strings_in, others))

    def _unseen_in(self, code: types.CodeType) -> Iterator[types.CodeType]:
        """The functions inside another one that were not seen to run: hooks, for example."""
        for inner in code.co_consts:
            if type(inner) is types.CodeType:
                yield from self._unseen_in(inner) if inner in self._ran else (inner,)


class TrackingPaused:
    """Pause the tracking of executed code."""

    __slots__ = ("_found",)

    def __enter__(self) -> None:
        self._found: Any = None
        found = sys.getprofile()
        if type(getattr(found, "__self__", None)) is ExecutedCode:
            self._found = found
            _profile_by(None)

    def __exit__(self, *error: object) -> None:
        if self._found is not None:
            _profile_by(self._found)


def _profile_by(function: Any) -> None:
    """Set the profile function of this thread. Python 3.11 refuses while another thread sets its own."""
    for _ in range(_TRIES):
        try:
            sys.setprofile(function)
            return
        except RuntimeError:
            time.sleep(0)
    sys.setprofile(function)


def in_a_backward(device: torch.device, call: Callable[[], None]) -> None:
    """Call something in the thread in which autograd runs backwards on a device, where that is not this one."""
    if device.type == "cpu":
        return
    plain = torch.autocast(device.type, enabled=False)
    with contextlib.suppress(RuntimeError), torch.inference_mode(False), torch.enable_grad(), plain:
        # a device that is out of memory or broken: that is the step's own error to tell
        result = torch.zeros((), device=device, requires_grad=True).neg()
        result.register_hook(lambda _: call())
        torch.autograd.backward(result)
