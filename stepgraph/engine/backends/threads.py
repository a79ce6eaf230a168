"""Hooks and replaced functions act on one step only, and leave other threads of the process alone.

torch's hooks, functions and compiler stance exist once for each process, and another thread may train or capture at the
same time. So a hook first asks for which step the code runs, and a replaced function is replaced for one step only.

torch iterates over its dictionaries of hooks in Python. Adding or removing an entry while another thread iterates
breaks that iteration ("OrderedDict mutated during iteration"). So all listeners share one entry (`HookPlace`). It is
made while the dictionary is empty and stays for as long as there are other threads.

On CUDA, autograd runs the backward, with its hooks and recomputation, in threads of its own, which Python did not
start. Those count as the step's. If two threads run steps at the same time, both see what happens there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import time
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from stepgraph.core.collector import collector_at_rest
from stepgraph.core.frames import is_running

K = TypeVar("K")
V = TypeVar("V")

_CHANGING = threading.RLock()
"""Held while something of the process is changed: what one thread puts there, another must not lose."""


def for_this_thread() -> Callable[[], bool]:
    """A check for later: whether the code that asks runs for a step that this thread calls.

    Only another thread that Python's `threading` started runs for somebody else.
    """
    home = threading.get_ident()

    def is_ours() -> bool:
        return threading.get_ident() == home or isinstance(threading.current_thread(), threading._DummyThread)

    return is_ours


def entries(mapping: Mapping[K, V]) -> list[tuple[K, V]]:
    """The entries of a dictionary of the process at one moment, safe against changes by other threads."""
    while True:
        try:
            return list(mapping.items())
        except RuntimeError:  # a finalizer has changed it: look again
            continue


class _Listeners:
    """The entry in one of torch's dictionaries of hooks: calls all listeners."""

    def __init__(self) -> None:
        self.calls: list[Callable[..., Any]] = []

    def __call__(self, *args: Any) -> None:
        for call in tuple(self.calls):
            call(*args)


class HookPlace:
    """One of torch's dictionaries of hooks for the whole process, and torch's functions that iterate over it."""

    def __init__(self, hooks: dict[int, Any], walkers: Container[types.CodeType]) -> None:
        self._hooks, self._walkers = hooks, walkers

    def listen(self, call: Callable[..., Any]) -> None:
        """Call this function as a hook."""
        with _CHANGING, collector_at_rest():  # a finalizer might leave, and take the entry out, while it is looked up
            found = self._find()
            if found is None:
                self._wait_for_walks()
                key, listeners = RemovableHandle(self._hooks).id, _Listeners()
                listeners.calls.append(call)
                self._hooks[key] = listeners
            else:
                found[1].calls.append(call)

    def leave(self, call: Callable[..., Any]) -> None:
        """Stop calling it. Finalizers call this too, at any moment and in any thread: it never waits."""
        found = self._find()
        if found is not None and call in found[1].calls:
            found[1].calls.remove(call)
        if found is None or found[1].calls or not _CHANGING.acquire(blocking=False):
            return
        try:
            with collector_at_rest():
                is_only_thread = len(sys._current_frames()) == 1
            if not found[1].calls and is_only_thread and not is_running(self._walkers):
                self._hooks.pop(found[0], None)
        finally:
            _CHANGING.release()

    def _find(self) -> tuple[int, _Listeners] | None:
        ours = ((key, hook) for key, hook in entries(self._hooks) if isinstance(hook, _Listeners))
        return next(ours, None)

    def _wait_for_walks(self) -> None:
        """Wait until nobody iterates over others' entries; not forever, since that may be our caller."""
        for _ in range(_MAX_WAITS):
            if not self._hooks or not is_running(self._walkers):
                return
            time.sleep(0.001)


_MAX_WAITS = 100


def is_own(hook: Any) -> bool:
    """Whether a hook is one of ours, which watch a step in warm-up."""
    return origin_of(hook).startswith("stepgraph.")


