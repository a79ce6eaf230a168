"""The recorder notes the order in which the modules of a session run, while they still run eagerly.

Training goes round: a module that was called while no backward was outstanding is called so again. One round is one
warm-up step; an evaluation is a round of its own, or a part of one. The recorder notes each forward and each backward
of the last round in order, which result of one call is an argument of another, which tensor several calls share, and
which results gradients came back to. From that the graphs are captured in the order they will be replayed in, and
tensors need not be copied from one graph to the next.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.backends import Backend
from stepgraph.buffers.inputs import ArgMetadata, copied
from stepgraph.buffers.outputs import StaticOutputs, leaf_results
from stepgraph.modules.site import ModuleCall, ModuleSite
from stepgraph.observe.ddp import in_ddp
from stepgraph.oplog import Log, first_difference
from stepgraph.pair.cached_casts import keeps_casts
from stepgraph.pair.call import NotedArguments
from stepgraph.pair.proof import PairLogs, note_forward, noting
from stepgraph.session.proof import varying_operations
from stepgraph.signature import ambient_key
from stepgraph.tree import Structure


@dataclass(frozen=True, slots=True)
class Event:
    """A forward or a backward of a recorded call."""

    call: ModuleCall
    backward: bool


class _Outstanding:
    """A call whose backward has not run; gone with the autograd graph that holds it, if it never does."""

    __slots__ = ("__weakref__", "call", "recorder")

    def __init__(self, call: ModuleCall, recorder: Recorder) -> None:
        self.call, self.recorder = call, recorder


class _EagerCalls:
    """Runs eager calls and notes their operations."""

    def __init__(self, backend: Callable[[], Backend], logs: PairLogs) -> None:
        self._backend, self._logs = backend, logs
        self._first: dict[int, Log] = {}
        """The first log of each kind of call in the round under way, by the id of its site."""

    @property
    def needs_values(self) -> bool:
        """Whether arguments are kept for the recording."""
        return self._backend().runs_while_recording

    def begin_round(self) -> None:
        """Another round begins."""
        self._first.clear()

    def run(self, call: ModuleCall, leaves: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Run a call and note its operations: are they those of other calls of its kind in this round?"""
        site = call.site
        log = self._logs.of_call(site.manager.module, leaves, call.ambient, self._backend().device)
        with noting(log):
            result = run()
            note_forward(log, result, leaves)
        call.log = log.finish()
        site.proof.add(call.log)
        first = self._first.setdefault(id(site), call.log)
        between = first_difference(first, call.log)
        if first is call.log or between is not None:
            wavers = None if between is None else varying_operations(site.manager.name, between, "module")
            site.proof.wavers = wavers
        return result


