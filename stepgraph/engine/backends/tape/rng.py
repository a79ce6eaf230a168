"""The tape repeats at every replay what a step does to a CPU generator.

Kernels draw from the generator by themselves. But `torch.get_rng_state` and `set_rng_state`, which activation
checkpointing uses, and the swaps of a named state with the default one are host calls that no dispatcher sees. While
the tape records, each is made through `RandomCalls`, which also leaves an entry on the tape. Seeding is refused, as on
CUDA. A generator's own methods cannot be replaced and are refused (`tape.graph`), although CUDA records
`generator.set_state` to a state that was read in the same graph.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgraph.core.catalogue import entry
from stepgraph.core.collector import state_of
from stepgraph.core.errors import CaptureRefused
from stepgraph.core.frames import user_location
from stepgraph.engine.backends.tape.graph import Head, TapeGraph
from stepgraph.engine.backends.threads import replaced


class RandomCalls:
    """Calls on random state while the tape records: made at once, and again at each replay."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._read: dict[int, tuple[weakref.ref[torch.Tensor], list[torch.Tensor], TapeGraph | None]] = {}
        """States that were read: where each replay puts its own, and in which graph."""

    def get(self, generator: torch.Generator) -> torch.Tensor:
        """A generator's state. Set later, it is at each replay the state read at the last replay."""
        state, graph = state_of(generator), self._head.graph
        cell = [state]
        self._read = {key: entry for key, entry in self._read.items() if entry[0]() is not None}
        self._read[id(state)] = (weakref.ref(state), cell, graph)
        if graph is not None:
            graph.random.reads = True
            graph.call(lambda: cell.__setitem__(0, state_of(generator)))
        return state

    def put(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Set a generator's state, which must be one of the same seed."""
        if torch.Generator().set_state(state).initial_seed() != generator.initial_seed():
            self.refuse("reseed", "setting a random state of another seed")
        known, cell, origin = self._read.get(id(state), (None, [state], None))
        if known is None or known() is not state:
            cell, origin = [state], None
        if self._head.graph is not None and origin is not self._head.graph:
            self._head.graph.random.rewinds_to.add(origin)
        self._do(lambda: generator.set_state(cell[0]), lambda: generator.set_state(state))

    def swap(self, generator: torch.Generator) -> None:
        """Swap a generator's state with that of the default one."""
        if self._head.graph is not None and not self._head.graph.knows(generator):
            self.refuse("generator", "drawing from a generator's state")
        exchange = functools.partial(swap_states, torch.default_generator, generator)
        self._do(exchange, exchange)

    def refuse(self, rule: str, what: str) -> None:
        """Break the recording, if one is under way."""
        self._head.refuse(CaptureRefused(entry(rule), what, user_location()))

    def _do(self, at_replay: Callable[[], Any], now: Callable[[], Any]) -> None:
        graph = self._head.graph
        if graph is None:
            now()
            return
        with graph.moving_generators():
            graph.call(at_replay)
            now()


def swap_states(one: torch.Generator, two: torch.Generator) -> None:
    """Exchange the states of two generators."""
    first, second = state_of(one), state_of(two)
    one.set_state(second)
    two.set_state(first)


@contextlib.contextmanager
def recorded_rng_calls(calls: RandomCalls) -> Iterator[None]:
    """Record `torch.get_rng_state` and `torch.set_rng_state`; refuse seeding."""

    def manual_seed(below: Callable[[Any], torch.Generator], value: Any) -> torch.Generator:
        calls.refuse("reseed", "torch.manual_seed")
        return below(value)

    replacements: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda _: calls.get(torch.default_generator),
        "set_rng_state": lambda _, new_state: calls.put(torch.default_generator, new_state),
        "manual_seed": manual_seed,
    }
    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            for name, call in replacements.items():
                stack.enter_context(replaced(module, name, call))
        yield
