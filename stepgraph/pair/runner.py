"""A runner owns one forward graph of a module and its backward graphs, with static memory of their own.

Between a forward and its backward the runner's activations must stay, so a runner serves one call at a time: it is
FWD_READY, then BWD_READY until the backward has run or the caller has dropped the results. A call that finds no runner
ready takes another one. Everything that outlives a graph (arguments, results, activations, gradients at the edge) keeps
its memory for as long as the runner lives. What lives inside one graph is shared with others of its lane; whether a
runner can take a call without overwriting what others have left is asked of the lane, and of the boundary.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from stepgraph.backends import Graph
from stepgraph.buffers.borrowed import BorrowedTensor, any_held, lend_by_address, lend_out
from stepgraph.buffers.inputs import ArgMetadata, StaticInputs
from stepgraph.buffers.outputs import StaticOutputs
from stepgraph.grads.param_grads import GradPart
from stepgraph.guards.random_names import NamesGuard
from stepgraph.oplog import Log
from stepgraph.pair.lanes import PoolLane
from stepgraph.rng.tracker import CudaRNGStatesTracker, Segment
from stepgraph.signature.fast_match import geometry_check


class RunnerState(enum.Enum):
    """Which pass a runner is ready for."""

    FWD_READY = 0
    BWD_READY = 1


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


class BackwardGraph:
    """One recorded backward: for one set of results that gradients arrive at."""

    def __init__(
        self,
        graph: Graph,
        grads_in: StaticInputs,
        grads_out: Sequence[torch.Tensor | None],
        accumulated: GradPart,
        marks: Sequence[tuple[torch.Tensor, dict[str, Any]]],
        captured_at: int,
        rewinds: bool,
        log: Log,
    ) -> None:
        self.graph, self.grads_in, self.accumulated, self.log = graph, grads_in, accumulated, log
        self.launch = graph.launch
        grads_in.note_loaded = graph.note_loaded
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

    def is_ready_for(self, grads: Sequence[torch.Tensor | None], fork: str | None) -> bool:
        """Whether it can be replayed for these gradients, which look like those of last time; no says nothing."""
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


class Runner:
    """One forward/backward pair. `capture_backward` records a backward that is not known yet."""

    def __init__(
        self,
        graph: Graph,
        boundary: StaticInputs,
        result: StaticOutputs,
        mutated: Sequence[int],
        flows: Sequence[int],
        outside: Sequence[torch.Tensor],
        saved: frozenset[int],
        anchor: torch.Tensor,
        in_flight: InFlightSet,
        lane: PoolLane[Runner],
        captured_at: int,
        training: tuple[bool, ...],
        random: CudaRNGStatesTracker,
        segment: Segment,
        names: Sequence[NamesGuard],
        release_graph: Callable[[Graph], None],
    ) -> None:
        self.graph, self.boundary, self.result = graph, boundary, result
        self._launch, self.follow = graph.launch, graph.follow
        self.training = training
        """The modules' modes."""
        boundary.note_loaded = graph.note_loaded
        self.lane, self.forward_at = lane, captured_at
        self.backward_at: float = math.inf
        """When its first backward was captured."""
        self.last_at = captured_at
        """When its last graph was captured."""
        self.flows = tuple(flows)
        """The arguments that gradients flow back to, by leaf index."""
        self.outside = tuple(outside)
        """Parameters whose gradients autograd accumulates."""
        self.backwards: dict[Hashable, BackwardGraph] = {}
        self.usual: BackwardGraph | None = None
        """The one that was replayed last, where it can be told at a look."""
        self._lent_grads: list[BorrowedTensor] = []
        """Gradients of all backwards, of those that are gone, too."""
        self.capture_backward: Callable[[Runner, Sequence[ArgMetadata | None]], BackwardGraph] | None = None
        self.take_turn: Callable[[], object] | None = None
        """Where the order of replays is fixed: raises if the backward is not what comes next."""
        self.fit_grads: Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]] | None = None
        """Where the order of replays is fixed: brings gradients to the geometry of the backward there is."""
        self.receive_grads: Callable[[Sequence[torch.Tensor | None]], None] | None = None
        """Called with the gradients before they are brought to the backward."""
        self.state = RunnerState.FWD_READY
        self.forwards = self.backward_runs = 0
        self.anchor = anchor
        self.anchor_node: Any = torch.autograd.graph.get_gradient_edge(anchor).node if anchor.requires_grad else None
        self._mutated = tuple(mutated)
        self.saved_inputs = [i for i in flows if boundary.tensors[i].untyped_storage()._cdata in saved]
        self.saved_results = [
            i for i, t in enumerate(result.tensors) if t.untyped_storage()._cdata in saved and result.differentiable[i]
        ]
        self.in_flight = in_flight
        """Calls under way, of all runners that add to the same gradients."""
        self.retired = self.is_freed = False
        self.uses_up_saved = False
        """Whether its backward can run but once for each forward."""
        self.keeps_casts = False
        """Whether eager code would share the casts of its weights with other calls in autocast's region."""
        self.tell_several: Callable[[], None] | None = None
        """Called where one backward comes to it and to another call of its module, and eager may share casts."""
        self.copies_grads = False
        """Whether all gradients are handed out as copies, since somebody was found to keep one."""
        self.random = random
        self.segment, self.names = segment, tuple(names)
        """The random states that the forward has read, and the names that it knew."""
        self._notes_origin = graph.random.reads or bool(segment.states)
        self._release_graph = release_graph
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
        return any_held(self._lent_grads)

    def is_live(self) -> bool:
        """Whether the results of the last call may still be read."""
        return self.state is RunnerState.BWD_READY or self.result.is_held()

    def add_backward(self, key: Hashable, backward: BackwardGraph) -> None:
        """Know another backward, or one in the place of another."""
        replaced = self.backwards.get(key)
        if replaced is not None:
            self._release_graph(replaced.graph)
            self.usual = None
        self.backwards[key] = backward
        self._lent_grads += [lent for lent in backward.lent if lent is not None]
        self.backward_at = min(self.backward_at, backward.captured_at)
        self.last_at = max(self.last_at, backward.captured_at)

    def make_usual(
        self, backward: BackwardGraph, grads: Sequence[torch.Tensor | None], around: tuple[Hashable, ...]
    ) -> None:
        """The next backward, if it looks like this one, is found without a look-up."""
        tensors = [grad for grad in grads if grad is not None]
        if len(tensors) == len(grads) and around[:2] == (False, False):  # a look tells autocast, not its dtype
            if backward.geometry is None:
                backward.geometry = geometry_check(tensors)
            self.usual, backward.fork = backward, self.random.active

    def forget_activations(self) -> None:
        """Give the activations' memory to graphs that are captured later. There will be no other backward."""
        self.result.forget_history()
        self.capture_backward = None

    def give_up_memory(self) -> None:
        """The same for the memory of results and gradients, of which copies are handed out from now on."""
        self.forget_activations()
        self.result.give_up()
        for backward in self.backwards.values():
            backward.give_up()
        self._lent_grads = []

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Replay the forward; where the random generators were before, if anybody will ask."""
        if self.follow is not None:
            self.follow()
        self.boundary.load(leaves)
        origin = self.graph.random_origin() if self._notes_origin else None
        self._launch()
        self.forwards += 1
        for index in self._mutated:
            with torch.no_grad():
                leaves[index].copy_(self.boundary.tensors[index])
        return origin

    def begin(self) -> None:
        """A backward will come to a call: what it needs must stay."""
        self.state = RunnerState.BWD_READY
        self.lane.begin(self)
        if self.boundary.has_shared:
            self.boundary.hold()

    @property
    def static_bytes(self) -> int:
        """Memory at the graphs' edges."""
        return self.boundary.num_bytes + sum(b.grads_in.num_bytes for b in self.backwards.values())

    def release(self) -> None:
        """The call is over: ready for the next one."""
        self.state = RunnerState.FWD_READY
        if self.boundary.has_shared:
            self.boundary.release()
        if self.retired:
            self.free()
        self.lane.end(self)

    def retire(self) -> None:
        """Free the graphs, now or when the call under way is over."""
        self.retired = True
        if self.state is RunnerState.FWD_READY:
            self.free()

    def free(self) -> None:
        """Free the graphs."""
        self.is_freed = True
        self._release_graph(self.graph)
        for backward in self.backwards.values():
            self._release_graph(backward.graph)
        self.backwards.clear()
        self.usual = None
        self.result.let_go()
        self.lane.forget(self)
