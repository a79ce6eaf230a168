"""GradScaler under capture: its three calls are cuts, and run eagerly at their places.

`scaler.step` reads a flag on the host to skip a step whose gradients overflowed, and `unscale_`, `step` and `update`
keep a small state machine in Python that only runs right when each of them runs at each step. So none of them is
recorded: each ends a segment and is called between two graphs, exactly as eager would. `scaler.scale(loss)` is a
multiplication with a tensor on the device and belongs to the graph; the scale is live there by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.state.patch import shadowed
from stepgraph.state.reach import reachable

_CUTS = ("unscale_", "step", "update")


def scalers_of(function: Callable[..., Any]) -> list[torch.amp.GradScaler]:
    """The GradScalers that a step can name."""
    return [value for value in reachable(function) if isinstance(value, torch.amp.GradScaler)]


@contextlib.contextmanager
def cut_at_scalers(
    scalers: Sequence[torch.amp.GradScaler], cut: Callable[[str, Callable[[], Any]], None], scaled: set[int]
) -> Iterator[None]:
    """While recording, turn each call of these scalers into a cut; `scaled` learns which optimizers they step."""
    with contextlib.ExitStack() as stack:
        for scaler in scalers:
            for name in _CUTS:
                stack.enter_context(shadowed(scaler, name, _noting(scaler, name, cut, scaled)))
        yield


def _noting(
    scaler: torch.amp.GradScaler, name: str, cut: Callable[[str, Callable[[], Any]], None], scaled: set[int]
) -> Callable[..., None]:
    original = getattr(scaler, name)

    def noted(*args: Any, **kwargs: Any) -> None:
        scaled.update(id(arg) for arg in args if isinstance(arg, torch.optim.Optimizer))
        cut(f"GradScaler.{name}", functools.partial(original, *args, **kwargs))

    return noted
