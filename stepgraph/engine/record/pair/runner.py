"""A runner owns one forward graph of a module and its backward graphs, with their static memory.

The runner's activations are needed from a forward to its backward, so a runner serves one call at a time. It is
FWD_READY, then BWD_READY until the backward has run or the caller has dropped the results. A call that finds no ready
runner takes another one. Tensors that outlive a graph (arguments, results, activations, gradients at the edge) keep
their memory as long as the runner lives. Memory inside one graph is shared with other graphs of its lane. The lane and
the boundary decide whether a runner can take a call without overwriting tensors of others.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from stepgraph.engine.backends import Graph
from stepgraph.engine.backends.random.tracker import CudaRNGStatesTracker, Segment
from stepgraph.engine.call.session import Session
from stepgraph.engine.grads.other_uses import OtherUses
from stepgraph.engine.grads.param_grads import GradPart
from stepgraph.engine.guards.random_names import NamesGuard
from stepgraph.engine.guards.signature.fast_match import geometry_check
from stepgraph.engine.memory.borrowed import BorrowedTensor, any_held, lend_by_address, lend_out
from stepgraph.engine.memory.inputs import ArgMetadata, StaticInputs
from stepgraph.engine.memory.outputs import StaticOutputs
from stepgraph.engine.oplog import Log, OpLog
from stepgraph.engine.record.pair.lanes import CaptureSpan, PoolLane

Grads: TypeAlias = Sequence[torch.Tensor | None]
_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})


class RunnerState(enum.IntEnum):
    """The pass that a runner is ready for."""

    FWD_READY = 0
    BWD_READY = 1
    RETIRED = 2
    """Like BWD_READY, but its graphs are freed when the call is over."""
    FREED = 3


class _Next(NamedTuple):
    """The state after a call has begun, after it is over, and after the runner was retired."""

    begun: RunnerState
    ended: RunnerState
    retired: RunnerState


_TRANSITIONS: Mapping[RunnerState, _Next] = {
    RunnerState.FWD_READY: _Next(RunnerState.BWD_READY, RunnerState.FWD_READY, RunnerState.FREED),
    RunnerState.BWD_READY: _Next(RunnerState.BWD_READY, RunnerState.FWD_READY, RunnerState.RETIRED),
    RunnerState.RETIRED: _Next(RunnerState.RETIRED, RunnerState.FREED, RunnerState.RETIRED),
    RunnerState.FREED: _Next(RunnerState.FREED, RunnerState.FREED, RunnerState.FREED),
}


class Awaited(Protocol):
    """A call whose backward may still come."""

    runner: Runner
    node: weakref.ref[Any] | None
    """Its node in autograd's graph."""

    def will_run(self) -> bool:
        """True if the running backward will still reach this call."""


class InFlightSet:
    """Calls in flight that may add to the same gradients; `len()` counts them."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: dict[int, weakref.ref[Awaited]] = {}

    def add(self, use: Awaited) -> None:
        """Add a call that has begun."""
        self._uses[id(use)] = weakref.ref(use)

    def discard(self, use: Awaited) -> None:
        """Remove a call that is over."""
        self._uses.pop(id(use), None)

    def __len__(self) -> int:
        return len(self._uses)

    def __iter__(self) -> Iterator[Awaited]:
        return iter([found for known in list(self._uses.values()) if (found := known()) is not None])

    def has_more_to_come(self, use: Awaited | None = None) -> bool:
        """True if the running backward will reach a call other than `use`."""
        return any(other.will_run() for other in self if other is not use)


class DelayedWeights(Protocol):
    """A call whose backward was replayed, and whose weight gradients wait."""

    runner: Runner

    def weight_gradients(self) -> None:
        """Replay the weight gradients, and end the call."""


class ReplayOrder(Protocol):
    """The turns of a runner's backward in a fixed order of replays."""

    def fit_grads(self, grads: Grads) -> Grads:
        """Bring gradients to the geometry of the recorded backward."""

    def take_turn(self, grads: Grads) -> None:
        """Raise unless the backward for these gradients comes next."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One recorded graph, and the notes of its operations."""

    graph: Graph
    launch: Callable[[], None]
    notes: OpLog
    segment: Segment
    """The random states that it has read or returned to."""
    made: Any
    """The value that the recorded code returned."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardGraph:
    """A recorded forward."""

    recording: Recording
    boundary: StaticInputs
    result: StaticOutputs
    mutated: tuple[int, ...]
    """The arguments that it writes to, by leaf index."""
    training: tuple[bool, ...]
    """The modules' modes."""
    names: tuple[NamesGuard, ...]
    """The names of random states that it knew."""

    @property
    def log(self) -> Log:
        """Its operations."""
        return self.recording.notes.finish()


