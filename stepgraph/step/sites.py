"""The call sites of a step, and which of them have a place: at most `max_graphs` are captured.

A signature that comes for the first time takes a free place, and warms up there. When no place is free, its calls run
eagerly and are counted. Eight odd batches at the beginning must not lock out the one that comes ever after: a signature
that was seen more often than one that is still warming up takes its place. A stream of signatures that are each new
never gets there, and stays eager. Counts are kept for the latest signatures only, so that a stream takes no memory.
"""

from __future__ import annotations

from collections.abc import Hashable, ValuesView

from stepgraph.observe.ddp import warmup_calls
from stepgraph.session.messages import warn_past_limit
from stepgraph.session.options import Options
from stepgraph.step.policy import Action, Decision, Situation, decide
from stepgraph.step.site import Site

_MAX_COUNTED = 64
"""Signatures without a place whose calls are counted."""


class Sites:
    """The sites that have a place, by what their calls look like."""

    def __init__(self, step: str, options: Options) -> None:
        self._step, self._options = step, options
        self._placed: dict[Hashable, Site] = {}
        self._counted: dict[Hashable, int] = {}
        """How often signatures without a place were seen, the latest last."""
        self._is_told = False

    def get(self, key: Hashable) -> Site | None:
        return self._placed.get(key)

    def values(self) -> ValuesView[Site]:
        return self._placed.values()

    def add(self, key: Hashable, site: Site) -> None:
        """Give a site a place."""
        self._placed[key] = site

    def clear(self) -> None:
        self._placed.clear()
        self._counted.clear()
        self._is_told = False

    def decide(self, key: Hashable, site: Site) -> Decision:
        """What to do with a call that no graph fits. Unless it stays eager, its site has a place from now on."""
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
                self._is_told = False  # the one that it was told of may have a place by now
            self._placed[key] = site
        elif key not in self._placed:
            self._counted[key] = site.seen
            if len(self._counted) > _MAX_COUNTED:
                del self._counted[next(iter(self._counted))]
        return decision

    def tell_past_limit(self, reason: str, site: Site) -> None:
        """Say once, or raise under strict, that a call found no graph, and how it differs from the nearest one."""
        if self._is_told and not self._options.strict:
            return
        self._is_told = True
        known = [(other.sign(), bool(other.calls)) for other in self._placed.values()]
        warn_past_limit(self._step, reason, site.sign(), known, strict=self._options.strict)
