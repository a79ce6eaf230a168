"""A runner: one forward graph of a module and its backward graphs, with static memory of their own.

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
from typing import Any

import torch

from stepgraph.backends import Graph
from stepgraph.capture.boundary import ArgMetadata, Boundary
from stepgraph.capture.lane import Lane
from stepgraph.capture.replay_node import ReplayNode, is_replayed
from stepgraph.capture.static_result import StaticResult
from stepgraph.errors import CaptureError, StaleMemoryError
from stepgraph.state.param_grads import GradPart


class RunnerState(enum.Enum):
    """Which pass a runner is ready for."""

    FWD_READY = 0
    BWD_READY = 1


class BackwardGraph:
    """One recorded backward: for one set of results that gradients arrive at."""

    def __init__(
        self,
        graph: Graph,
        grads_in: Boundary,
        grads_out: Sequence[torch.Tensor | None],
        accumulated: GradPart,
        marks: Sequence[tuple[torch.Tensor, dict[str, Any]]],
        captured_at: int,
    ) -> None:
        self.graph, self.grads_in, self.accumulated = graph, grads_in, accumulated
        self.captured_at = captured_at
        """Its place in the order of the lane."""
        grads_in.note_loaded = graph.note_loaded
        self.grads_out = tuple(grads_out)
        """The gradient of each input of the node, or None."""
        self.marks = tuple(marks)
        """Attributes that the backward sets on parameters."""


class Runner:
    """One forward/backward pair. `capture_backward` records a backward that is not known yet."""

    def __init__(
        self,
        graph: Graph,
        boundary: Boundary,
        result: StaticResult,
        mutated: Sequence[int],
        flows: Sequence[int],
        outside: Sequence[torch.Tensor],
        saved: frozenset[int],
        anchor: torch.Tensor,
        rivals: weakref.WeakSet[Use],
        lane: Lane,
        captured_at: int,
        training: tuple[bool, ...],
    ) -> None:
        self.graph, self.boundary, self.result = graph, boundary, result
        self.training = training
        """The modules' modes."""
        boundary.note_loaded = graph.note_loaded
        self.lane, self.forward_at = lane, captured_at
        self.backward_at: float = math.inf
        """When its first backward was captured."""
        self.flows = tuple(flows)
        """The arguments that gradients flow back to, by leaf index."""
        self.outside = tuple(outside)
        """Parameters whose gradients autograd accumulates."""
        self.backwards: dict[Hashable, BackwardGraph] = {}
        self.known_looks: dict[Hashable, BackwardGraph] = {}
        """The backwards again, by what is quick to read off gradients."""
        self.capture_backward: Callable[[Runner, Sequence[ArgMetadata | None]], BackwardGraph] | None = None
        self.take_turn: Callable[[], None] | None = None
        """Where the order of replays is fixed: raises if the backward is not what comes next."""
        self.state = RunnerState.FWD_READY
        self.forwards = self.backward_runs = 0
        self.anchor = anchor
        self._anchor_node = torch.autograd.graph.get_gradient_edge(anchor).node if anchor.requires_grad else None
        self._mutated = tuple(mutated)
        self._saved_inputs = [i for i in flows if boundary.tensors[i].untyped_storage()._cdata in saved]
        self._saved_results = [
            i for i, t in enumerate(result.tensors) if t.untyped_storage()._cdata in saved and result.differentiable[i]
        ]
        self.rivals = rivals
        """Calls under way, of all runners that add to the same gradients."""
        self.retired = self.is_freed = False
        self.held_up: set[int] = set()
        """Runners, by id, that were found not to be able to run because results of this one are held."""
        lane.add(self)

    def can_take(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these arguments would overwrite nothing that is still needed."""
        ready = self.state is RunnerState.FWD_READY
        return ready and self.lane.admits(self) and self.boundary.is_free_for(leaves)

    def is_live(self) -> bool:
        """Whether the results of the last call may still be read."""
        return self.state is RunnerState.BWD_READY or self.result.is_held()

    def add_backward(self, key: Hashable, backward: BackwardGraph) -> None:
        """Know another backward."""
        self.backwards[key] = backward
        self.backward_at = min(self.backward_at, backward.captured_at)

    def forget_activations(self) -> None:
        """Give the activations' memory to graphs that are captured later. There will be no other backward."""
        self.result.forget_history()
        self.capture_backward = None

    def run(self, leaves: Sequence[Any]) -> Any:
        """Replay the forward for these arguments; under autograd where gradients can flow."""
        self.boundary.load(leaves)
        self.graph.replay()
        self.lane.note_run(self.forward_at)
        self.forwards += 1
        for index in self._mutated:
            with torch.no_grad():
                leaves[index].copy_(self.boundary.tensors[index])
        if not self.anchor.requires_grad:
            self.lane.end(self)
            return self.result.build(self.result.hand_out(), leaves)
        self.state = RunnerState.BWD_READY
        self.lane.begin(self)
        self.boundary.hold()
        use = Use(self, leaves, self._saved_inputs)
        self.rivals.add(use)
        inputs = [leaves[i] for i in self.flows]
        results = ReplayNode.apply(use, self.anchor, *inputs, *self.outside)  # type: ignore[no-untyped-call]
        return self.result.build(results, leaves)

    @property
    def static_bytes(self) -> int:
        """Memory at the graphs' edges."""
        return self.boundary.num_bytes + sum(b.grads_in.num_bytes for b in self.backwards.values())

    def release(self) -> None:
        """The call is over: ready for the next one."""
        self.state = RunnerState.FWD_READY
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
        self.graph.free()
        for backward in self.backwards.values():
            backward.graph.free()
        self.backwards.clear()
        self.known_looks.clear()
        self.result.let_go()
        self.lane.forget(self)


class Use:
    """One call of a runner, from its forward to its backward."""

    __slots__ = ("__weakref__", "_aliases", "_done", "_ended_at", "_number", "_probes", "node", "runner")

    def __init__(self, runner: Runner, leaves: Sequence[Any], saved_inputs: Sequence[int]) -> None:
        self.runner = runner
        self.node: weakref.ref[Any] | None = None
        self._number = runner.forwards
        self._done = False
        self._ended_at = 0
        tensors = runner.boundary.tensors
        # a gradient that goes straight back into the graph that made the argument is read in place, others are copied
        self._aliases = [is_replayed(leaves[i]) and leaves[i].data_ptr() == tensors[i].data_ptr() for i in runner.flows]
        chained = [leaves[i] for i in saved_inputs if leaves[i].data_ptr() == tensors[i].data_ptr()]
        self._probes = [_probe(tensor) for tensor in chained]

    def hand_out(self) -> tuple[torch.Tensor, ...]:
        """The results, free of history."""
        results = self.runner.result.hand_out()
        self._probes += [_probe(results[i]) for i in self.runner._saved_results if not self.runner.result.copied[i]]
        return results

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward for these gradients of the results."""
        runner = self.runner
        self._check()
        look = (*[None if grad is None else (grad.shape, grad.stride(), grad.dtype) for grad in grads], *_autocast())
        recorded = runner.known_looks.get(look)
        if recorded is None:
            recorded = self._recorded_for(grads, look)
        if runner.take_turn is not None:
            runner.take_turn()
        several = len(runner.rivals) > 1 and any(_will_run(other) for other in runner.rivals if other is not self)
        recorded.accumulated.attach()
        if several:
            recorded.accumulated.begin_sum(torch._C._current_graph_task_id())
        recorded.grads_in.load(grads)
        recorded.graph.replay()
        runner.lane.note_run(recorded.captured_at)
        runner.backward_runs += 1
        if not several:
            recorded.accumulated.end_sum()
        for parameter, marks in recorded.marks:
            parameter.__dict__.update(marks)
        found: list[torch.Tensor | None] = []
        # whether no backward that may run before it is read can overwrite it
        first = runner.take_turn is not None or runner.lane.is_first_backward(recorded.captured_at)
        for index, grad in enumerate(recorded.grads_out):
            alias = first and index < len(self._aliases) and self._aliases[index]
            found.append(grad if grad is None else grad.data if alias else grad.clone())
        self._end()
        return found

    def _recorded_for(self, grads: Sequence[torch.Tensor | None], look: Hashable) -> BackwardGraph:
        """The backward for gradients that look like these, recorded now if there is none yet."""
        runner = self.runner
        metas = [None if grad is None else ArgMetadata.of(grad) for grad in grads]
        recorded = runner.backwards.get((*metas, *_autocast())) or _capture_now(runner, metas)
        runner.known_looks[look] = recorded
        return recorded

    def _check(self) -> None:
        runner = self.runner
        if torch.is_grad_enabled():
            raise CaptureError(
                "a backward with create_graph=True reached a graphed module",
                rule="create-graph",
                why="a replayed backward has no graph of its own: the second derivative would be a constant.",
                fix="leave this module out of the scope, or close the graphs for that part of the training.",
            )
        if runner._anchor_node is not None and not torch._C._will_engine_execute_node(runner._anchor_node):
            raise CaptureError(
                "a backward for certain tensors only (autograd.grad, or backward(inputs=...)) reached a graphed module",
                rule="partial-backward",
                why="the recorded backward computes, and accumulates, the gradients of all its parameters.",
                fix="call loss.backward() without inputs=, or leave this module out of the scope.",
            )
        gone = self._done and (runner.is_freed or runner.lane.was_overwritten(runner, self._ended_at))
        if runner.forwards != self._number or gone:
            raise StaleMemoryError(
                "a second backward through a graphed module, after it or a module that shares memory was called again",
                rule="stale-memory",
                why="its activations were overwritten by the later call.",
                fix="run the backward (with retain_graph) before graphed modules are called again.",
            )
        for probe, version in self._probes:
            if probe._version != version:
                raise CaptureError(
                    "a tensor that a graphed module's backward needs was changed in place after its forward",
                    rule="inplace-saved",
                    details=[f"a tensor of shape {list(probe.shape)}, version {version} -> {probe._version}"],
                    why="the activations lie in this memory; eager autograd refuses the same.",
                    fix="use the out-of-place form of the operation that changes it.",
                )

    def _end(self) -> None:
        if not self._done:
            self._done = True
            self._probes = []  # the node may live on with a loss that is kept, and must hold no memory
            self._ended_at = self.runner.lane.time
            self.runner.rivals.discard(self)
            self.runner.release()

    def __del__(self) -> None:
        self._end()  # the results were dropped without a backward


def _capture_now(runner: Runner, metas: Sequence[ArgMetadata | None]) -> BackwardGraph:
    if runner.capture_backward is None:
        raise CaptureError(
            "gradients came back to other results of a graphed module than in the recorded order, or look otherwise",
            rule="replay-order",
            details=[f"received  {[None if m is None else list(m.shape) for m in metas]}"],
            why="with a single pool its activations lie in memory that later graphs use, and no graph can be added.",
            fix="keep to the recorded program, call handle.reset() where it changes for good, or leave "
            "cuda_graph_use_single_mempool=False.",
        )
    return runner.capture_backward(runner, metas)


def _probe(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor.detach(), tensor._version


def _will_run(use: Use) -> bool:
    node = use.node() if use.node is not None else None
    return node is not None and torch._C._will_engine_execute_node(node)


def _autocast() -> tuple[Hashable, ...]:
    cuda, cpu = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return cuda and torch.get_autocast_dtype("cuda"), cpu and torch.get_autocast_dtype("cpu")
