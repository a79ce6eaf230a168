"""A backward graph on CUDA repeats the random draws of its forward graph.

A graph's kernels draw from where their generator is when the replay begins, and a state read under capture is a
distance from there. Activation checkpointing reads the state in the forward and goes back to it in the backward. If the
backward is a graph of its own, it has to begin where the forward began: `Origin` notes that when the forward is
replayed, and the generators are put there for the backward's replay. While graphs are recorded, torch's functions that
read and set the state are replaced by forms that note which graphs need this.

Seeding is refused. torch refuses a new seed under capture, but silently ignores the seed that the generator already
has: replays would go on drawing where eager code starts again.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import CaptureRefused
from stepgraph.core.frames import user_location
from stepgraph.engine.backends.base import Graph
from stepgraph.engine.backends.threads import replaced


class Origin:
    """Seed and offset of generators at one moment."""

    def __init__(self, states: Sequence[torch.Generator]) -> None:
        self._places = [(state, state.initial_seed(), state.get_offset()) for state in states]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Move the generators there for the length of the block."""
        now = Origin([state for state, _, _ in self._places])
        self._go()
        try:
            yield
        finally:
            now._go()

    def _go(self) -> None:
        for state, seed, offset in self._places:
            if state.initial_seed() != seed:
                state.manual_seed(seed)
            state.set_offset(offset)


_SEEDING = (
    (torch, ("manual_seed", "seed")),
    (torch.random, ("manual_seed", "seed")),
    (torch.cuda, ("manual_seed", "manual_seed_all", "seed", "seed_all")),
    (torch.cuda.random, ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)
"""torch's functions that seed the device's default generator."""


class StateCalls:
    """Reads and settings of the default generator's state while graphs are recorded."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        """The graph that records right now."""
        self._read: dict[int, tuple[weakref.ref[torch.Tensor], Graph]] = {}

    def saw_read(self, state: torch.Tensor) -> None:
        if self.graph is not None:
            self._read = {key: entry for key, entry in self._read.items() if entry[0]() is not None}
            self._read[id(state)] = (weakref.ref(state), self.graph)
            self.graph.random.reads = True

    def saw_set(self, state: torch.Tensor) -> None:
        if self.graph is not None:
            known = self._read.get(id(state))
            origin = known[1] if known is not None and known[0]() is state else None
            if origin is not self.graph:
                self.graph.random.rewinds_to.add(origin)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch `torch.cuda.get_rng_state` and `torch.cuda.set_rng_state`; refuse seeding."""

        def get_rng_state(below: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            state = below(*args, **kwargs)
            self.saw_read(state)
            return state

        def set_rng_state(below: Callable[..., None], new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.saw_set(new_state)
            below(new_state, *args, **kwargs)

        def seed(name: str, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.graph is not None:
                self.graph.refuse(CaptureRefused(entry("reseed"), name, user_location()))
            return below(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            for module in (torch.cuda, torch.cuda.random):
                stack.enter_context(replaced(module, "get_rng_state", get_rng_state))
                stack.enter_context(replaced(module, "set_rng_state", set_rng_state))
            for module, names in _SEEDING:
                for name in names:
                    stack.enter_context(replaced(module, name, functools.partial(seed, f"{module.__name__}.{name}")))
            yield


_OFFSET = slice(8, 16)
"""The bytes of a state that hold the offset; the seed comes before them."""
_ONE_DRAW = 4
"""The offset of the smallest draw."""


def offset_under_capture(generator: torch.Generator) -> int:
    """How far a generator has moved in the graph being recorded."""
    return int.from_bytes(bytes(generator.get_state()[_OFFSET].tolist()), "little")


def advance_under_capture(generators: Sequence[torch.Generator]) -> None:
    """Move generators on in the graph being recorded, without a draw."""
    for generator in generators:
        state = generator.get_state()
        offset = offset_under_capture(generator) + _ONE_DRAW
        state[_OFFSET] = torch.tensor(list(offset.to_bytes(8, "little")), dtype=torch.uint8)
        generator.set_state(state)
