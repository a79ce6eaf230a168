"""The names guard compares the random states of a tracker, by name, with those that a graph was captured with."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.guards.protocol import Change, Remedy
from stepgraph.native.row import GuardRow
from stepgraph.rng.tracker import CudaRNGStatesTracker


class NamesGuard:
    """The names and the fork that a graph was captured with."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        self._tracker = tracker
        self._named = dict(zip(tracker.states, tracker.generators, strict=True))
        self._generators, self._active = tracker.generators, tracker.active
        self._asked = tracker.asked

    def if_needed(self) -> tuple[NamesGuard, ...]:
        """This guard, if the tracker was asked for anything since it was made."""
        return (self,) if self._tracker.asked != self._asked else ()

    def expect_fork(self, row: GuardRow) -> None:
        """What `fits` comes down to."""
        row.attribute(self._tracker, "active", self._active)

    def expect(self, row: GuardRow) -> None:
        """What `changed` comes down to."""
        row.attribute(self._tracker, "generators", self._generators)

    def fits(self) -> bool:
        """Whether the step is called inside the same fork, or outside any, as it was."""
        return self._tracker.active == self._active

    def changed(self) -> Sequence[Change]:
        """The first name that came or went."""
        if self._tracker.generators is self._generators:
            return ()
        now = self._tracker.states
        for name in now:
            if name not in self._named:
                return (Change(f"random state `{name}`", "", "was added to the tracker", Remedy.RECAPTURE),)
        for name in self._named:
            if name not in now:
                return (Change(f"random state `{name}`", "", "was removed from the tracker", Remedy.RECAPTURE),)
        return (Change("the tracker's random states", "", "were made again", Remedy.RECAPTURE),)
