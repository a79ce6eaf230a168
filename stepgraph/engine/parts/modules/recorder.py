"""The recorder notes the order in which the modules of a session run, while they still run eagerly.

Training repeats rounds. A round begins when a module that began the last one is called again and no backward is
outstanding. One round is one warm-up step; an evaluation is a separate round, or a part of one. The recorder notes each
forward and backward of the last round in order, results of one call that are arguments of another, tensors that several
calls share, and results that got gradients. With these notes the graphs are captured in the order of their replays, and
tensors need not be copied from one graph to the next.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.tree import Structure
from stepgraph.engine.call.proof import varying_operations
from stepgraph.engine.oplog import Log, first_difference
from stepgraph.engine.order import Kind
from stepgraph.engine.parts.modules.site import ManagedModule, ModuleCall, ModuleSite
from stepgraph.engine.record.pair.cached_casts import keeps_casts
from stepgraph.engine.record.pair.call import NotedArguments
from stepgraph.engine.record.pair.eager import note_call, run_call
from stepgraph.engine.record.pair.shared import PairSession
from stepgraph.engine.record.pair.waiting import WaitingCall


@dataclass(frozen=True, slots=True)
class Event:
    """A forward or a backward of a recorded call, or the weight gradients that its backward has left."""

    call: ModuleCall
    kind: Kind


class Recorder:
    """Notes the order of the calls of one session's modules."""

    def __init__(self, session: PairSession, start_over: Callable[[ManagedModule, str], None]) -> None:
        """`start_over` frees all graphs, with a module and a reason."""
        self._session, self._start_over = session, start_over
        self.events: list[Event] = []
        """The events of the present round."""
        self.round: list[Event] = []
        """The events of the last whole round."""
        self._before: list[Event] = []
        self.rounds: Counter[int] = Counter()
        """The number of rounds with each kind of call, by the id of its site."""
        self.credit: dict[int, int] = {}
        """Rounds before a change that count as warm-up for the next capture, by the id of the site."""
        self._outstanding: weakref.WeakKeyDictionary[WaitingCall, ModuleCall] = weakref.WeakKeyDictionary()
        self._num_backwards = 0
        self._in_task: dict[int, ModuleSite] = {}
        """The sites that the last backward reached, by the id of their module."""
        self._task = -1
        self._openers: set[ModuleSite] = set()
        self._left: list[ModuleCall] = []
        """Calls of the present round whose weight gradients were left, by the order of their backwards."""
        self._notes = _RoundNotes()

    @property
    def is_settled(self) -> bool:
        """True if no recorded call waits for its backward."""
        return not self._outstanding

    @property
    def repeats(self) -> bool:
        """True if the last whole round had the order of the round before it, if there was one; without evaluations."""
        return not self._before or _sequence(self._before) == _sequence(self.round)

    def comes_round(self, site: ModuleSite) -> bool:
        """Before a call, return True if it begins a new round; the last round is then complete."""
        if self._is_in_a_round(site):
            return False
        if site not in self._openers:
            self._openers.add(site)
            return False
        self._before, self.round, self.events, self._left = self.round, self.events, [], []
        self._notes = _RoundNotes()
        for kind in {id(event.call.site) for event in self.round}:
            self.rounds[kind] += 1
        self._openers = {site}
        return bool(self.round)

    def _is_in_a_round(self, site: ModuleSite) -> bool:
        """True if a backward is running or still expected.

        An evaluation with gradients on has calls without a backward. If a kind of call never had one, and a backward
        has run without it, it is not waited for.
        """
        if torch._C._current_graph_task_id() != -1:
            return True
        for call in list(self._outstanding.values()):
            call.site.is_passed_by |= call.born_at < self._num_backwards
            if call.site is site or call.site.had_backward or not call.site.is_passed_by:
                return True
        return False

    def forget(self) -> None:
        """Start over: the next call begins a round."""
        self.events, self.round, self._before, self._openers, self._left = [], [], [], set(), []
        self._outstanding.clear()
        self._session.waiting.clear()
        self._notes = _RoundNotes()
        self.rounds.clear()

    def run(self, site: ModuleSite, leaves: Sequence[Any], structure: Structure, run: Callable[[], Any]) -> Any:
        """Call the module eagerly and note its arguments and results."""
        manager, waiting = site.manager, list(self._outstanding.values())
        taken = {w.slot for w in waiting if w.site.manager is manager} | self._session.lanes.busy()
        slot = next(number for number in itertools.count() if number not in taken)
        site.most_under_way = max(site.most_under_way, 1 + sum(w.site is site for w in waiting))
        arguments = NotedArguments.of(leaves)
        eager = note_call(manager.target, site.kind, arguments, structure)
        call = ModuleCall(eager, site, slot, self._num_backwards)
        self._notes.trace(call, arguments.tensors)
        self.events.append(Event(call, Kind.FORWARD))
        site.note_kept(slot)
        made = run_call(manager.target, site.kind, eager, leaves, arguments.tensors, run)
        self._notes.compare(call)
        if self._session.note_returned(made.returned):
            self._start_over(manager, "a parameter whose gradient a graph accumulates is returned as a result")
        results = made.outputs.tensors
        site.note_handed_out(made.outputs, slot)
        if keeps_casts(eager.ambient):
            site.uses.casts.follow(results, arguments.tensors.values())
        if site.kind.obstacle is None and not eager.in_ddp:
            site.uses.follow(results, arguments.tensors)
        self._notes.add(call, results)
        if eager.is_differentiable:
            self._outstanding[self._session.waiting.add(eager, results, self._saw_backward)] = call
        return made.value

    def _saw_backward(self, waiting: WaitingCall) -> None:
        """Note the first gradient that reaches a call."""
        call = self._outstanding.pop(waiting)
        site, task = call.site, torch._C._current_graph_task_id()
        site.had_backward = True
        self._num_backwards += 1
        if task != self._task:
            self._task, self._in_task = task, {}
        other = self._in_task.setdefault(id(site.manager.module), site)
        if other is not site or self._in_task.get(id(site)) is site:  # it came to another call of the module before
            site.knows_several = other.knows_several = True
        self._in_task[id(site)] = site
        if keeps_casts(call.eager.ambient):
            site.manager.look_for_replays()
        is_split = site.manager.leaves_weights
        self.events.append(Event(call, Kind.INPUT_GRAD if is_split else Kind.BACKWARD))
        self._left += [call] if is_split else []

    def left_by(self, manager: ManagedModule) -> ModuleCall | None:
        """The module's oldest call whose weight gradients were left."""
        return next((call for call in self._left if call.site.manager is manager), None)

    def note_weights(self, call: ModuleCall) -> None:
        """Note that the weight gradients of a call are computed now."""
        self._left.remove(call)
        self.events.append(Event(call, Kind.WEIGHT_GRAD))


