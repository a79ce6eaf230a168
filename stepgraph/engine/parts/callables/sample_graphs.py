"""`GraphCapture` captures the graphs of all samples (`SampleGraphs`), with an order or without one.

Without an order each callable has one pair of graphs, and every graph keeps its memory. Forwards are captured in the
order of the callables, backwards in reverse.

With an order, graphs are captured in that order, and with `reuse_buffers` they share memory. Static arguments follow
`plan_buffers`. Activations, results and gradients are released at the point where the order no longer needs them, so
that later graphs use their memory. Callers get copies, since they may keep them for any time. The memory needed is that
of the microbatches in flight at one time, however many microbatches there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch

from stepgraph.core.ambient import changed_flags
from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.memory.borrowed import BorrowedTensor
from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.memory.outputs import StaticOutputs
from stepgraph.engine.observe.step_objects import leaves_behind
from stepgraph.engine.oplog import Difference, Log
from stepgraph.engine.order import Kind, plan_buffers, samples_of
from stepgraph.engine.parts.callables.call_shape import CallShape
from stepgraph.engine.parts.callables.handover import Handover, HandoverBuffers, SampleHandovers
from stepgraph.engine.parts.callables.request import Request
from stepgraph.engine.parts.callables.target import named
from stepgraph.engine.parts.callables.warm_up import CaptureTimeHooks
from stepgraph.engine.record.pair.audit import differs
from stepgraph.engine.record.pair.call import CallBuffers, EagerCall
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.lanes import PoolLane
from stepgraph.engine.record.pair.ordered import (
    NO_AUTOCAST,
    InputPart,
    OrderedMemory,
    record_input_part,
    record_weight_part,
)
from stepgraph.engine.record.pair.runner import Runner, WeightGraph
from stepgraph.engine.record.pair.target import PairTarget
from stepgraph.engine.record.pair.uses import is_reentrant


class SampleGraphs:
    """One sample: its call, and the graphs that serve it."""

    def __init__(
        self, number: int, index: int, target: PairTarget, shape: CallShape, kind: CallKind, call: EagerCall
    ) -> None:
        self.number, self.index, self.target = number, index, target
        self.shape, self.kind, self.call = shape, kind, call
        self.captured: Runner | None = None
        self.has_split_weights = False
        self.weights: WeightGraph | None = None
        self.kept: list[torch.Tensor] = []
        """The tensors that its weight gradient reads, as long as no other graph may use their memory."""
        self.weight_runs = 0
        self.handovers = SampleHandovers()

    @property
    def runner(self) -> Runner:
        """What replays its graphs, once its forward is captured."""
        assert self.captured is not None
        return self.captured

    @property
    def metas(self) -> dict[int, ArgMetadata]:
        """The geometry of its tensor arguments, by leaf index."""
        return {i: leaf for i, leaf in enumerate(self.call.leaves) if isinstance(leaf, ArgMetadata)}

    @property
    def num_graphs(self) -> int:
        return 1 + len(self.runner.backwards) + (self.weights is not None)

    @property
    def log(self) -> Log:
        """The operations of its forward, as recorded."""
        return self.runner.forward.log

    def differs(self, hooks: CaptureTimeHooks) -> Difference | None:
        """Record the sample again, and return the first difference from its graphs, or None."""
        if self.runner.is_freed or changed_flags(self.call.ambient):
            return None

        def around(backward: bool) -> AbstractContextManager[None]:
            return hooks.around(self.index, backward=backward)

        with named(self.target):
            return differs(self.target.pair(), self.call, self.runner, around)

    def free(self) -> None:
        """Free its graphs."""
        runner = self.captured
        if runner is not None and not runner.is_freed:
            self.weights = None
            runner.free()

    def lend_outside_grads(self) -> list[BorrowedTensor]:
        """Lend the gradients that pass through autograd without a copy, and return them."""
        found: list[BorrowedTensor] = []
        first = len(self.runner.edges.flows)
        for backward in self.runner.backwards.values():
            if any(grad is not None for grad in backward.grads_out):
                backward.give_up()  # no other check covers whether they are held
            backward.lent = tuple(
                Uncopied(lent) if lent is not None and i >= first else lent for i, lent in enumerate(backward.lent)
            )
            found += [lent for lent in backward.lent if isinstance(lent, Uncopied)]
        for lent in found:
            lent.settle()  # the earlier lenders no longer hold references
        return found

    def hand_on(self, places: HandoverBuffers) -> None:
        """After the capture: return results and gradients by way of the memory where other graphs read them."""
        runner, handovers = self.runner, self.handovers
        handovers.results = {i: to for i, to in handovers.results.items() if runner.result.copied[i]}
        for index, (_, place) in handovers.results.items():
            runner.result.hand_on(index, Handover(place).settle())
        for backward in runner.backwards.values():
            lent = list(backward.lent)
            for position, place in handovers.grads.items():
                lent[position] = Handover(place).settle()
            backward.lent = tuple(lent)
            handovers.incoming = places.among(backward.grads_in.tensors)
        handovers.arguments = places.among(runner.boundary.tensors)

    def result_metas(self) -> list[ArgMetadata | None]:
        """Return the geometry of the gradients of its results."""
        result = self.runner.result
        pairs = zip(result.tensors, result.differentiable, strict=True)
        return [_dense(tensor) if differentiable else None for tensor, differentiable in pairs]


Following: TypeAlias = tuple[SampleGraphs, dict[int, torch.Tensor]]
"""The sample of the next layer and its static arguments, by leaf index."""


class Uncopied(BorrowedTensor):
    """A gradient that is lent without a copy, even if a copy is requested."""

    __slots__ = ()

    def __init__(self, lent: BorrowedTensor) -> None:
        super().__init__(lent.lend())

    def copy(self, *, goes_on: bool = True) -> torch.Tensor:
        return self.lend()


class GraphCapture:
    """Captures the graphs of a set of samples."""

    def __init__(
        self,
        request: Request,
        samples: Sequence[SampleGraphs],
        lane: PoolLane,
        device: torch.device,
        hooks: CaptureTimeHooks,
    ) -> None:
        self._request, self._samples, self._lane, self._hooks = request, samples, lane, hooks
        self.memory = OrderedMemory(device)
        self.places = HandoverBuffers()
        self._incoming: dict[int, tuple[list[ArgMetadata | None], dict[int, torch.Tensor]]] = {}
        """By sample: static gradients of its results, which another sample's backward writes."""
        self.allow_unused = False

    # -- without an order

    def run(self) -> None:
        """Capture a forward for each sample, then the backwards in reverse."""
        for sample in self._samples:
            self._forward(sample, self.memory.arguments(sample.number, sample.call))
        for sample in reversed(self._samples):
            if sample.runner.edges.anchor.requires_grad:
                self._whole_backward(sample)

    # -- with an order

    def run_in_order(self, *, reuse: bool) -> None:
        """Capture in the order of the request."""
        request = self._request
        shapes = [sample.shape.geometry for sample in self._samples]
        plan = plan_buffers(request.order or (), request.num_layers_per_chunk, shapes)
        parts: dict[int, InputPart] = {}
        for entry in request.entries:
            numbers = samples_of(entry, request.num_layers_per_chunk, request.num_microbatches)
            chosen = [self._samples[n] for n in numbers]
            if entry.kind is Kind.FORWARD:
                own = [self.memory.arguments(plan[s.number] if reuse else s.number, s.call) for s in chosen]
                for layer, sample in enumerate(chosen):
                    following = (chosen[layer + 1], own[layer + 1]) if layer + 1 < len(chosen) else None
                    self._forward(sample, own[layer], following)
                    if reuse and not request.trains:
                        sample.runner.give_up_memory()  # callers get copies at once
                continue
            for layer, sample in reversed(list(enumerate(chosen))):
                before = chosen[layer - 1] if layer else None
                if entry.kind is Kind.BACKWARD and sample.runner.edges.anchor.requires_grad:
                    self._whole_backward(sample, before)
                elif entry.kind is Kind.INPUT_GRAD and sample.runner.edges.anchor.requires_grad:
                    parts[sample.number] = self._input_part(sample, before)
                elif entry.kind is Kind.WEIGHT_GRAD:
                    self._weight_part(sample, parts.pop(sample.number, None))
            if reuse and entry.kind is not Kind.INPUT_GRAD:
                for sample in chosen:  # after the whole entry: its weight gradients may run in any order
                    self._give_up(sample)
        for sample in self._samples:
            sample.hand_on(self.places)

    # -- one graph

    def _forward(self, sample: SampleGraphs, own: dict[int, torch.Tensor], following: Following | None = None) -> None:
        target = sample.target
        then = functools.partial(self._hand_result_on, sample, following) if following is not None else None
        with self._hooks.around(sample.index, backward=False), named(target):
            sample.captured = target.pair().forward(sample.call, self._lane, CallBuffers(own), then)
        result = sample.runner.result
        result.copy(range(len(result.tensors)))
        sample.runner.backwards.are_copied = True
        if self._request.trains and sample.shape.takes_gradients and not self.allow_unused:
            self._refuse_unused(sample)

    def _hand_result_on(self, sample: SampleGraphs, following: Following, result: StaticOutputs) -> None:
        """In the recording of a forward: write results to arguments of the next sample with the same geometry."""
        following_sample, buffers = following
        metas = following_sample.metas
        looks = {index: ArgMetadata(tensor) for index, tensor in enumerate(result.tensors)}
        for leaf, buffer in buffers.items():
            index = next((i for i, meta in looks.items() if meta == metas[leaf] and not _is_lazy(result, i)), None)
            if index is not None:
                del looks[index]
                with torch.no_grad():
                    buffer.copy_(result.tensors[index])
                sample.handovers.results[index] = (leaf, self.places.at(buffer))

    def _hand_grads_on(self, sample: SampleGraphs, before: SampleGraphs, found: Sequence[torch.Tensor | None]) -> None:
        """In the recording of a backward: write gradients where the sample before reads those of its results."""
        flows = sample.runner.edges.flows
        for index, (leaf, _) in before.handovers.results.items():
            buffer = self._gradients(before)[1].get(index)
            position = flows.index(leaf) if leaf in flows else len(found)
            grad = found[position] if position < len(found) else None
            if buffer is not None and grad is not None and ArgMetadata(grad).layout == ArgMetadata(buffer).layout:
                with torch.no_grad():
                    buffer.copy_(grad)
                sample.handovers.grads[position] = self.places.at(buffer)

    def _refuse_unused(self, sample: SampleGraphs) -> None:
        """Refuse tensors that require a gradient and get none, as torch does by default."""
        runner, target = sample.runner, sample.target
        results = [t for t in runner.result.tensors if t.requires_grad]
        if is_reentrant(results):
            return  # the leaves that its backward reaches are unknown before it runs
        reached = {id(leaf) for leaf in leaves_behind(results)}
        reached |= {id(runner.boundary.tensors[i]) for i in runner.result.passed}
        names = sample.shape.call.names()
        inputs = {names[i]: t for i, t in runner.boundary.tensors.items() if t.requires_grad}
        returned = {id(t) for t in runner.result.objects}
        used_outside = {path for path, p in target.module.named_parameters() if id(p) in returned}
        weights = {path: target.pair().proxies.of(p) for path, p in target.module.named_parameters() if p.requires_grad}
        for kind, tensors in (("argument", inputs), ("parameter", weights)):
            for name, tensor in tensors.items():
                if id(tensor) not in reached and name not in used_outside:
                    raise InvalidArgument(
                        f"{target.name}: {kind} `{name}` requires a gradient, but the result does not depend on it",
                        rule="unused-input",
                        why="its gradient would always be None, which is usually a mistake.",
                        fix="pass allow_unused_input=True, or set requires_grad=False on it.",
                    )

    def _whole_backward(self, sample: SampleGraphs, before: SampleGraphs | None = None) -> None:
        metas, given = self._gradients(sample)
        then = self._then(sample, before)
        with self._hooks.around(sample.index, backward=True), named(sample.target):
            sample.target.pair().backward(sample.runner, metas, given, NO_AUTOCAST, then=then)

    def _input_part(self, sample: SampleGraphs, before: SampleGraphs | None) -> InputPart:
        metas, given = self._gradients(sample)
        then, name = self._then(sample, before), sample.target.name
        with self._hooks.around(sample.index, backward=True), named(sample.target):
            return record_input_part(sample.target.pair(), sample.runner, metas, given, name, then=then)

    def _then(
        self, sample: SampleGraphs, before: SampleGraphs | None
    ) -> Callable[[Sequence[torch.Tensor | None]], None] | None:
        if before is None or not before.runner.edges.anchor.requires_grad:
            return None
        self._gradients(before)  # allocate them now, not while a graph is recorded
        return functools.partial(self._hand_grads_on, sample, before)

    def _weight_part(self, sample: SampleGraphs, part: InputPart | None) -> None:
        sample.has_split_weights = True
        if part is not None:
            with named(sample.target):
                sample.kept = part.weights.kept()
                sample.weights = record_weight_part(sample.target.pair(), sample.runner, part, keeps_saved=True)

    def _gradients(self, sample: SampleGraphs) -> tuple[list[ArgMetadata | None], dict[int, torch.Tensor]]:
        """Return the geometry of the gradients of a sample's results, and static memory for them."""
        if sample.number not in self._incoming:
            metas = sample.result_metas()
            self._incoming[sample.number] = (metas, self.memory.gradients(sample.number, metas))
        return self._incoming[sample.number]

    def _give_up(self, sample: SampleGraphs) -> None:
        """Release the memory of a sample that the order no longer needs."""
        self.memory.release(sample.number)
        sample.runner.give_up_memory()
        if sample.weights is not None:
            sample.weights.recorded.give_up()
            sample.kept = []


def _is_lazy(result: StaticOutputs, index: int) -> bool:
    """Check whether a tensor's values differ from its memory (conjugated or negated)."""
    return result.tensors[index].is_conj() or result.tensors[index].is_neg()


def _dense(tensor: torch.Tensor) -> ArgMetadata:
    """Return the usual geometry of a tensor's gradient: that of the tensor, without the repetitions of expand()."""
    made = torch.empty_like(tensor, requires_grad=False, device="meta")
    return ArgMetadata(made).changed(device=tensor.device)