def origin_of(hook: Any) -> str:
    """The name of the Python module that defines a hook."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


class _Layer(NamedTuple):
    """One step's replacement of a function; it is given the function below it."""

    is_ours: Callable[[], bool]
    call: Callable[..., Any]


class _Layers:
    """A function of torch's while it is replaced."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._original: Callable[..., Any] = getattr(owner, name)
        self._is_inherited = isinstance(owner, type) and name not in vars(owner)
        self._layers: tuple[_Layer, ...] = ()
        self._for_all: Callable[..., Any] | None = self._original
        """What is called in all threads, put together once; None if that depends on the thread."""

        @functools.wraps(self._original)
        def function(*args: Any, **kwargs: Any) -> Any:
            call = self._for_all
            if call is None:
                call = self._with([layer for layer in self._layers if layer.is_ours()])
            return call(*args, **kwargs)

        function.__dict__["layers"] = self
        self._function = function
        setattr(owner, name, function)

    @classmethod
    def of(cls, owner: Any, name: str) -> _Layers:
        found = getattr(getattr(owner, name), "__dict__", {}).get("layers")
        return found if isinstance(found, cls) else cls(owner, name)

    def _with(self, layers: Iterable[_Layer]) -> Callable[..., Any]:
        call = self._original
        for layer in layers:
            call = functools.partial(layer.call, call)
        return call

    def _set(self, layers: tuple[_Layer, ...]) -> None:
        self._for_all, self._layers = None, layers  # in this order: other threads may call meanwhile
        if all(layer.is_ours is _always for layer in layers):
            self._for_all = self._with(layers)

    def add(self, layer: _Layer) -> None:
        self._set((*self._layers, layer))

    def remove(self, layer: _Layer) -> None:
        """The last one to go leaves the owner as it was."""
        self._set(tuple(one for one in self._layers if one is not layer))
        if not self._layers and getattr(self._owner, self._name) is self._function:
            if self._is_inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._original)


def _always() -> bool:
    return True


@contextlib.contextmanager
def replaced(owner: Any, name: str, call: Callable[..., Any], *, everywhere: bool = False) -> Iterator[None]:
    """Replace a function for this thread's step, or for all threads; `call` is given that function first."""
    layer = _Layer(_always if everywhere else for_this_thread(), call)
    with _CHANGING:
        layers = _Layers.of(owner, name)
        layers.add(layer)
    try:
        yield
    finally:
        with _CHANGING:
            layers.remove(layer)


class _Forced:
    """The compiler's stance while recordings force it, and how many do."""

    def __init__(self) -> None:
        self.count = 0
        self._switch = torch.compiler.set_stance("force_eager")  # set from here on
        vars(self._switch.stance)["forced"] = self

    def end(self) -> None:
        self._switch.__exit__(None, None, None)


@contextlib.contextmanager
def control_flow_is_compiled() -> Iterator[None]:
    """In code that runs eagerly by force, let torch.cond, while_loop and their like be compiled as they always are.

    torch brings their branches into the form that their backward needs by its compiler, which calls no kernels of its
    own there. Without it the backward of torch.cond raises a TypeError (torch 2.13).
    """

    def compiler(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = below(*args, **kwargs)
        if not args or not str(getattr(args[0], "__module__", "")).startswith("torch._higher_order_ops"):
            return made

        @functools.wraps(made)
        def run(*given: Any, **named: Any) -> Any:
            with torch.compiler.set_stance("default"):
                return made(*given, **named)

        return run

    with replaced(torch, "compile", compiler):
        yield


@contextlib.contextmanager
def compiled_code_runs_eagerly() -> Iterator[None]:
    """Let compiled code run its eager operators. torch has one stance: the last to leave puts the old one back."""
    with _CHANGING:
        stance = importlib.import_module("torch._dynamo.eval_frame")._stance
        forced = vars(stance).get("forced")
        if not isinstance(forced, _Forced):
            forced = _Forced()
        forced.count += 1
    try:
        yield
    finally:
        with _CHANGING:
            forced.count -= 1
            if forced.count == 0:
                forced.end()
