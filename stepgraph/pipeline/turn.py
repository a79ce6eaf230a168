"""A `StageTurn` checks each computation of a step against the order of the rank's schedule.

The graphs of a rank share memory by the order of its schedule, so they are right in that order only. Each computation
asks for its turn before it touches anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepgraph.errors import CaptureError
from stepgraph.order.entries import Entry, Kind


class StageTurn:
    """Where a step stands in the order of its rank."""

    def __init__(self, entries: Sequence[Entry], stages: Mapping[int, int]) -> None:
        self.entries = tuple(entries)
        self._stages = dict(stages)
        """The stage that a chunk is, by index."""
        self._next = 0

    def begin(self) -> None:
        """A step begins, whatever became of the last one."""
        self._next = 0

    def take(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """Take a turn; raises if it is another one's."""
        received = Entry(kind, chunk, microbatch)
        if self._next == len(self.entries) or self.entries[self._next] != received:
            raise self._refused(f"the {self._spell(received)}", f"received  {self._spell(received)}")
        self._next += 1

    def end(self) -> None:
        """The step is over; raises if it did less than the order says."""
        if self._next != len(self.entries):
            raise self._refused("the end of the step", "received  the end of the step")

    def _refused(self, what: str, received: str) -> CaptureError:
        expected = "the end of the step"
        if self._next < len(self.entries):
            expected = f"entry {self._next} of {len(self.entries)}: {self._spell(self.entries[self._next])}"
        return CaptureError(
            f"{what} is out of order",
            rule="replay-order",
            details=[f"expected  {expected}", received],
            why="the graphs of a pipeline's stages share memory by the order of the schedule.",
            fix="call graph_stage when the schedule is as it will be run; after a change, close the handle and call it "
            "anew.",
        )

    def _spell(self, entry: Entry) -> str:
        return f"{entry.kind.value} of stage {self._stages[entry.chunk]}, microbatch {entry.microbatch}"
