"""An in-flight call of a graphed module lasts from its replayed forward to its replayed backward.

The backward checks first that it is a full backward, that the activations still exist, and that nobody has changed them
in place. Then it replays the backward that was recorded for such gradients, or records one if there is none.

Gradients are returned as copies, with two exceptions: the gradient of an argument that is another graph's result, and
one that autograd adds to an existing gradient of a leaf. If a caller keeps such a gradient (a hook on that tensor may),
the backward is recorded again in other memory, and returns copies from then on.

Where the backward is split, it computes the gradients of the inputs only. The call then keeps its memory and waits,
until its weight gradients are asked for (`weight_gradients`).

In autograd's graph a node stands for the call (`ReplayNode`). Its inputs are the tensors through which gradients flow
back to the caller, and an anchor. The anchor is an empty leaf. With it autograd builds the node even if no argument
needs a gradient, and a full backward, which reaches every leaf, can be distinguished from one for certain tensors only.
Parameters whose gradients the graph itself accumulates are not inputs, because each input costs host time.
A tensor whose uses autograd must add up one by one is an input once for each use (`pair.uses`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.core.ambient import autocast_now
from stepgraph.core.errors import CaptureError, StaleMemoryError, StepgraphError
from stepgraph.core.tracebacks import trim
from stepgraph.engine.call.messages import refuse_second_thread
from stepgraph.engine.grads.param_grads import SeparateShare
from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.record.pair.runner import BackwardGraph, Grads, Runner, RunnerState


class InFlightCall:
    """One call of a runner."""

    __slots__ = (
        "__weakref__",
        "_edges",
        "_freed",
        "_origin",
        "_passed",
        "_probes",
        "_ran_in",
        "_split",
        "node",
        "runner",
    )

    def __init__(self, runner: Runner, passed: Mapping[str, torch.Tensor]) -> None:
        """`passed` are parameters of the graph's own whose gradients autograd adds up."""
        self.runner, self._passed = runner, passed
        if passed:
            runner.backwards.other_uses.begin()
        self.node: weakref.ref[Any] | None = None
        self._origin: Any = None
        self._freed = False
        self._ran_in = -1
        """The backward that came here last."""
        self._edges: Sequence[torch.Tensor | bool] = ()
        """The destination of each argument's gradient: see `BackwardGraph.hand_out`."""
        self._probes: list[tuple[torch.Tensor, int]] = []
        self._split: BackwardGraph | None = None
        """The backward that ran, if its weight gradients wait."""

    def forward(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Replay the forward for these arguments, and return the results without autograd history."""
        runner = self.runner
        self._origin = runner.replay(leaves)
        runner.begin()
        runner.in_flight.add(self)
        edges, tensors = runner.edges, runner.boundary.tensors
        if edges.flows:
            self._edges = [_edge(leaves[index], tensors[index]) for index in edges.flows]
        for index in edges.saved_inputs:
            if leaves[index].data_ptr() == tensors[index].data_ptr():
                self._probes.append(_probe(leaves[index]))
        results = runner.result.hand_out()
        for index in edges.saved_results:
            if not runner.result.copied[index]:
                self._probes.append(_probe(results[index]))
        return results

    def will_run(self) -> bool:
        """True if the running backward will still reach this call."""
        node = self.node() if self.node is not None else None
        if node is None or self._ran_in == torch._C._current_graph_task_id():
            return False
        return torch._C._will_engine_execute_node(node)

    # -- backward

    def backward(self, grads: Grads) -> list[torch.Tensor | None]:
        """Replay the backward for these gradients of the results."""
        runner = self.runner
        order, backwards, follow = runner.order, runner.backwards, runner.forward.recording.graph.follow
        self._check()
        if follow is not None:
            follow()
        if order is not None:
            grads = order.fit_grads(grads)
        recorded = backwards.usual
        if recorded is None or not recorded.is_ready_for(grads, backwards.random.active):
            recorded = self._recorded(grads)
            if recorded is None:
                self._end()
                return [None] * (len(runner.edges.flows) + len(runner.edges.outside) + len(self._passed))
        if order is not None:
            order.take_turn(grads)
        several, passed = False, set(map(id, self._passed.values())) if self._passed else ()
        if len(runner.in_flight) > 1:
            self._ran_in = torch._C._current_graph_task_id()
            several = runner.in_flight.has_more_to_come(self)
            if several:
                if not runner.edges.adds_at_once:
                    recorded.accumulated.begin_sum(without=passed)
                if runner.edges.keeps_casts and runner.on_shared_backward is not None:
                    runner.on_shared_backward()
        recorded.grads_in.load(grads)
        share = recorded.accumulated.separate(passed) if passed else None
        if recorded.rewinds:
            recorded.graph.replay_from(self._origin)
        else:
            recorded.launch()
        runner.backward_runs += 1
        shares = self._shares(share) if share is not None else []
        recorded.accumulated.finish(last=not several)
        for parameter, marks in recorded.marks:
            parameter.__dict__.update(marks)
        # not where somebody keeps them, nor where a backward that runs before they are read might overwrite them
        lends = not backwards.are_copied and (order is not None or runner.lane.is_first_backward(recorded.captured_at))
        handed = recorded.hand_out(self._edges, lends=lends)
        if recorded.weights is not None and backwards.delayed is not None:
            self._split, self._edges = recorded, ()
            runner.in_flight.discard(self)
            runner.lane.wait(runner)
            backwards.delayed.append(self)
        else:
            self._end()
        return handed + shares

    def _shares(self, share: SeparateShare) -> list[torch.Tensor | None]:
        """The shares of this call in the gradients that autograd adds up."""
        found, uses, shares = share.take(), self.runner.backwards.other_uses, []
        for name, parameter in self._passed.items():
            shares.append(found.get(id(parameter)))
            uses.hand_over(name, parameter, shares[-1])
        return shares

    def weight_gradients(self) -> None:
        """Replay the weight gradients that the backward has left, and end the call."""
        assert self._split is not None
        self._check_memory()
        weights = self._split.weights
        assert weights is not None
        tries = 2  # somebody may hold gradients also in the memory that it is recorded with again
        while not weights.run(self._origin):
            if weights.again is None or not tries:
                raise held_gradient("a graphed module")
            weights, tries = weights.again(), tries - 1
        self._release()

    def _recorded(self, grads: Grads) -> BackwardGraph | None:
        """The backward for these gradients, ready to be replayed; None if all gradients are None."""
        backwards = self.runner.backwards
        metas = [None if grad is None else ArgMetadata(grad) for grad in grads]
        layouts = [None if meta is None else meta.layout for meta in metas]
        if not any(layouts):
            return None
        around = (*autocast_now(), backwards.random.active)
        recorded = backwards.get((*layouts, *around))
        if recorded is not None:
            backwards.make_usual(recorded, grads, around)
        if recorded is not None and (not recorded.grads_in.has_conditions or recorded.grads_in.is_free_for(grads)):
            if recorded.is_held():
                backwards.are_copied = True
            elif recorded.accumulated.attach():
                return recorded
        if backwards.record is None:
            raise _out_of_order(metas, is_known=recorded is not None, is_split=backwards.delayed is not None)
        recorded = backwards.record(self.runner, metas)
        if not recorded.accumulated.attach():  # somebody holds gradients in the memory that it was recorded with
            recorded = backwards.record(self.runner, metas)
            assert recorded.accumulated.attach()
        return recorded

    def _check(self) -> None:
        edges = self.runner.edges
        if torch.is_grad_enabled():
            raise CaptureError(
                "a backward with create_graph=True reached a graphed module",
                rule="create-graph",
            )
        if not torch._C._will_engine_execute_node(edges.anchor_node):
            raise CaptureError(
                "a backward for certain tensors only (autograd.grad, or backward(inputs=...)) reached a graphed module",
                rule="partial-backward",
            )
        if edges.uses_up_saved and torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError(
                "A backward with retain_graph=True reached a graphed module that is compiled. Compiled code uses up "
                "its activations in the first backward. Call backward() without retain_graph, or set "
                "torch._functorch.config.donated_buffer=False before the module is compiled."
            )
        if self.runner.backwards.delayed is not None and torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError(
                "A backward with retain_graph=True reached a graphed module whose weight gradients are delayed "
                "(`delay_wgrad_compute=True`). They are computed once for each forward. Call backward() without "
                "retain_graph, or leave the module out of the scope."
            )
        if self._freed or self._split is not None:
            raise RuntimeError(
                "Trying to backward through a graphed module a second time. Specify retain_graph=True at the first "
                "backward if there is to be another one."
            )
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise if the activations are gone or were changed."""
        if self.runner.state is RunnerState.FREED:
            raise StaleMemoryError(
                "a backward reached a graphed module whose graphs were freed",
                rule="stale-memory",
                why="after the forward, the session was closed or the process groups of its collectives ended.",
                fix="run the backward first.",
            )
        for probe, version in self._probes:
            if probe._version != version:
                raise CaptureError(
                    "a tensor that a graphed module's backward needs was changed in place after its forward",
                    rule="inplace-saved",
                    details=[f"a tensor of shape {list(probe.shape)}, version {version} -> {probe._version}"],
                )

    # -- ending

    def _end(self) -> None:
        """End the call after its backward; with retain_graph another backward may follow."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._release()

    def _release(self) -> None:
        if not self._freed:
            self._freed = True
            self._probes, self._edges = [], ()  # the node may live on with a loss that is kept, and must hold no memory
            self.runner.in_flight.discard(self)
            if self._passed:
                self.runner.backwards.other_uses.end()
            self.runner.release()

    def __del__(self) -> None:
        self._release()  # the results were dropped without a backward


def held_gradient(name: str) -> CaptureError:
    """Make the error for a parameter's gradient that cannot be stored where the graph adds to it."""
    return CaptureError(
        f"{name}: your program still holds a parameter's gradient of an earlier backward, or has set .grad to its own "
        "memory",
        rule="held-gradient",
        why="the graph writes to fixed memory, which the held gradient uses, and no graph can be added.",
        fix="clone gradients that you keep after zero_grad(); capture again after you set .grad to other memory; leave "
        "clone_param_grads=True unless a hook consumes each gradient at once.",
    )


def _out_of_order(metas: Sequence[ArgMetadata | None], *, is_known: bool, is_split: bool) -> CaptureError:
    what = "the gradients of a graphed module's results differ from those of the recorded order"
    if is_known:
        what = "a gradient of an earlier step is still held, and a graphed module's backward would overwrite it"
    return CaptureError(
        what,
        rule="replay-order",
        details=[f"received  {[None if m is None else list(m.shape) for m in metas]}"],
        why="its weight gradients are delayed, and those of other calls may lie where a graph would be added."
        if is_split
        else "with a single pool later graphs use the memory of its activations, so no graph can be added.",
        fix="run the recorded program, clone gradients that you keep, call handle.reset() if the program changes for "
        f"good, or leave {'delay_wgrad_compute' if is_split else 'cuda_graph_use_single_mempool'}=False.",
    )


def _edge(given: torch.Tensor, static: torch.Tensor) -> torch.Tensor | bool:
    """The destination of an argument's gradient: a leaf, or True for the graph that made the argument."""
    if given.grad_fn is None:
        return given
    return is_replayed(given) and given.data_ptr() == static.data_ptr()


def _probe(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor.detach(), tensor._version


class ReplayNode(torch.autograd.Function):
    """Replays the forward, unseen by autograd, and later the backward."""

    @staticmethod
    def forward(
        ctx: Any, use: InFlightCall, leaves: Sequence[Any], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        use.node = weakref.ref(ctx)
        results = use.forward(leaves)
        constant = use.runner.result.constant
        if constant:
            ctx.mark_non_differentiable(*[results[i] for i in constant])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        calling = ctx.use.runner.backwards.calling
        is_alone = calling.acquire(False)
        try:
            if not is_alone:
                refuse_second_thread("the backward of a graphed module")
            return (None, None, None, *ctx.use.backward(grads))
        except StepgraphError as error:
            trim(error)
            raise
        finally:
            if is_alone:
                calling.release()


_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, ReplayNode).apply
"""Without torch's own wrapper, which costs the host as much as the node: it is for transforms, and these are eager."""


def run_forward(runner: Runner, leaves: Sequence[Any], *, one_by_one: bool = False) -> Any:
    """Replay a runner's forward for these arguments; under autograd if gradients can flow.

    `one_by_one`: let autograd accumulate the gradients of parameters in eager's order.
    """
    result, edges = runner.result, runner.edges
    if edges.anchor_node is None:
        runner.replay(leaves)
        runner.lane.end(runner)
        return result.build(result.hand_out(), leaves)
    inputs = [leaves[i] for i in edges.flows]
    outside = edges.one_by_one() if one_by_one else edges.outside
    passed = runner.backwards.passed(edges.inside)
    call = InFlightCall(runner, passed)
    return result.build(_apply(call, leaves, edges.anchor, *inputs, *outside, *passed.values()), leaves)


def is_replayed(tensor: torch.Tensor) -> bool:
    """True if a tensor is the direct result of a replayed module, so that its gradient goes directly back there."""
    return type(tensor.grad_fn) is ReplayNode._backward_cls
