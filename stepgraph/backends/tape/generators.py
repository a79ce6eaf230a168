"""The generators of one recording: where they were, and where recorded work has left them.

A generator's own methods (`generator.manual_seed`, `set_state`) are C++: no dispatcher sees them and nothing can take
their place. But they leave a state that no recorded work has left, so each is found out before the next operator runs,
or at the end. One that leaves the state as it was does nothing, and is let pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Generators:
    """The default generator and those that the recording was told of."""

    def __init__(self, given: Sequence[torch.Generator]) -> None:
        self._known = (torch.default_generator, *given)
        self._before: list[torch.Tensor] = []
        self._now: list[torch.Tensor] = []

    def knows(self, generator: Any) -> bool:
        """Whether a generator is among them. Operators see one through a new Python object each time."""
        return any(_address(generator) == _address(known) for known in self._known)

    def begin(self) -> None:
        """The recording begins."""
        self._before = self._now = self._states()

    def note(self) -> None:
        """What was done to them just now is part of the recording."""
        self._now = self._states()

    def were_set(self) -> bool:
        """Whether one is elsewhere than recorded work has left it."""
        return not all(map(torch.equal, self._states(), self._now))

    def put_back(self) -> list[torch.Generator]:
        """The recording has ended: all are where they were; gives those that a replay moves."""
        pairs = list(zip(self._known, self._before, strict=False))
        moved = [generator for generator, state in pairs if not torch.equal(generator.get_state(), state)]
        for generator, state in pairs:
            generator.set_state(state)
        self._before = []
        return moved

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._known]


def _address(generator: Any) -> int:
    return int(generator._cdata)
