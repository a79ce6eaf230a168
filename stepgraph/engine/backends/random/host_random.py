"""These checks refuse steps after which a replay would leave random state elsewhere than eager code does.

A graph advances the device's generators by itself. Numbers drawn on the host inside a step (`random.random()`, numpy,
torch's CPU generator in a step on a GPU) are drawn once, at capture, and frozen. Warm-up sees whether a step draws any,
and refuses it.

A step may seed a generator, or set its state, by a method of the generator itself. These methods are C++ and cannot be
watched. The tape finds out by itself. CUDA refuses a new seed under capture, but ignores the same seed, and takes a
state for a distance from where the graph begins: replays would go on drawing new numbers where eager code draws the
same ones again. Such a step gives itself away: each eager call leaves the generator where the call before had left it,
or, if the generator was drawn from in between, moves it backwards, which no draw does.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stepgraph.core.catalogue import entry
from stepgraph.core.collector import state_of
from stepgraph.core.errors import CaptureRefused
from stepgraph.engine.backends import Graph


class HostRandomWatch:
    """The host's random generators at one moment, to be compared with a later one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"random": random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            _, keys, position, *_ = numpy.random.get_state()
            states["numpy.random"] = (keys.tobytes(), position)
        if self._device.type != "cpu":
            states["torch's CPU generator"] = torch.get_rng_state().tolist()
        return states

    def advanced(self) -> list[str]:
        """The generators that were drawn from since."""
        now = self._states()
        return [name for name, state in self._before.items() if now[name] != state]


class GeneratorWatch:
    """The device's generators at one moment, to be compared with a later one."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        known = {id(generator): generator for generator in generators}.values()
        self._before = [(generator, state_of(generator)) for generator in known]

    def unmoved(self) -> list[torch.Generator]:
        """The generators that are where they were."""
        return [generator for generator, state in self._before if torch.equal(state_of(generator), state)]

    def was_set(self) -> bool:
        """Whether a generator on a GPU has another seed, or is before where it was: no draw does that."""
        return any(
            _seed_and_offset(state_of(generator))[0] != _seed_and_offset(state)[0]
            or _seed_and_offset(state_of(generator))[1] < _seed_and_offset(state)[1]
            for generator, state in self._before
            if generator.device.type == "cuda"
        )


def _seed_and_offset(state: torch.Tensor) -> tuple[bytes, int]:
    """The two parts of a CUDA generator's state."""
    whole = bytes(state.tolist())
    return whole[:8], int.from_bytes(whole[8:16], "little")


def refuse_rewound(unmoved: Sequence[torch.Generator], graphs: Iterable[Graph]) -> None:
    """Refuse graphs that move a generator which the last eager call has left where it was.

    Two eager calls are needed to tell: the first may begin anywhere.
    """
    still = set(map(id, unmoved))
    for graph in graphs:
        if any(id(generator) in still for generator in graph.random.moved):
            what = "each eager call leaves a generator where it was, and its graphs would move it"
            raise CaptureRefused(entry("reseed"), what, None)
