"""A runner owns one forward graph of a module and its backward graphs, with static memory of their own.

Between a forward and its backward the runner's activations must stay, so a runner serves one call at a time: it is
FWD_READY, then BWD_READY until the backward has run or the caller has dropped the results. A call that finds no runner
ready takes another one. Everything that outlives a graph (arguments, results, activations, gradients at the edge) keeps
its memory for as long as the runner lives. What lives inside one graph is shared with others of its lane; whether a
runner can take a call without overwriting what others have left is asked of the lane, and of the boundary.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from stepgraph.backends import Graph
from stepgraph.buffers.borrowed import BorrowedTensor, any_held, lend_by_address, lend_out
from stepgraph.buffers.inputs import ArgMetadata, StaticInputs
from stepgraph.buffers.outputs import StaticOutputs
from stepgraph.grads.param_grads import GradPart
from stepgraph.guards.random_names import NamesGuard
from stepgraph.oplog import Log, OpLog
from stepgraph.pair.lanes import CaptureSpan, PoolLane
from stepgraph.rng.tracker import CudaRNGStatesTracker, Segment
from stepgraph.signature.fast_match import geometry_check

Grads: TypeAlias = Sequence[torch.Tensor | None]


class RunnerState(enum.IntEnum):
    """Which pass a runner is ready for."""

    FWD_READY = 0
    BWD_READY = 1
    RETIRED = 2
    """As BWD_READY, and its graphs are freed when the call is over."""
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

    def will_run(self) -> bool:
        """Whether the backward under way will yet come to this call."""


class InFlightSet:
    """Calls under way that may add to the same gradients. How many they are is `len()`."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: dict[int, weakref.ref[Awaited]] = {}

    def add(self, use: Awaited) -> None:
        """A call has begun."""
        self._uses[id(use)] = weakref.ref(use)

    def discard(self, use: Awaited) -> None:
        """A call is over."""
        self._uses.pop(id(use), None)

    def __len__(self) -> int:
        return len(self._uses)

    def has_more_to_come(self, use: Awaited | None = None) -> bool:
        """Whether the backward under way will come to another call than this one, or to any."""
        others = [found for known in list(self._uses.values()) if (found := known()) is not None and found is not use]
        return any(other.will_run() for other in others)


class ReplayOrder(Protocol):
    """How a runner's backward takes its turn, where the order of replays is fixed."""

    def fit_grads(self, grads: Grads) -> Grads:
        """Bring gradients to the geometry of the backward there is."""

    def take_turn(self, grads: Grads) -> None:
        """Raise unless the backward, for these gradients, is what comes next."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One recorded graph, and the notes of its operations."""

    graph: Graph
    launch: Callable[[], None]
    notes: OpLog
    segment: Segment
    """The random states that it has read, or gone back to."""
    made: Any
    """What the recorded code has returned."""


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
    """How autograd's graph goes through a runner."""

    flows: tuple[int, ...]
    """The arguments that gradients flow back to, by leaf index."""
    outside: tuple[torch.Tensor, ...]
    """Parameters whose gradients autograd accumulates."""
    saved_inputs: tuple[int, ...]
    """Those of `flows` whose memory the backward reads."""
    saved_results: tuple[int, ...]
    anchor: torch.Tensor
    anchor_node: Any
    """None where no backward comes."""
    uses_up_saved: bool
    """Whether its backward can run but once for each forward."""
    keeps_casts: bool
    """Whether eager code would share the casts of its weights with other calls in autocast's region."""


