"""A graph records a GradScaler whole with fused optimizers; with any other its calls are cuts.

A fused optimizer takes the scale and the overflow flag as tensors on the device, skips its own step there, and
`unscale_` and `update` are device work too: nothing is read on the host, and all of it belongs to the graph. Any other
optimizer needs `scaler.step` to read the flag on the host. Then `unscale_`, `step` and `update` each end a segment and
are called between two graphs, exactly as eager would: they keep a small state machine in Python that only runs right
when every one of them runs at each step, so either all are recorded or none is.

Scalers are found by what the step does: their methods are watched on the class while it runs. One that is recorded is
guarded from then on, and guards need to be told of it beforehand; so a scaler that lies deeper in the step's objects
than `reachable` looks is never recorded, and its calls are cuts.

`scaler.scale(loss)` is a multiplication with a tensor on the device and belongs to the graph in any case; the scale is
live there by itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.backends.threads import for_this_thread
from stepgraph.optim.optimizer import Cut

_CALLS = ("unscale_", "step", "update")
_METHODS = ("scale", *_CALLS)


_See: TypeAlias = Callable[[torch.amp.GradScaler], None]
_Take: TypeAlias = Callable[[torch.amp.GradScaler, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_INSTALLING = threading.Lock()
"""Held while a class is changed: two threads may run steps, and what each puts there the other must not lose."""


class _Watcher(NamedTuple):
    """Who is told of a step's calls to scalers."""

    is_ours: Callable[[], bool]
    see: _See
    take: _Take | None


class _Watched:
    """A method of a scaler's class while somebody watches."""

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        self._original = vars(owner)[name]
        self._watchers: list[_Watcher] = []

        @functools.wraps(self._original)
        def method(scaler: torch.amp.GradScaler, /, *args: Any, **kwargs: Any) -> Any:
            return self._call(scaler, args, kwargs)

        method.__dict__["watched"] = self
        self._method = method
        setattr(owner, name, method)

    @classmethod
    def of(cls, owner: type, name: str) -> _Watched:
        """The one that is there already, or a new one."""
        found = getattr(vars(owner)[name], "__dict__", {}).get("watched")
        return found if isinstance(found, cls) else cls(owner, name)

    def add(self, watcher: _Watcher) -> None:
        self._watchers.append(watcher)

    def remove(self, watcher: _Watcher) -> None:
        """The last one to go leaves the class as it was."""
        self._watchers.remove(watcher)
        if not self._watchers and vars(self._owner).get(self._name) is self._method:
            setattr(self._owner, self._name, self._original)

    def _call(self, scaler: torch.amp.GradScaler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        take = None
        for watcher in list(self._watchers) if scaler.is_enabled() else ():
            if watcher.is_ours():
                watcher.see(scaler)
                take = watcher.take or take
        if take is not None and self._name in _CALLS:
            return take(scaler, self._name, self._original, args, kwargs)
        return self._original(scaler, *args, **kwargs)


@contextlib.contextmanager
def noticing_scalers(see: _See, take: _Take | None = None) -> Iterator[None]:
    """Be told of every GradScaler that is on and is called meanwhile, for a step that this thread calls.

    `take` is called in the place of `unscale_`, `step` and `update`, with the scaler, the method's name, the method
    itself, and its arguments.
    """
    watcher = _Watcher(for_this_thread(), see, take)
    with _INSTALLING:
        kinds = _with_subclasses(torch.amp.GradScaler)
        watched = [_Watched.of(kind, name) for kind in kinds for name in _METHODS if name in vars(kind)]
        for one in watched:
            one.add(watcher)
    try:
        yield
    finally:
        with _INSTALLING:
            for one in watched:
                one.remove(watcher)


def _with_subclasses(kind: type[torch.amp.GradScaler]) -> list[type]:
    found: list[type] = [kind]
    for child in kind.__subclasses__():
        found += [other for other in _with_subclasses(child) if other not in found]
    return found


class ScalerCapture:
    """The GradScalers of a step during one recording. `whole` is to try to record `scalers`; others are cut."""

    def __init__(
        self,
        scalers: Sequence[torch.amp.GradScaler],
        inside: Collection[Optimizer],
        cut: Cut,
        imitate: Callable[[Optimizer], Any],
        *,
        whole: bool,
    ) -> None:
        self._scalers = list(scalers)
        self._inside = {id(o) for o in inside if getattr(o, "_step_supports_amp_scaling", False)}
        self._cut, self._imitate = cut, imitate
        self._whole = whole
        self._was_cut = False
        self._is_calling = False
        self.stepped: set[int] = set()
        """Optimizers that a scaler stepped, by id."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While recording, take each call of the scalers in; their state in Python is the same afterwards."""
        with contextlib.ExitStack() as stack:
            for scaler in self._scalers:
                stack.enter_context(self._keeping_stages(scaler))
            stack.enter_context(noticing_scalers(lambda scaler: None, self._take))
            yield

    @property
    def is_sound(self) -> bool:
        """Whether all calls went one way. If not, the recording is of no use and must be made again with cuts."""
        return not (self._whole and self._was_cut)

    @contextlib.contextmanager
    def _keeping_stages(self, scaler: torch.amp.GradScaler) -> Iterator[None]:
        before = scaler._per_optimizer_states
        stages = _stages(before)
        scaler._per_optimizer_states = before.copy()  # with torch's own default for an optimizer not begun with
        scaler._per_optimizer_states.update({key: dict(state) for key, state in before.items()})
        try:
            yield
            if _stages(scaler._per_optimizer_states) != stages:  # begun before the step, or going on after it
                self._was_cut = True
        finally:
            scaler._per_optimizer_states = before

    def _take(
        self,
        scaler: torch.amp.GradScaler,
        name: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_calling:  # one method calls another: a part of it
            return original(scaler, *args, **kwargs)
        optimizers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Optimizer)]
        if name == "step":
            self.stepped.update(map(id, optimizers))
        rest = len(args) + len(kwargs) - len(optimizers)  # update(new_scale) reads a number of the host
        can_record = any(scaler is one for one in self._scalers) and not rest
        if self._whole and not self._was_cut and can_record and all(id(o) in self._inside for o in optimizers):
            self._is_calling = True
            try:
                with _keeping_attributes(optimizers):
                    return original(scaler, *args, **kwargs)
            finally:
                self._is_calling = False
        self._was_cut = True
        imitate = functools.partial(self._imitate, optimizers[0]) if name == "step" and optimizers else None
        return self._cut(f"GradScaler.{name}", functools.partial(original, scaler, *args, **kwargs), imitate)


def _stages(states: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """How far a scaler is with each optimizer that it has begun with."""
    return {key: state["stage"].value for key, state in states.items() if state["stage"].value}


@contextlib.contextmanager
def _keeping_attributes(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """What `GradScaler.step` hangs on an optimizer stays there if that fails, and would count at its next step."""
    names = ("grad_scale", "found_inf")
    before = [(o, {name: vars(o)[name] for name in names if name in vars(o)}) for o in optimizers]
    try:
        yield
    except BaseException:
        for optimizer, attributes in before:
            for name in names:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(attributes)
        raise
