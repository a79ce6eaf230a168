"""The names guard compares the named random states of a tracker with those at capture."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.backends.random.tracker import CudaRNGStatesTracker
from stepgraph.engine.guards.protocol import Change, Remedy


class NamesGuard:
    """The names and the fork that a graph was captured with."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        self._tracker = tracker
        self._named = dict(zip(tracker.states, tracker.generators, strict=True))
        self._generators, self._active = tracker.generators, tracker.active
        self._asked = tracker.asked

    def if_needed(self) -> tuple[NamesGuard, ...]:
        """Return this guard, if the tracker was used since the guard was made."""
        return (self,) if self._tracker.asked != self._asked else ()

    def expect_fork(self, row: GuardRow) -> None:
        """Add the check of `fits` to a row."""
        row.attribute(self._tracker, "active", self._active)

    def expect(self, row: GuardRow) -> None:
        row.attribute(self._tracker, "generators", self._generators)

    def fits(self) -> bool:
        """Check that the step is called inside the same fork as at capture, or outside any fork."""
        return self._tracker.active == self._active

    def changed(self) -> Sequence[Change]:
        """Report the first name that was added or removed."""
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
