"""`StageCapture` captures the graphs of a rank's stages in the order in which its schedule will replay them.

Nothing runs and nothing is sent during the capture: the geometry of each call was noted in eager steps before. So every
rank captures independently. Arguments share static memory by `plan_buffers`, from the forward of a microbatch to its
backward, or to its split weight gradient. So do incoming gradients, during a backward. The activations of a microbatch
are released at the same time, and graphs that are captured later use their memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from stepgraph.core.errors import CaptureError
from stepgraph.engine.call.proof import NeedsEagerCall
from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.order import plan_buffers, read_order
from stepgraph.engine.order.entries import Entry, Kind, Order
from stepgraph.engine.parts.stages.manager import StageCall, StageManager
from stepgraph.engine.record.pair.call import CallBuffers
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.lanes import PoolLane
from stepgraph.engine.record.pair.ordered import InputPart, OrderedMemory, record_input_part, record_weight_part
from stepgraph.engine.record.pair.runner import Runner
from stepgraph.engine.record.pair.target import PairTarget


class StageCapture:
    """The graphs of one rank, and the static memory that they share."""

    def __init__(self, managers: Sequence[StageManager], order: Order) -> None:
        self._managers = {manager.chunk: manager for manager in managers}
        self._entries = [entry for entry in read_order(order) if entry.chunk in self._managers]
        places = sorted({(entry.chunk, entry.microbatch) for entry in read_order(order)})
        layers = [1] * places[-1][0]  # for each chunk
        plan = plan_buffers(order, layers, [self._signature(*place) for place in places])
        self._numbers = dict(zip(places, plan, strict=True))
        """The buffer of each call, by chunk and microbatch."""
        self.memory = OrderedMemory(managers[0].target.shared.session.backend.device)
        self._weights: dict[tuple[int, int], InputPart] = {}
        self._is_cold = False

    def _signature(self, chunk: int, microbatch: int) -> Hashable:
        """The look of a call; calls of a stage without graphs share no memory."""
        manager = self._managers.get(chunk)
        if manager is None:
            return (chunk, microbatch)
        leaves = enumerate(manager.calls[microbatch].recorded.leaves)
        return tuple((i, leaf.changed(requires_grad=False)) for i, leaf in leaves if isinstance(leaf, ArgMetadata))

    def run(self, lane: PoolLane) -> None:
        """Capture the graphs in the order of the schedule. Raise `NeedsEagerCall` if one must come first."""
        for manager in self._managers.values():
            for call in manager.calls.values():
                if call.refusal is not None:
                    raise CaptureFailed(manager.target, call.kind, call.refusal)
        for entry in self._entries:
            manager = self._managers[entry.chunk]
            try:
                self._capture(manager, entry, lane)
            except Exception as error:
                raise CaptureFailed(manager.target, manager.calls[entry.microbatch].kind, error) from error
        if self._is_cold:
            raise NeedsEagerCall

    def _capture(self, manager: StageManager, entry: Entry, lane: PoolLane) -> None:
        call, is_first = manager.calls[entry.microbatch], manager.stage.is_first
        if entry.kind is Kind.FORWARD:
            self._forward(manager, entry.microbatch, call, lane)
            return
        if entry.kind is Kind.INPUT_GRAD and is_first:
            return  # the first stage leaves all to its W part
        metas, runner, pair = _gradients(call), manager.runners[entry.microbatch], manager.target.pair()
        autocast, place = call.recorded.backward_autocast, (entry.chunk, entry.microbatch)
        if entry.kind is Kind.INPUT_GRAD:
            _refuse_split(runner)
            given = self.memory.gradients(place, metas)
            self._weights[place] = record_input_part(pair, runner, metas, given, manager.target.name, autocast)
            return
        if entry.kind is Kind.BACKWARD or is_first:
            pair.backward(runner, metas, self.memory.gradients(place, metas), autocast)
        else:
            weights = self._weights.pop(place)
            manager.weights[entry.microbatch] = record_weight_part(pair, runner, weights, autocast, knows_origin=True)
        runner.give_up_memory()  # what its graphs hand out is copied at once
        self.memory.release(place)

    def _forward(self, manager: StageManager, microbatch: int, call: StageCall, lane: PoolLane) -> None:
        target, pair, eager = manager.target, manager.target.pair(), call.recorded
        target.check_capturable(eager.ambient)
        own = self.memory.arguments(self._numbers[manager.chunk, microbatch], eager)
        runner = pair.forward(eager, lane, CallBuffers(own))
        runner.backwards.are_copied = True
        try:
            call.kind.proof.compare(target.name, eager.log, runner.forward.log, strict=target.options.strict)
        except NeedsEagerCall:
            self._is_cold = True  # all calls are looked at before there is another eager step
        if not manager.runners:
            target.guard(call.kind, runner)
        manager.runners[microbatch] = runner


@dataclass(eq=False)
class CaptureFailed(Exception):
    """A failed capture, and its stage."""

    target: PairTarget
    kind: CallKind
    error: Exception


def _gradients(call: StageCall) -> list[ArgMetadata | None]:
    """The geometry of the gradients of a call's results."""
    metas = call.recorded.metas
    if all(meta is None for meta in metas):
        raise CaptureError(
            "the results of the stage got no gradient",
            rule="pipeline-stage",
            why="the schedule runs the backward of the stage, but there is nothing to record.",
            fix="leave stages without trainable parameters out of graph_stage.",
        )
    return metas


def _refuse_split(runner: Runner) -> None:
    """Refuse a split backward that torch would not compute, or would compute without autograd's hooks."""
    if not runner.edges.flows:
        raise CaptureError(
            "the backward of a stage is split in two, but no gradient flows to its inputs",
            rule="pipeline-stage",
            why="torch finds the weights on the way to the inputs, and would find none.",
            fix="let the inputs of the stage require gradients, or use a schedule that splits no backward.",
        )
    if runner.edges.bound:
        raise CaptureError(
            f"the backward of a stage is split in two, but {len(runner.edges.bound)} of its parameters have hooks, a "
            "`main_grad`, or belong to another module",
            rule="pipeline-stage",
            why="torch adds to the weights' gradients itself if a backward is split, without running hooks.",
            fix="remove the hooks, or use a schedule that splits no backward.",
        )
