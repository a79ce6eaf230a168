"""A module's site stands for all its calls that look alike: it has their runners and the facts known about them.

`ManagedModule` has the sites of one module, and counts its calls.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.frames import warn_user
from stepgraph.core.storage import storage_of
from stepgraph.core.tree import Structure
from stepgraph.engine.guards.signature.fast_match import FastMatch
from stepgraph.engine.memory.outputs import StaticOutputs
from stepgraph.engine.parts.modules.options import ModuleOptions
from stepgraph.engine.record.pair.cached_casts import shared_cast
from stepgraph.engine.record.pair.call import EagerCall
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.lanes import Tenant
from stepgraph.engine.record.pair.own_uses import UsesWatch
from stepgraph.engine.record.pair.runner import DelayedWeights, Runner
from stepgraph.engine.record.pair.target import PairTarget


class ManagedModule:
    """The sites of one module or method, and the counts of its calls."""

    def __init__(self, target: PairTarget, options: ModuleOptions) -> None:
        self.target, self.options = target, options
        self.sites: dict[Hashable, ModuleSite] = {}
        self.last: LastModuleCall | None = None
        """The last call of a known kind, for a fast comparison."""
        self.eager_reasons: Counter[str] = Counter()
        self.recapture_reasons: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Calls that have raised an error of stepgraph, by rule."""
        self.forwards = self.backwards = 0
        """Replays of freed graphs."""
        self.changes: Counter[str] = Counter()
        """Values that changed soon after a capture, so that the capture did not pay."""
        self.delayed: list[DelayedWeights] = []
        """Replayed calls whose weight gradients wait for `backward_dw()`, the oldest first."""
        self.leaves_weights = _leaves_weights(self.module)
        """True if a layer inside leaves its weight gradient for later, so that the graphs must do the same."""
        self.rebuilt: str | None = None
        """How the modules inside have changed, if no call has run since."""
        self.obstacle: str | None = None
        """The reason why all calls stay eager, also of kinds that come later."""

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def module(self) -> torch.nn.Module:
        return self.target.module

    @property
    def on(self) -> str:
        """The kind of device that its graphs run on."""
        return self.target.shared.session.backend.device.type

    def tally(self) -> tuple[int, int, int]:
        """The numbers of calls, replayed forwards and runners."""
        runners = [runner for site in self.sites.values() for runner in site.runners]
        forwards = self.forwards + sum(runner.forwards for runner in runners)
        return forwards + self.eager_reasons.total(), forwards, len(runners)

    def look_for_replays(self) -> None:
        """In the backward of an eager call, warn if it also reaches replayed calls, which share no casts with it."""
        if self.target.shared.in_flight.of(self.module).has_more_to_come():
            for site in self.sites.values():
                if any(runner.edges.keeps_casts for runner in site.runners):
                    site.on_shared_backward()

    def drop(self) -> None:
        """Free this module's graphs; its calls warm up again. If it was rebuilt, they are of new kinds."""
        rebuilt = self.target.rebuilt()
        for site in self.sites.values():
            for runner in site.runners:
                self.forwards += runner.forwards
                self.backwards += runner.backward_runs
                runner.retire()
            site.runners, site.recorded = [], None
        self.target.drop_pair()
        self.leaves_weights = _leaves_weights(self.module)
        if rebuilt is not None:
            self._forget_sites()

    def forget(self) -> None:
        """Free this module's graphs, and forget all obstacles to a capture."""
        self.drop()
        self._forget_sites()
        self.changes.clear()
        self.obstacle = None

    def _forget_sites(self) -> None:
        self.last = None
        for site in self.sites.values():
            site.is_forgotten = True
        self.sites.clear()


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One eager call of a module that is to be graphed, and its place in a round."""

    eager: EagerCall
    site: ModuleSite
    slot: int
    """The first lane without another call of the module or a replayed call in flight."""
    born_at: int
    """The number of backwards before it."""
    made_by: dict[int, tuple[ModuleCall, int]] = field(default_factory=dict)
    """Arguments that are another call's result: that call, and the index of the result."""
    shared: dict[int, int] = field(default_factory=dict)
    """Arguments that other calls were given too, by leaf index, as numbers of tensors."""


