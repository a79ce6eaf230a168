"""What to do with a call: pure decisions, each with its reason."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Action(enum.Enum):
    """The ways a call can go."""

    REPLAY = "replay"
    WARM_UP = "warm-up"
    CAPTURE = "capture"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and why."""

    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the decision about a call without a graph of its own rests on."""

    warm_calls: int
    """Eager calls so far with this signature."""
    warmup: int
    """Eager calls wanted before a capture."""
    num_graphs: int
    """Signatures captured so far."""
    num_warming: int
    """Other signatures that are still warming up, and do not give way to this one."""
    max_graphs: int
    obstacle: str | None
    """Why this signature is not captured any more: a capture failed, a host value keeps changing."""


def decide(situation: Situation) -> Decision:
    """Warm up, capture, or stay eager."""
    s = situation
    if s.obstacle is not None:
        return Decision(Action.EAGER, s.obstacle)
    taken = s.num_graphs + (s.num_warming if s.warm_calls == 0 else 0)
    if taken >= s.max_graphs:
        return Decision(Action.EAGER, f"past max_graphs={s.max_graphs}")
    if s.warm_calls < s.warmup:
        return Decision(Action.WARM_UP, "warm-up")
    return Decision(Action.CAPTURE, "warmed up")