@dataclass(frozen=True, slots=True, eq=False)
class AutogradEdges:
    """The connections of a runner in autograd's graph."""

    flows: tuple[int, ...]
    """The arguments that gradients flow back to, by leaf index; once for each use if autograd adds up the uses."""
    outside: tuple[torch.Tensor, ...]
    """Parameters whose gradients autograd accumulates, once for each use if autograd must add up the uses."""
    bound: tuple[torch.Tensor, ...]
    """Those of them, each once, whose gradients cannot be accumulated inside the graphs."""
    apart: tuple[torch.Tensor, ...]
    """Those of `outside`, each once, whose uses autograd adds up one by one."""
    inside: Mapping[str, torch.Tensor]
    """Parameters whose gradients the graphs accumulate, unless other code uses them too."""
    saved_inputs: tuple[int, ...]
    """Those of `flows` whose memory the backward reads."""
    saved_results: tuple[int, ...]
    anchor: torch.Tensor
    anchor_node: Any
    """None if there is no backward."""
    uses_up_saved: bool
    """True if its backward can run only once for each forward."""
    summed: frozenset[int]
    """Parameters inside, by id, several of whose uses the graphs add up."""
    adds_at_once: bool
    """True if reentrant checkpointing in the backward adds each share to the gradient, and not their sum."""
    keeps_casts: bool
    """True if eager code would share the casts of its weights with other calls in the autocast region."""
    arrival: tuple[int, ...] = ()
    """Indices of `outside`, in the order in which eager's backward has their gradients."""

    def one_by_one(self) -> list[torch.Tensor]:
        """`outside`, so that autograd accumulates in eager's order: each passes a node, and later nodes run first."""
        found = list(self.outside)
        for index in reversed(self.arrival):
            found[index] = torch.ops.aten.alias.default(found[index])
        return found


class BackwardGraph:
    """One recorded backward, for one set of results with gradients."""

    def __init__(
        self,
        recording: Recording,
        grads_in: StaticInputs,
        grads_out: Grads,
        accumulated: GradPart,
        captured_at: int,
        rewinds: bool,
        marks: Sequence[tuple[torch.Tensor, dict[str, Any]]] = (),
    ) -> None:
        self.graph, self.launch, self.log = recording.graph, recording.launch, recording.notes.finish()
        self.grads_in, self.accumulated = grads_in, accumulated
        grads_in.note_loaded = self.graph.note_loaded
        self.captured_at = captured_at
        """Its place in the order of the lane."""
        self.grads_out = tuple(grads_out)
        """The gradient of each input of the node, or None."""
        lent = iter(lend_out([grad for grad in grads_out if grad is not None]))
        self.lent = tuple([None if grad is None else next(lent) for grad in grads_out])
        self._all_lent = [lent for lent in self.lent if lent is not None]
        self.marks = tuple(marks)
        """Attributes that the backward sets on parameters."""
        self.rewinds = rewinds
        """True if it recomputes a part of the forward with the forward's random numbers."""
        self.geometry: Callable[..., bool] | None = None
        self.fork: str | None = None
        self.weights: WeightGraph | None = None
        """The W part, if this is the I part of a split backward (`pair.ordered`)."""

    def is_ready_for(self, grads: Grads, fork: str | None) -> bool:
        """One fast check that it can be replayed for these gradients, as for the last ones; False is inconclusive."""
        if self.geometry is None or self.fork != fork or not self.geometry(*grads) or self.grads_in.has_conditions:
            return False
        return not any_held(self._all_lent) and self.accumulated.attach()

    def is_held(self) -> bool:
        """True if a caller holds a gradient that it returned."""
        return any_held(self._all_lent)

    def give_up(self) -> None:
        """Leave the gradients' memory to graphs that are captured later. Callers get copies from now on."""
        lent = iter(lend_by_address([grad for grad in self.grads_out if grad is not None]))
        self.lent = tuple([None if grad is None else next(lent) for grad in self.grads_out])
        self._all_lent, self.grads_out = [], (None,) * len(self.grads_out)

    def hand_out(self, edges: Sequence[torch.Tensor | bool], *, lends: bool) -> list[torch.Tensor | None]:
        """Return the gradients: copies, or with `lends` the static ones, if `edges` says that they are used at once.

        `edges` are those of the first inputs: whether a gradient goes straight back into another graph, or the leaf
        that it goes to. To a gradient that a leaf already has, autograd adds it; a leaf without one would keep it.
        """
        found: list[torch.Tensor | None] = []
        for index, lent in enumerate(self.lent):
            if lent is None:
                found.append(None)
                continue
            edge = edges[index] if index < len(edges) else False
            if lends and (edge if isinstance(edge, bool) else edge.grad is not None):
                found.append(lent.lend())
            else:
                found.append(lent.copy(goes_on=edge is True))
        return found