@dataclass(frozen=True, slots=True)
class LastModuleCall:
    """The look of a site's calls: a call that looks the same finds the site without a signature."""

    fast_match: FastMatch
    structure: Structure
    around: tuple[Hashable, ...]
    """Flags, modes and other values, beside the arguments, by which kinds of calls are distinguished."""
    site: ModuleSite


class ModuleSite:
    """All calls of one module that look alike, and their runners."""

    def __init__(self, manager: ManagedModule, kind: CallKind) -> None:
        self.manager, self.kind = manager, kind
        self.runners: list[Runner] = []
        self.recorded: EagerCall | None = None
        self.had_backward = self.is_passed_by = False
        """True if a backward reached one of its calls, and if a backward ran while one of its calls waited."""
        self.most_under_way = 0
        """The most calls in flight at a time in warm-up."""
        self.uses = UsesWatch(manager.target.shared.grads.other_uses)
        self.knows_several = False
        """True if a backward of the warm-up reached several calls of the module."""
        self.again: str | None = None
        """The reason why calls must warm up again."""
        self.is_forgotten = False
        """True if the module was rebuilt since, so that no call is of this kind."""
        self._copied: set[int] = set()
        """Results that callers held, so that they get copies."""
        self._copies_grads = False
        self._handed_out: dict[int, dict[int, weakref.ref[torch.UntypedStorage]]] = {}
        """The results of the last eager call in each slot."""
        self._last_call: LastModuleCall | None = None

    @property
    def finding(self) -> CaptureError | None:
        """An effect of its eager calls that no replay can repeat."""
        return self.kind.seen or self.kind.proof.varying_error or self.uses.casts.found()

    @property
    def is_open(self) -> bool:
        """True if graphs could be captured now."""
        return not self.runners and self.kind.obstacle is None and self.finding is None

    def last_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], structure: Structure, around: tuple[Hashable, ...]
    ) -> LastModuleCall | None:
        """Return the look of a call of this site, or None if it has no runners or cannot be compared fast."""
        if self._last_call is None and self.runners:
            fast_match = FastMatch.of(args, kwargs, self.manager.on, tell_computed=False)
            if fast_match is not None:
                self._last_call = LastModuleCall(fast_match, structure, around, self)
        return self._last_call

    def add(self, runner: Runner) -> None:
        """Add a runner."""
        runner.result.copy(self._copied)
        runner.backwards.are_copied = self._copies_grads
        runner.backwards.delayed = self.manager.delayed if self.manager.leaves_weights else None
        if not self.knows_several:
            runner.on_shared_backward = self.on_shared_backward
        self.runners.append(runner)

    def on_shared_backward(self) -> None:
        """Warm up again to see if calls share casts: one backward reaches several calls, which warm-up has not seen."""
        if self.again is None and not self.knows_several:
            self.again = "several calls in one backward, under autocast with its cache   [autocast-cache]"
            self.knows_several = True
            warn_user(f"{self.manager.name}: {self.again}\n{shared_cast('it possibly')}\nIts calls warm up again.")

    def copy_held(self, held: Collection[Tenant]) -> None:
        """From now on return copies of what callers hold of these runners."""
        holding = [runner for runner in self.runners if runner in held]
        self._copied.update(index for runner in holding for index in runner.result.held())
        self._copies_grads |= any(runner.has_held_grads() for runner in holding)
        for runner in self.runners:
            runner.result.copy(self._copied)
            runner.backwards.are_copied |= self._copies_grads

    def note_kept(self, slot: int) -> None:
        """Before an eager call, note the results of the last one in its slot that are still held; they are copied."""
        before = self._handed_out.pop(slot, {})
        if self.manager.options.outputs == "copy":
            self._copied |= {index for index, storage in before.items() if storage() is not None}

    def note_handed_out(self, result: StaticOutputs, slot: int) -> None:
        """Note the results of an eager call."""
        found = {index: storage_of(tensor) for index, tensor in enumerate(result.tensors)}
        self._handed_out[slot] = {i: weakref.ref(storage) for i, storage in found.items() if storage is not None}


def _leaves_weights(module: torch.nn.Module) -> bool:
    return any(vars(inner).get("delay_wgrad_compute") is True for inner in module.modules())