class Recorder:
    """The order of one session's modules."""

    def __init__(self, busy: Callable[[], set[int]], backend: Callable[[], Backend], logs: PairLogs) -> None:
        self._busy, self._eager = busy, _EagerCalls(backend, logs)
        self.events: list[Event] = []
        """What happened in the round under way."""
        self.round: list[Event] = []
        """What happened in the last whole round."""
        self._before: list[Event] = []
        self.rounds: Counter[int] = Counter()
        """In how many rounds each kind of call occurred, by the id of its site."""
        self.credit: dict[int, int] = {}
        """Rounds of before a change that count as warm-up of the next capture, by the id of the site."""
        self._outstanding: weakref.WeakSet[_Outstanding] = weakref.WeakSet()
        self._num_backwards = 0
        self._task = -1
        self._in_task: dict[int, ModuleSite] = {}
        """The modules that the last backward came to, by id, and for which kind of call."""
        self._openers: set[ModuleSite] = set()
        self._producers: dict[int, tuple[weakref.ref[torch.Tensor], ModuleCall, int]] = {}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._numbers = itertools.count()

    @property
    def is_settled(self) -> bool:
        """Whether no recorded call waits for its backward."""
        return not self._outstanding

    @property
    def is_waiting(self) -> bool:
        """Whether a recorded call waits for its backward, or the calling thread runs one that came to such a call."""
        return not self.is_settled or (self._task != -1 and self._task == torch._C._current_graph_task_id())

    @property
    def repeats(self) -> bool:
        """Whether the last whole round went as the one before it, as far as there was one; evaluations aside."""
        return not self._before or _sequence(self._before) == _sequence(self.round)

    def comes_round(self, site: ModuleSite) -> bool:
        """Before a call: whether it is the first of a new round; the last one is then complete."""
        if self._is_in_a_round(site):
            return False
        if site not in self._openers:
            self._openers.add(site)
            return False
        self._before, self.round, self.events = self.round, self.events, []
        self._producers.clear()
        self._seen.clear()
        self._eager.begin_round()
        for kind in {id(event.call.site) for event in self.round}:
            self.rounds[kind] += 1
        self._openers = {site}
        return bool(self.round)

    def _is_in_a_round(self, site: ModuleSite) -> bool:
        """Whether a backward is under way, or still to come.

        An evaluation with gradients on has calls that no backward comes to. A kind of call that never had one, and that
        a backward has passed by, is not waited for.
        """
        if torch._C._current_graph_task_id() != -1:
            return True
        for call in [waiting.call for waiting in self._outstanding]:
            call.site.is_passed_by |= call.born_at < self._num_backwards
            if call.site is site or call.site.had_backward or not call.site.is_passed_by:
                return True
        return False

    def forget(self) -> None:
        """Start over: the next call begins a round."""
        self.events, self.round, self._before, self._openers = [], [], [], set()
        self._outstanding.clear()
        self._producers.clear()
        self._seen.clear()
        self._eager.begin_round()
        self.rounds.clear()

    def run(self, site: ModuleSite, leaves: Sequence[Any], structure: Structure, run: Callable[[], Any]) -> Any:
        """Call the module eagerly and note what goes in and what comes out."""
        taken = {w.call.slot for w in self._outstanding if w.call.site.manager is site.manager} | self._busy()
        slot = next(number for number in itertools.count() if number not in taken)
        site.most_under_way = max(site.most_under_way, 1 + sum(w.call.site is site for w in self._outstanding))
        noted = NotedArguments.of(leaves)
        call = ModuleCall(
            site.call,
            structure,
            leaves=noted.leaves,
            ambient=ambient_key(),
            training=site.call.training,
            in_ddp=in_ddp(),
            fork=site.manager.fork,
            aliased=noted.aliased,
            site=site,
            slot=slot,
            born_at=self._num_backwards,
        )
        for index, tensor in noted.tensors.items():
            self._trace(call, index, tensor)
            if self._eager.needs_values:
                call.values[index] = copied(tensor)
        self.events.append(Event(call, backward=False))
        site.note_kept(slot)
        result = self._eager.run(call, leaves, run)
        given = set(map(id, noted.tensors.values()))
        returned = {i: t for i, t in leaf_results(result).items() if i not in given}
        if returned:
            site.manager.note_returned(list(returned.values()))
        made = StaticOutputs(result, noted.tensors, {**site.manager.state_by_id(), **returned})
        call.num_results = len(made.tensors)
        site.results.note(made, slot)
        call.is_differentiable = any(made.differentiable)
        if keeps_casts(call.ambient):
            site.casts.follow(made.tensors, noted.tensors.values())
        waiting = _Outstanding(call, self) if call.is_differentiable else None
        if waiting is not None:
            self._outstanding.add(waiting)
        for index, tensor in enumerate(made.tensors):
            self._producers[id(tensor)] = (weakref.ref(tensor), call, index)
            if waiting is not None and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(functools.partial(_saw_grad, waiting, index))
        return result

    def _trace(self, call: ModuleCall, index: int, tensor: torch.Tensor) -> None:
        producer = self._producers.get(id(tensor))
        if producer is not None and producer[0]() is tensor:
            call.made_by[index] = (producer[1], producer[2])
            return
        seen = self._seen.get(id(tensor))
        if seen is None or seen[0]() is not tensor:
            seen = self._seen[id(tensor)] = (weakref.ref(tensor), next(self._numbers))
        call.shared[index] = seen[1]

    def _note_task(self, site: ModuleSite, task: int) -> None:
        """A backward has come to a call: whether it came to another one of the same module before."""
        if task != self._task:
            self._task, self._in_task = task, {}
        other = self._in_task.setdefault(id(site.manager.module), site)
        if other is not site or self._in_task.get(id(site)) is site:
            site.knows_several = other.knows_several = True
        self._in_task[id(site)] = site

    def saw_backward(self, waiting: _Outstanding, index: int, grad: torch.Tensor) -> None:
        """A gradient has come back to a result."""
        call = waiting.call
        if waiting in self._outstanding:
            self._outstanding.discard(waiting)
            call.site.had_backward = True
            self._num_backwards += 1
            self._note_task(call.site, torch._C._current_graph_task_id())
            if keeps_casts(call.ambient):
                call.site.manager.look_for_replays()
            call.backward_ambient = ambient_key()
            self.events.append(Event(call, backward=True))
        call.grads[index] = ArgMetadata.of(grad)


def _sequence(events: Sequence[Event]) -> list[tuple[ModuleSite, int, bool]]:
    """The order of events: which kind of call, which one of the round, forward or backward."""
    calls: dict[int, int] = {}
    training = [event for event in events if event.call.is_differentiable]
    return [(e.call.site, calls.setdefault(id(e.call), len(calls)), e.backward) for e in training]


def _saw_grad(waiting: _Outstanding, index: int, grad: torch.Tensor) -> None:
    waiting.recorder.saw_backward(waiting, index, grad)
