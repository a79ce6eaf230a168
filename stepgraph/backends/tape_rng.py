"""Random state on the tape: what a step does to the CPU generator must happen again at every replay.

Kernels draw from the generator by themselves. But `torch.get_rng_state` and `set_rng_state`, which activation
checkpointing uses to repeat its dropout masks, are host calls that no dispatcher sees. While the tape records they are
replaced, in this one place, by forms that also leave an entry on it. Seeding inside a step is refused, as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgraph.errors import CaptureRefused, entry
from stepgraph.frames import user_location


@contextlib.contextmanager
def recorded_rng_calls(
    record: Callable[[Callable[[], None]], None], refuse: Callable[[CaptureRefused], None]
) -> Iterator[None]:
    """Record `torch.get_rng_state` and `torch.set_rng_state`; refuse seeding."""
    names = ("get_rng_state", "set_rng_state", "manual_seed")
    originals = [(module, name, getattr(module, name)) for module in (torch, torch.random) for name in names]
    get, put, seed = torch.get_rng_state, torch.set_rng_state, torch.manual_seed
    saved: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def get_rng_state() -> torch.Tensor:
        state = get()
        cell = [state]
        saved.append((state, cell))
        record(lambda: cell.__setitem__(0, get()))
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        cell = next((cell for state, cell in saved if state is new_state), [new_state])
        record(lambda: put(cell[0]))
        put(new_state)

    def manual_seed(value: Any) -> torch.Generator:
        refuse(CaptureRefused(entry("reseed"), "torch.manual_seed", user_location()))
        return seed(value)

    replacements = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state, "manual_seed": manual_seed}
    for module, name, _ in originals:
        setattr(module, name, replacements[name])
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
