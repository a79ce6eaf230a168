"""Other threads of the process: what is watched or replaced for one step must not reach them.

torch's hooks, its functions and the compiler's stance are there once a process, and another thread may train, or
capture a step of its own, at the same time. So whoever is called by a hook asks first for which step the code runs, and
what takes the place of one of torch's functions does so for one step only.

A step is more than the thread that calls it: on CUDA, autograd runs the backward, and all hooks and recomputation in
it, in threads of its own, which Python did not start. Those count as the step's. If two threads run steps at the same
time they share them, and what happens there is seen by both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_CHANGING = threading.RLock()
"""Held while something of the process is changed: what one thread puts there, another must not lose."""


def for_this_thread() -> Callable[[], bool]:
    """A question to be asked later: whether the code that asks runs for a step that this thread calls.

    Only a thread that was started by Python's `threading`, and is not this one, is somebody else's.
    """
    home = threading.get_ident()

    def is_ours() -> bool:
        return threading.get_ident() == home or isinstance(threading.current_thread(), threading._DummyThread)

    return is_ours


class _Layer(NamedTuple):
    """What one step has in the place of a function; it is given the function below it."""

    is_ours: Callable[[], bool]
    call: Callable[..., Any]


class _Layers:
    """A function of torch's while there is anything in its place."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._original: Callable[..., Any] = getattr(owner, name)
        self._layers: tuple[_Layer, ...] = ()

        @functools.wraps(self._original)
        def function(*args: Any, **kwargs: Any) -> Any:
            call = self._original
            for layer in self._layers:
                if layer.is_ours():
                    call = functools.partial(layer.call, call)
            return call(*args, **kwargs)

        function.__dict__["layers"] = self
        self._function = function
        setattr(owner, name, function)

    @classmethod
    def of(cls, owner: Any, name: str) -> _Layers:
        """Those that are there already, or none yet."""
        found = getattr(getattr(owner, name), "__dict__", {}).get("layers")
        return found if isinstance(found, cls) else cls(owner, name)

    def add(self, layer: _Layer) -> None:
        self._layers = (*self._layers, layer)

    def remove(self, layer: _Layer) -> None:
        """The last one to go leaves the owner as it was."""
        self._layers = tuple(one for one in self._layers if one is not layer)
        if not self._layers and getattr(self._owner, self._name) is self._function:
            setattr(self._owner, self._name, self._original)


@contextlib.contextmanager
def replaced(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Have `call` in the place of a function for this thread's step; it is given that function first."""
    layer = _Layer(for_this_thread(), call)
    with _CHANGING:
        layers = _Layers.of(owner, name)
        layers.add(layer)
    try:
        yield
    finally:
        with _CHANGING:
            layers.remove(layer)


class _Forced:
    """The compiler's stance while recordings have set it, and how many there are."""

    def __init__(self) -> None:
        self.count = 0
        self._switch = torch.compiler.set_stance("force_eager")  # set from here on
        vars(self._switch.stance)["forced"] = self

    def end(self) -> None:
        self._switch.__exit__(None, None, None)


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