@dataclass(frozen=True, slots=True)
class WeightGraph:
    """A recorded W part."""

    recorded: BackwardGraph
    parameters: tuple[torch.Tensor, ...]
    """Parameters that get the gradients of the graph from autograd."""
    again: Callable[[], WeightGraph] | None = None
    """Records it for other memory of gradients, if that is possible."""

    def run(self, origin: Any = None) -> bool:
        """Replay it. Return False if the memory of a gradient has changed since the recording.

        `origin` is the random state before the forward, if the W part starts from it.
        """
        recorded = self.recorded
        if recorded.graph.follow is not None:
            recorded.graph.follow()
        if not recorded.accumulated.attach():
            return False
        if recorded.rewinds:
            recorded.graph.replay_from(origin)
        else:
            recorded.launch()
        recorded.accumulated.finish(last=True)
        if self.parameters:
            torch.autograd.backward(self.parameters, recorded.hand_out((), lends=False))
        return True


class Backwards(dict[tuple[Any, ...], BackwardGraph]):
    """The recorded backwards of a runner, by the geometry of the gradients, autocast and random state.

    `record` records a new one; it is None if no other can be recorded.
    """

    def __init__(
        self,
        record: Callable[[Runner, Sequence[ArgMetadata | None]], BackwardGraph],
        random: CudaRNGStatesTracker,
        session: Session,
        other_uses: OtherUses,
    ) -> None:
        super().__init__()
        self.calling, self.release = session.calling, session.release
        self.record: Callable[[Runner, Sequence[ArgMetadata | None]], BackwardGraph] | None = record
        self.random, self.other_uses = random, other_uses
        self._asked, self._passed = -1, _NONE
        self.usual: BackwardGraph | None = None
        """The one that was replayed last, if a fast check recognises it."""
        self.are_copied = False
        """True if callers get copies of all gradients, since one of them held a gradient."""
        self.lent: list[BorrowedTensor] = []
        """Gradients of all backwards, also of freed ones."""
        self.delayed: list[DelayedWeights] | None = None
        """Calls of the module whose weight gradients wait; None if an order says when those come, or none are split."""

    def passed(self, inside: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Those of the parameters inside whose gradients autograd adds up at present."""
        if self._asked != self.other_uses.version:
            self._asked, self._passed = self.other_uses.version, self.other_uses.through_autograd(inside)
        return self._passed

    def make_usual(self, backward: BackwardGraph, grads: Grads, around: tuple[Hashable, ...]) -> None:
        """Let the next backward, if it looks like this one, be found without a look-up."""
        tensors = [grad for grad in grads if grad is not None]
        # the fast check sees that autocast is on, not its dtype
        if len(tensors) == len(grads) and around[:2] == (False, False):
            if backward.geometry is None:
                backward.geometry = geometry_check(tensors, tensors[0].device.type)
            self.usual, backward.fork = backward, self.random.active


class Runner:
    """One forward and its backwards."""

    def __init__(
        self,
        forward: ForwardGraph,
        edges: AutogradEdges,
        lane: PoolLane,
        in_flight: InFlightSet,
        backwards: Backwards,
    ) -> None:
        self.forward, self.edges, self.lane, self.backwards = forward, edges, lane, backwards
        self.boundary, self.result = forward.boundary, forward.result
        self.boundary.note_loaded = forward.recording.graph.note_loaded
        self.span = CaptureSpan(lane.next_number())
        self.in_flight = in_flight
        """Calls in flight, of all runners that add to the same gradients."""
        self.order: ReplayOrder | None = None
        self.state = RunnerState.FWD_READY
        self.forwards = self.backward_runs = 0
        self.on_shared_backward: Callable[[], None] | None = None
        """Called when one backward reaches several calls of the module and autocast may share their casts."""
        self._notes_origin = forward.recording.graph.random.reads or bool(forward.recording.segment.states)
        self.held_up: set[int] = set()
        """Runners, by id, that could not run because results of this one were held."""
        lane.add(self)

    def can_take(self, leaves: Sequence[Any]) -> bool:
        """True if a call with these arguments would overwrite nothing that is still needed."""
        if self.state is not RunnerState.FWD_READY or (self.lane.is_busy and not self.lane.admits(self)):
            return False
        return not self.boundary.has_conditions or self.boundary.is_free_for(leaves)

    def has_held_grads(self) -> bool:
        """True if a caller holds a gradient that it got without a copy."""
        return any_held(self.backwards.lent)

    def is_live(self) -> bool:
        """True if the results of the last call may still be read."""
        return self.state in (RunnerState.BWD_READY, RunnerState.RETIRED) or self.result.is_held()

    def add_backward(self, key: tuple[Any, ...], backward: BackwardGraph) -> None:
        """Add a recorded backward, or replace one."""
        known = self.backwards
        if key in known:
            known.release(known[key].graph)
            known.usual = None
        known[key] = backward
        known.lent += [lent for lent in backward.lent if lent is not None]
        self.span.add_backward(backward.captured_at)

    def forget_activations(self) -> None:
        """Leave the activations' memory to graphs that are captured later. No other backward can be recorded then."""
        self.result.forget_history()
        self.backwards.record = None

    def give_up_memory(self) -> None:
        """The same for the memory of results and gradients. Callers get copies from now on."""
        self.forget_activations()
        self.result.give_up()
        for backward in self.backwards.values():
            backward.give_up()
        self.backwards.lent = []

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Replay the forward. Return the random state before it, if a backward may need it."""
        recording = self.forward.recording
        follow = recording.graph.follow
        if follow is not None:
            follow()
        self.boundary.load(leaves)
        origin = recording.graph.random_origin() if self._notes_origin else None
        recording.launch()
        self.forwards += 1
        for index in self.forward.mutated:
            with torch.no_grad():
                leaves[index].copy_(self.boundary.tensors[index])
        return origin

    @property
    def static_bytes(self) -> int:
        """Memory at the graphs' edges."""
        return self.boundary.num_bytes + sum(b.grads_in.num_bytes for b in self.backwards.values())

    def graphs(self) -> list[Graph]:
        """Its graphs: forward, backwards and split weight gradients."""
        backwards = list(self.backwards.values())
        weights = [backward.weights.recorded for backward in backwards if backward.weights is not None]
        return [self.forward.recording.graph, *(each.graph for each in (*backwards, *weights))]

    # -- its states

    @property
    def is_freed(self) -> bool:
        """True if its graphs were freed."""
        return self.state is RunnerState.FREED

    def begin(self) -> None:
        """Begin a call that has a backward: keep what that needs."""
        self.state = _TRANSITIONS[self.state].begun
        self.lane.begin(self)
        if self.boundary.has_shared:
            self.boundary.hold()

    def release(self) -> None:
        """End the call; the runner is ready for the next one."""
        if self.boundary.has_shared:
            self.boundary.release()
        after = _TRANSITIONS[self.state].ended
        if after is not RunnerState.FREED:
            self.state = after
            self.lane.end(self)
        else:
            self.free()
            self.lane.end(self)
            self.lane.forget(self)

    def retire(self) -> None:
        """Free the graphs, now or when the call in flight is over."""
        after = _TRANSITIONS[self.state].retired
        if after is RunnerState.FREED:
            self.free()
        self.state = after

    def free(self) -> None:
        """Free the graphs, even if a call is in flight."""
        if self.state is RunnerState.FREED:
            return
        self.state = RunnerState.FREED
        for graph in self.graphs():
            self.backwards.release(graph)
        self.backwards.clear()
        self.backwards.usual = None
        self.result.let_go()
        self.lane.forget(self)
