"""A rehearsal records a captured call once more, without effect, and hands back what a graph of it would hold.

An audit does the same for the engine. A rehearsal is for those who ask what the graph depends on (`inspect.frozen`):
they change something on the host, record, compare, and ask the guards of the graph in use whether they notice. All that
a recording teaches the engine about the step is forgotten, since it was not the user's program that ran.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.executed_code import ExecutedCode
from stepgraph.engine.backends import Backend
from stepgraph.engine.backends.nodes import Nodes
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.guards.protocol import Change
from stepgraph.engine.guards.signature import leaf_keys
from stepgraph.engine.oplog import Log
from stepgraph.engine.record.chain import GraphLink
from stepgraph.engine.step.call import CallArgs, CapturedCall
from stepgraph.engine.step.record import Look, StepCapture
from stepgraph.engine.step.site import Site


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What one recording holds."""

    log: Log
    nodes: tuple[Nodes | None, ...]
    """The nodes of each graph, or None where they cannot be read."""


class Rehearsal:
    """Records one call of a captured step again, for as long as its graph is in use."""

    def __init__(self, capture: StepCapture, site: Site, call: CapturedCall, given: CallArgs, backend: Backend) -> None:
        self._capture, self._site, self._call, self._given = capture, site, call, given
        self.backend = backend
        self._outside = {id(optimizer) for optimizer, is_outside in self.optimizers if is_outside}

    # -- what the step is

    @property
    def name(self) -> str:
        return self._capture.name

    @property
    def function(self) -> Callable[..., Any]:
        """The step, with the objects that were passed to it and the hooks that run in it."""
        return self._capture.whole(self._site)

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        return self._site.touched.named_modules

    @property
    def ran(self) -> ExecutedCode:
        return self._site.touched.ran

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        """The leaves of the call's arguments, with their names."""
        return list(zip(self._site.sign().names(), self._given.leaves, strict=True))

    @property
    def optimizers(self) -> list[tuple[Optimizer, bool]]:
        """The optimizers in reach, and whether each runs between graphs."""
        placements = self._capture.placements(self._site)
        outside = {key for key, placement in placements.items() if not placement.inside}
        return [(optimizer, id(optimizer) in outside) for optimizer in self._site.touched.all_optimizers]

    # -- what the engine does

    @property
    def log(self) -> Log:
        """The operations of the graph in use."""
        return self._call.proof.log

    def changes(self) -> Sequence[Change]:
        """Ask the guards of the graph in use what has changed since its capture."""
        return self._call.guards.changed()

    def is_ignored(self, name: str) -> bool:
        """Check whether the guards leave out this value although they reach it."""
        return name in self._capture.unwatched[0]

    def why_not_watched(self, name: str) -> str:
        """Say why the guards do not report a change of this value, and when it is found instead."""
        ignored, audit = self._capture.unwatched
        why = "it is named in `ignore=`" if name in ignored else "the watch cannot reach it"
        return f"{why}; " + ("audit=False: nothing finds a change" if audit is False else "a change waits for an audit")

    def has_other_graph(self, leaves: Sequence[Any]) -> bool:
        """Check whether a call with these leaves instead is served by a graph of its own."""
        return self._keys(leaves) != self._keys(self._given.leaves)

    def _keys(self, leaves: Sequence[Any]) -> tuple[Hashable, ...]:
        return leaf_keys(leaves, gradients=True, on=self.backend.device.type)

    def record(self, leaves: Sequence[Any] | None = None) -> Rehearsed:
        """Record the call, or one with other leaves, and drop the recording. Raises what the step raises.

        Optimizers that run between graphs stay there, whatever their numbers and flags are now, and read them.
        """
        site, given = self._site, self._given
        if leaves is not None:
            site, given = (
                site.sibling(site.sign_as(self._keys(leaves)), 0),
                CallArgs(leaves, given.structure, None),
            )
        learnt, results = copy.deepcopy(site.learnt), dict(site.eager.results)
        moved = self._capture.moved
        self._capture.moved = dict.fromkeys(self._outside, "as in the graph in use") | moved
        try:
            with interrupts_held() as raise_held:
                recorded, _ = self._capture.record_again(site, given, raise_held, Look(at_code=False))
                try:
                    links = recorded.made.chain.links
                    nodes = tuple(link.graph.read_nodes() for link in links if isinstance(link, GraphLink))
                finally:
                    recorded.made.drop()
            return Rehearsed(recorded.made.log, nodes)
        finally:
            site.learnt, site.eager.results, self._capture.moved = learnt, results, moved
