"""A graph records a GradScaler whole with fused optimizers; with any other its calls are cuts.

A fused optimizer takes the scale and the overflow flag as tensors on the device and skips its own step there;
`unscale_` and `update` are device work too, so all of it belongs to the graph. Any other optimizer needs `scaler.step`
to read the flag on the host. Then `unscale_`, `step` and `update` each end a segment and are called between two graphs,
as eager would. They keep a small state machine in Python, so either all of them are recorded or none is.

Scalers are found by what the step does: their methods are watched on the class while it runs. Each call is an event of
the operation log, and what it runs a section (`noting_scalers`). A recorded scaler is guarded from then on, and guards
must know it beforehand. So a scaler that is deeper in the step's objects than
`reachable` looks is never recorded, and its calls are cuts. `scaler.scale(loss)` multiplies with a tensor on the device
and is always recorded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.oplog import OpLog
from stepgraph.engine.optim.optimizer import Cut

_CALLS = ("unscale_", "step", "update")
_METHODS = ("scale", *_CALLS)
_Scaler: TypeAlias = torch.amp.GradScaler
_Take: TypeAlias = Callable[[_Scaler, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def noticing_scalers(see: Callable[[_Scaler], None], take: _Take | None = None) -> Iterator[None]:
    """Report every enabled GradScaler that this thread's step calls in this block.

    `take` is called in the place of `unscale_`, `step` and `update`, with the scaler, the method's name, the method
    itself, and its arguments.
    """

    def noticed(name: str, method: Callable[..., Any], scaler: _Scaler, /, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            see(scaler)
            if take is not None and name in _CALLS:
                return take(scaler, name, method, args, kwargs)
        return method(scaler, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for kind, name in _methods(_METHODS):
            stack.enter_context(replaced(kind, name, functools.partial(noticed, name)))
        yield


@contextlib.contextmanager
def noting_scalers(log: OpLog) -> Iterator[None]:
    """Note each call of a GradScaler in this block in a log, disabled ones too, and its operations as a section."""

    def noted(name: str, method: Callable[..., Any], scaler: _Scaler, /, *args: Any, **kwargs: Any) -> Any:
        about = [log.identity(arg) if isinstance(arg, Optimizer) else arg for arg in (*args, *kwargs.values())]
        log.note_event(f"GradScaler.{name}", log.identity(scaler), *about)
        log.begin_section(id(scaler), f"GradScaler.{name}")
        try:
            return method(scaler, *args, **kwargs)
        finally:
            log.end_section(id(scaler))

    with contextlib.ExitStack() as stack:
        for kind, name in _methods(_CALLS):
            stack.enter_context(replaced(kind, name, functools.partial(noted, name)))
        yield


def _methods(names: Iterable[str]) -> list[tuple[type[_Scaler], str]]:
    kinds = _with_subclasses(torch.amp.GradScaler)
    return [(kind, name) for kind in kinds for name in names if name in vars(kind)]


def _with_subclasses(kind: type[_Scaler]) -> list[type]:
    found: list[type] = [kind]
    for child in kind.__subclasses__():
        found += [other for other in _with_subclasses(child) if other not in found]
    return found


class ScalerCapture:
    """The GradScalers of a step during one recording. `whole` is to try to record `scalers`; others are cut."""

    def __init__(
        self,
        scalers: Sequence[_Scaler],
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
        self.between: list[_Scaler] = []
        """Scalers whose calls were cut."""
        self.has_begun = False
        """True if a scaler has made its scale, which it does once, at its first use."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While recording, take over each call of the scalers; their state in Python is the same afterwards."""
        with contextlib.ExitStack() as stack:
            for scaler in self._scalers:
                stack.enter_context(self._keeping_stages(scaler))
            stack.enter_context(noticing_scalers(lambda scaler: None, self._take))
            yield

    @property
    def is_sound(self) -> bool:
        """Whether all calls went one way. If not, the recording must be made again with cuts."""
        return not (self._whole and self._was_cut)

    @contextlib.contextmanager
    def _keeping_stages(self, scaler: _Scaler) -> Iterator[None]:
        before, made = scaler._per_optimizer_states, (scaler._scale, scaler._growth_tracker)
        stages = _stages(before)
        scaler._per_optimizer_states = before.copy()  # with torch's own default for an optimizer not begun with
        scaler._per_optimizer_states.update({key: dict(state) for key, state in before.items()})
        try:
            yield
            if _stages(scaler._per_optimizer_states) != stages:  # begun before the step, or going on after it
                self._was_cut = True
        finally:
            scaler._per_optimizer_states = before
            self.has_begun = self.has_begun or scaler._scale is not made[0]
            scaler._scale, scaler._growth_tracker = made

    def _take(
        self, scaler: _Scaler, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
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
        self.between.append(scaler)
        imitate = functools.partial(self._imitate, optimizers[0]) if name == "step" and optimizers else None
        return self._cut(f"GradScaler.{name}", functools.partial(original, scaler, *args, **kwargs), imitate)


def _stages(states: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """The stage of a scaler for each optimizer that it has begun with."""
    return {key: state["stage"].value for key, state in states.items() if state["stage"].value}


@contextlib.contextmanager
def _keeping_attributes(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Remove what a failed `GradScaler.step` leaves on an optimizer: it would count at its next step."""
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
