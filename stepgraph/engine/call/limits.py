"""Limits on how often something that keeps changing is captured again before its calls stay eager, and for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MAX_CHANGES = 2
"""Captures for one value that keeps changing, after which its calls stay eager."""
REPLAYS_THAT_PAY = 8
"""Replays after which a capture has paid off: a later change is not counted."""


def weigh_changes(so_far: Counter[str], names: Iterable[str], replays: int) -> tuple[Counter[str], list[str]]:
    """Return the counted changes, and which of these names change too often to be captured again.

    `replays` counts the replays of the dropped graph. If a value changes once an epoch, the step is captured once an
    epoch; if it changes at each call, the step soon stays eager.
    """
    if replays >= REPLAYS_THAT_PAY:
        return so_far, []
    changed = list(names)
    counted = so_far + Counter(changed)
    return counted, [name for name in changed if counted[name] > MAX_CHANGES]


class Changes:
    """Counts changes that made a capture useless, and when to try again.

    A value may change at each of the first calls and then rest, as a weight does that is ramped up. So calls stay eager
    only for a while, each time twice as long. A value that never rests costs a recording after 8, 16, 32, ... calls.
    """

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        self._left = 0
        self.pause = 0
        """Eager calls before the next try, as of the last `weigh` that found a value to change too often."""

    def weigh(self, names: Iterable[str], replays: int) -> list[str]:
        """Count changes after so many replays. Return the names that change too often: then a pause begins."""
        self._counted, often = weigh_changes(self._counted, names, replays)
        if often:
            self.rest()
        return often

    def rest(self) -> int:
        """Begin a pause, twice as long as the last one. Return its calls."""
        self._left = self.pause = 2 * self.pause or REPLAYS_THAT_PAY
        return self.pause

    def is_pause_over(self) -> bool:
        """Count an eager call. Return True once, after the last one of a pause."""
        was_in_pause, self._left = self._left > 0, max(0, self._left - 1)
        return was_in_pause and not self._left