class BackwardGraph:
    """One recorded backward: for one set of results that gradients arrive at."""

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
        """Whether it recomputes a part of the forward with the forward's random numbers."""
        self.geometry: Callable[..., bool] | None = None
        self.fork: str | None = None
        self.weights: BackwardGraph | None = None
        """The W part, where this is the I part of a split backward (`pair.ordered`)."""

    def is_ready_for(self, grads: Grads, fork: str | None) -> bool:
        """Whether it can be replayed for these gradients, which look like those of last time; False is inconclusive."""
        if self.geometry is None or self.fork != fork or not self.geometry(*grads) or self.grads_in.has_conditions:
            return False
        return not any_held(self._all_lent) and self.accumulated.attach()

    def is_held(self) -> bool:
        """Whether somebody keeps a gradient that it has handed out."""
        return any_held(self._all_lent)

    def give_up(self) -> None:
        """Let graphs that are captured later have the gradients' memory: copies are handed out from now on."""
        lent = iter(lend_by_address([grad for grad in self.grads_out if grad is not None]))
        self.lent = tuple([None if grad is None else next(lent) for grad in self.grads_out])
        self._all_lent, self.grads_out = [], (None,) * len(self.grads_out)

    def hand_out(self, edges: Sequence[torch.Tensor | bool], *, lends: bool) -> list[torch.Tensor | None]:
        """The gradients; with `lends` as they lie where `edges` says that they are used up at once, else copies.

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


class Backwards(dict[tuple[Any, ...], BackwardGraph]):
    """The recorded backwards of a runner, by the look of the gradients and of what is around.

    `record` records one that is not known yet; it is None where no other can be recorded.
    """

    def __init__(
        self,
        record: Callable[[Runner, Sequence[ArgMetadata | None]], BackwardGraph],
        random: CudaRNGStatesTracker,
        release: Callable[[Graph], None],
    ) -> None:
        super().__init__()
        self.record: Callable[[Runner, Sequence[ArgMetadata | None]], BackwardGraph] | None = record
        self.random, self.release = random, release
        self.usual: BackwardGraph | None = None
        """The one that was replayed last, if a fast check recognises it."""
        self.are_copied = False
        """Whether all gradients are handed out as copies, since somebody was found to keep one."""
        self.lent: list[BorrowedTensor] = []
        """Gradients of all backwards, also of those that are gone."""

    def make_usual(self, backward: BackwardGraph, grads: Grads, around: tuple[Hashable, ...]) -> None:
        """The next backward, if it looks like this one, is found without a look-up."""
        tensors = [grad for grad in grads if grad is not None]
        if len(tensors) == len(grads) and around[:2] == (False, False):  # a look tells autocast, not its dtype
            if backward.geometry is None:
                backward.geometry = geometry_check(tensors)
            self.usual, backward.fork = backward, self.random.active


class Runner:
    """One forward and its backwards."""

    def __init__(
        self,
        forward: ForwardGraph,
        edges: AutogradEdges,
        lane: PoolLane[Runner],
        in_flight: InFlightSet,
        backwards: Backwards,
    ) -> None:
        self.forward, self.edges, self.lane, self.backwards = forward, edges, lane, backwards
        self.boundary, self.result = forward.boundary, forward.result
        self.boundary.note_loaded = forward.recording.graph.note_loaded
        self.span = CaptureSpan(lane.next_number())
        self.in_flight = in_flight
        """Calls under way, of all runners that add to the same gradients."""
        self.order: ReplayOrder | None = None
        self.state = RunnerState.FWD_READY
        self.forwards = self.backward_runs = 0
        self.tell_several: Callable[[], None] | None = None
        """Called where one backward comes to it and to another call of its module, and eager may share casts."""
        self._notes_origin = forward.recording.graph.random.reads or bool(forward.recording.segment.states)
        self.held_up: set[int] = set()
        """Runners, by id, that were found not to be able to run because results of this one are held."""
        lane.add(self)

    def can_take(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these arguments would overwrite nothing that is still needed."""
        if self.state is not RunnerState.FWD_READY or (self.lane.is_busy and not self.lane.admits(self)):
            return False
        return not self.boundary.has_conditions or self.boundary.is_free_for(leaves)

    def has_held_grads(self) -> bool:
        """Whether a caller holds a gradient that was handed out as it lies."""
        return any_held(self.backwards.lent)

    def is_live(self) -> bool:
        """Whether the results of the last call may still be read."""
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
        """Give the activations' memory to graphs that are captured later. There will be no other backward."""
        self.result.forget_history()
        self.backwards.record = None

    def give_up_memory(self) -> None:
        """The same for the memory of results and gradients, of which copies are handed out from now on."""
        self.forget_activations()
        self.result.give_up()
        for backward in self.backwards.values():
            backward.give_up()
        self.backwards.lent = []

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Replay the forward; where the random generators were before, if anybody will ask."""
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

    # -- its states

    @property
    def is_freed(self) -> bool:
        """Whether its graphs are gone."""
        return self.state is RunnerState.FREED

    def begin(self) -> None:
        """A backward will come to a call: what it needs must stay."""
        self.state = _TRANSITIONS[self.state].begun
        self.lane.begin(self)
        if self.boundary.has_shared:
            self.boundary.hold()

    def release(self) -> None:
        """The call is over: ready for the next one."""
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
        """Free the graphs, now or when the call under way is over."""
        after = _TRANSITIONS[self.state].retired
        if after is RunnerState.FREED:
            self.free()
        self.state = after

    def free(self) -> None:
        """Free the graphs, even if a call is under way."""
        if self.state is RunnerState.FREED:
            return
        self.state = RunnerState.FREED
        for graph in (self.forward.recording.graph, *(backward.graph for backward in self.backwards.values())):
            self.backwards.release(graph)
        self.backwards.clear()
        self.backwards.usual = None
        self.result.let_go()
        self.lane.forget(self)
