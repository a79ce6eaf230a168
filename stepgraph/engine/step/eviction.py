"""A step decides which signatures get graphs, and which signatures make room for others.

Two things are limited: the number of graphs, and the memory of the pool that they share.

**Places.** At most `max_graphs` signatures have a place. A new signature takes a free place and warms up there. When no
place is free, its calls run eagerly and are counted. A signature that was seen more often than one that is still
warming up takes over the other's place, so that a few odd batches at the beginning do not lock out the usual one. In a
stream of signatures that are all new, none gets there, and all stay eager. Counts are kept for the latest signatures
only, so that such a stream takes no memory. `decide` is the rule, `Sites` applies it.

**Memory.** Graphs of a session share one pool. A smaller graph fits into memory that a larger one has left free. A
larger graph does not fit into what several smaller ones have left: torch's allocator does not join blocks of different
segments, and eight sequence lengths, shortest first, would take nearly three times the memory of the longest. So when a
signature arrives that is larger than all before, the graphs of the step are dropped, and the pool with them
(`Sites.before_capture`). The others are captured again when they come back, without warm-up, and use the memory of the
larger one.

Eager warm-up uses the pool, too, while the pool has no graphs, and fragments it in the same way. torch frees unused
memory of a pool only together with the pool, so a step could run out of memory where eager code does not. The pool is
therefore renewed for the first call of a larger signature, and before the first capture after several signatures have
warmed up.

Nothing is dropped from a small pool, or from one that holds graphs of other steps.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.call.messages import warn_past_limit
from stepgraph.engine.call.session import Session
from stepgraph.engine.observe.ddp import warmup_calls
from stepgraph.engine.record.chain import GraphLink
from stepgraph.engine.step.options import StepOptions
from stepgraph.engine.step.site import Site

REASON = "made room for a larger signature"
_MAX_COUNTED = 64
"""Number of signatures without a place whose calls are counted."""
_WORTH_BYTES = 256 << 20
"""A smaller pool is not renewed: it is not worth the time."""


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
    """The facts that decide about a call without a graph."""

    warm_calls: int
    """Eager calls so far with this signature."""
    warmup: int
    """Eager calls required before a capture."""
    num_graphs: int
    """Signatures captured so far."""
    num_warming: int
    """Other signatures that are still warming up, and do not give way to this one."""
    max_graphs: int
    obstacle: str | None
    """Why this signature stays eager: a capture failed, or a host value keeps changing."""


def decide(situation: Situation) -> Decision:
    """Warm up, capture, or stay eager."""
    s = situation
    if s.obstacle is not None:
        return Decision(Action.EAGER, s.obstacle)
    taken = s.num_graphs + (s.num_warming if s.warm_calls == 0 else 0)
    if s.num_graphs >= s.max_graphs:
        return Decision(Action.EAGER, f"past max_graphs={s.max_graphs}")
    if taken >= s.max_graphs:
        have = "are captured or warming up" if s.num_graphs else "are warming up"
        return Decision(Action.EAGER, f"max_graphs={s.max_graphs} other signatures {have}")
    if s.warm_calls < s.warmup:
        return Decision(Action.WARM_UP, "warm-up")
    return Decision(Action.CAPTURE, "warmed up")


class Sites:
    """The sites that have a place, by structure, leaf keys and flags of their calls."""

    def __init__(self, step: str, options: StepOptions, session: Session) -> None:
        self._step, self._options, self._session = step, options, session
        self._placed: dict[Hashable, Site] = {}
        self._counted: dict[Hashable, int] = {}
        """How often each signature without a place was seen, the latest last."""
        self._is_reported = False
        self._warmed = self._captured = 0
        """Bytes of the largest signatures that were warmed up and captured."""

    def get(self, key: Hashable) -> Site | None:
        return self._placed.get(key)

    def values(self) -> ValuesView[Site]:
        return self._placed.values()

    def add(self, key: Hashable, site: Site) -> None:
        self._placed[key] = site

    def remove(self, site: Site) -> None:
        """Take a site's place; its calls warm up again."""
        self._placed = {key: other for key, other in self._placed.items() if other is not site}

    def clear(self) -> None:
        self._placed.clear()
        self._counted.clear()
        self._is_reported = False

    def decide(self, key: Hashable, site: Site) -> Decision:
        """Decide about a call that no graph fits. Unless it stays eager, its site has a place from now on."""
        if key not in self._placed:
            site.seen = self._counted.pop(key, 0)
        site.seen += 1
        warming = {k: s for k, s in self._placed.items() if s.is_warming and s is not site}
        behind = [k for k, s in warming.items() if s.may_give_way and s.seen < site.seen]
        situation = Situation(
            warm_calls=site.warm_calls,
            warmup=warmup_calls(self._options.warmup, site.touched.modules),
            num_graphs=sum(len(s.calls) for s in self._placed.values()),
            num_warming=len(warming) - len(behind),
            max_graphs=self._options.max_graphs,
            obstacle=site.obstacle,
        )
        decision = decide(situation)
        if decision.action is not Action.EAGER:
            if key not in self._placed and situation.num_graphs + len(warming) >= self._options.max_graphs:
                del self._placed[min(behind, key=lambda k: warming[k].seen)]
                self._is_reported = False  # the reported signature may have a place by now
            self._placed[key] = site
        elif key not in self._placed:
            self._counted[key] = site.seen
            if len(self._counted) > _MAX_COUNTED:
                del self._counted[next(iter(self._counted))]
        return decision

    def report_past_limit(self, reason: str, site: Site) -> None:
        """Warn once, or raise under strict, that a call found no graph, and how it differs from the nearest one."""
        if self._is_reported and not self._options.strict:
            return
        self._is_reported = True
        known = [(other.sign(), bool(other.calls)) for other in self._placed.values()]
        warn_past_limit(self._step, reason, site.sign(), known, strict=self._options.strict)

    # -- making room: the largest signature goes first and shapes the memory

    def before_warm_up(self, leaves: Sequence[Any]) -> None:
        """Renew the pool before an eager call with these leaves, if they are the largest so far."""
        size = _bytes_of(leaves)
        is_largest, self._warmed = size > self._warmed, max(size, self._warmed)
        if is_largest and len(self._placed) > 1 and self._is_worth_it(graphs=0):
            self._session.workspace.renew()

    def before_capture(self, leaves: Sequence[Any]) -> int:
        """Drop all graphs before a capture for these leaves, if they are the largest so far. Return how many calls."""
        calls = [call for site in self.values() for call in site.calls]
        size, largest = _bytes_of(leaves), max((_bytes_of(call.parts.inputs.leaves) for call in calls), default=0)
        is_largest, self._captured = size > max(largest, self._captured), max(size, self._captured)
        graphs = sum(isinstance(link, GraphLink) for call in calls for link in call.parts.chain.links)
        if not (is_largest if calls else len(self._placed) > 1) or not self._is_worth_it(graphs=graphs):
            return 0
        for site in self.values():
            site.drop_graphs()
        self._session.workspace.renew()
        return len(calls)

    def _is_worth_it(self, *, graphs: int) -> bool:
        """Check that the pool is large, and that it holds only the step's own `graphs`."""
        return self._session.num_graphs == graphs and self._session.pool_bytes() >= _WORTH_BYTES


def _bytes_of(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if issubclass(type(leaf), torch.Tensor))
