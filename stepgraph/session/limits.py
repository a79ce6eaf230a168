"""Limits on how often a step that keeps changing is captured again before its calls stay eager."""

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
