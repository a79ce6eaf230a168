"""GradScaler under capture: with fused optimizers it is recorded whole, else its calls are cuts.

A fused optimizer takes the scale and the overflow flag as tensors on the device, skips its own step there, and
`unscale_` and `update` are device work too: nothing is read on the host, and all of it belongs to the graph. Any other
optimizer needs `scaler.step` to read the flag on the host. Then `unscale_`, `step` and `update` each end a segment and
are called between two graphs, exactly as eager would: they keep a small state machine in Python that only runs right
when every one of them runs at each step, so either all are recorded or none is.

`scaler.scale(loss)` is a multiplication with a tensor on the device and belongs to the graph in any case; the scale is
live there by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.state.patch import shadowed
from stepgraph.state.reach import reachable
from stepgraph.state.untouched import Untouched

_CALLS = ("unscale_", "step", "update")
_NUMBERS = ("growth_factor", "backoff_factor", "growth_interval", "enabled")


def scalers_of(function: Callable[..., Any]) -> list[torch.amp.GradScaler]:
    """The GradScalers that a step can name and that are on."""
    found = [value for value in reachable(function) if isinstance(value, torch.amp.GradScaler)]
    return [scaler for scaler in found if scaler.is_enabled()]


class ScalerCapture:
    """The GradScalers of a step during one recording. `whole` is to try to record them."""

    def __init__(
        self,
        scalers: Sequence[torch.amp.GradScaler],
        inside: Collection[Optimizer],
        cut: Callable[[str, Callable[[], Any]], None],
        *,
        whole: bool,
    ) -> None:
        self._scalers = list(scalers)
        self._inside = {id(o) for o in inside if getattr(o, "_step_supports_amp_scaling", False)}
        self._cut = cut
        self._whole = whole
        self._was_cut = False
        self.stepped: set[int] = set()
        """Optimizers that a scaler stepped, by id."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While recording, take each call of the scalers in; their state in Python is the same afterwards."""
        with contextlib.ExitStack() as stack:
            for scaler in self._scalers:
                stack.enter_context(self._keeping_stages(scaler))
                for name in _CALLS:
                    stack.enter_context(shadowed(scaler, name, self._taking(scaler, name)))
            yield

    @property
    def is_sound(self) -> bool:
        """Whether all calls went one way. If not, the recording is of no use and must be made again with cuts."""
        return not (self._whole and self._was_cut)

    @contextlib.contextmanager
    def _keeping_stages(self, scaler: torch.amp.GradScaler) -> Iterator[None]:
        before = scaler._per_optimizer_states
        scaler._per_optimizer_states = before.copy()
        try:
            yield
            if scaler._per_optimizer_states != before:  # no update() in the step: the stages go on after it
                self._was_cut = True
        finally:
            scaler._per_optimizer_states = before

    def _taking(self, scaler: torch.amp.GradScaler, name: str) -> Callable[..., Any]:
        original = getattr(scaler, name)

        def taken(*args: Any, **kwargs: Any) -> Any:
            optimizers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Optimizer)]
            if name == "step":
                self.stepped.update(map(id, optimizers))
            rest = len(args) + len(kwargs) - len(optimizers)  # update(new_scale) reads a number of the host
            if self._whole and not self._was_cut and not rest and all(id(o) in self._inside for o in optimizers):
                return original(*args, **kwargs)
            self._was_cut = True
            return self._cut(f"GradScaler.{name}", functools.partial(original, *args, **kwargs))

        return taken


class ScalerGuard:
    """The numbers of a recorded GradScaler that its kernels have baked in."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._tensors = (scaler._scale, scaler._growth_tracker)
        self._numbers = self._read()

    def _read(self) -> tuple[Any, ...]:
        return tuple(getattr(self._scaler, f"_{name}") for name in _NUMBERS)

    def expect(self, row: Untouched) -> None:
        """What `changed` comes down to."""
        names = ("scale", "growth_tracker", *_NUMBERS)
        for name, value in zip(names, (*self._tensors, *self._numbers), strict=True):
            row.attribute(self._scaler, f"_{name}", value)

    def changed(self) -> str | None:
        """What is not as it was; the scale itself is live."""
        scale, tracker = self._tensors
        if self._scaler._scale is not scale or self._scaler._growth_tracker is not tracker:
            return "the state of GradScaler"
        now = self._read()
        if now == self._numbers:
            return None
        pairs = zip(_NUMBERS, self._numbers, now, strict=True)
        return next(f"GradScaler {name} {one} -> {two}" for name, one, two in pairs if one != two)
