"""Limits say how often a changing step is captured again, before its calls stay eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MAX_CHANGES = 2
"""Captures for one thing that keeps changing, after which its calls stay eager."""
REPLAYS_THAT_PAY = 8
"""Replays after which a capture was worth it: a change that comes later is not held against what has changed."""


def weigh_changes(so_far: Counter[str], names: Iterable[str], replays: int) -> tuple[Counter[str], list[str]]:
    """The counted changes, and those of these names that change too often to be captured again.

    `replays` are those of the graph that is dropped for the change. A value that changes once an epoch is captured
    once an epoch; one that changes at each call soon stays eager.
    """
    if replays >= REPLAYS_THAT_PAY:
        return so_far, []
    changed = list(names)
    counted = so_far + Counter(changed)
    return counted, [name for name in changed if counted[name] > MAX_CHANGES]