class _RoundNotes:
    """The sources of the arguments of a round's calls, and the operations of each kind of call."""

    def __init__(self) -> None:
        self._producers: dict[int, tuple[weakref.ref[torch.Tensor], ModuleCall, int]] = {}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._numbers = itertools.count()
        self._first: dict[int, Log] = {}
        """The first log of each kind of call, by the id of its site."""

    def trace(self, call: ModuleCall, tensors: Mapping[int, torch.Tensor]) -> None:
        """Note the arguments that are results of other calls, and those that several calls are given."""
        for index, tensor in tensors.items():
            producer = self._producers.get(id(tensor))
            if producer is not None and producer[0]() is tensor:
                call.made_by[index] = (producer[1], producer[2])
                continue
            seen = self._seen.get(id(tensor))
            if seen is None or seen[0]() is not tensor:
                seen = self._seen[id(tensor)] = (weakref.ref(tensor), next(self._numbers))
            call.shared[index] = seen[1]

    def add(self, call: ModuleCall, results: Sequence[torch.Tensor]) -> None:
        """Note the results of a call."""
        self._producers |= {id(tensor): (weakref.ref(tensor), call, index) for index, tensor in enumerate(results)}

    def compare(self, call: ModuleCall) -> None:
        """Compare the operations of a call with those of other calls of its kind."""
        site, log = call.site, call.eager.log
        assert log is not None
        first = self._first.setdefault(id(site), log)
        between = first_difference(first, log)
        if first is log or between is not None:
            varying_error = None if between is None else varying_operations(site.manager.name, between, "module")
            site.kind.proof.varying_error = varying_error


def _sequence(events: Sequence[Event]) -> list[tuple[ModuleSite, int, Kind]]:
    """The order of events: which kind of call, which one of the round, forward or backward."""
    calls: dict[int, int] = {}
    training = [event for event in events if event.call.eager.is_differentiable]
    return [(e.call.site, calls.setdefault(id(e.call), len(calls)), e.kind) for e in training]
