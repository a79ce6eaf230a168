"""`StageCapture` captures the graphs of a rank's stages in the order in which its schedule will replay them.

Nothing runs and nothing is sent while they are captured: what each call looked like was noted in eager steps before. So
every rank captures by itself. Arguments share static memory by `plan_buffers`: from the forward of a microbatch to its
backward, or to its weight gradient where that is split off. So do the gradients that come in, from a backward on. The
activations of a microbatch are let go of at the same moment, and graphs that are captured later get their memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from stepgraph.buffers.inputs import ArgMetadata
from stepgraph.buffers.reuse_pool import TensorReusePool
from stepgraph.errors import CaptureError
from stepgraph.modules.round import backward_autocast
from stepgraph.order import plan_buffers
from stepgraph.order.entries import Entry, Kind, Order
from stepgraph.pair.call import CallBuffers
from stepgraph.pair.lanes import PoolLane
from stepgraph.pair.ordered import InputPart, record_input_part, record_weight_part
from stepgraph.pair.proof import NotWarm
from stepgraph.pair.runner import Runner
from stepgraph.pipeline.manager import StageCall, StageManager
from stepgraph.signature.ambient import changed_flags


class StageCapture:
    """The graphs of one rank, and the static memory that they share."""

    def __init__(self, managers: Sequence[StageManager], order: Order, num_chunks: int, num_microbatches: int) -> None:
        self._managers = {manager.chunk: manager for manager in managers}
        self._num_microbatches = num_microbatches
        self.numbers = plan_buffers(order, [1] * num_chunks, self._signatures(num_chunks))
        """The buffer of each call, chunk by chunk and in a chunk microbatch by microbatch."""
        device = managers[0].session.session.backend.device
        self._gradients = TensorReusePool(device)
        self._arguments: dict[tuple[int, int], torch.Tensor] = {}
        self._taken: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._weights: dict[tuple[int, int], InputPart] = {}
        self._is_cold = False

    @property
    def num_buffers(self) -> int:
        """How many calls at a time have static arguments."""
        chunks = {chunk - 1 for chunk in self._managers}
        return len({n for i, n in enumerate(self.numbers) if i // self._num_microbatches in chunks})

    @property
    def static_bytes(self) -> int:
        """Memory at the graphs' edges."""
        arguments = sum(tensor.untyped_storage().nbytes() for tensor in self._arguments.values())
        return arguments + self._gradients.num_bytes

    def _signatures(self, num_chunks: int) -> list[Hashable]:
        """What each call looks like; those of a stage without graphs share with nobody."""
        found: list[Hashable] = []
        for chunk in range(1, num_chunks + 1):
            for microbatch in range(self._num_microbatches):
                manager = self._managers.get(chunk)
                call = manager.calls[microbatch] if manager is not None else None
                found.append((chunk, microbatch) if call is None else tuple(_geometry(call).items()))
        return found

    def run(self, entries: Sequence[Entry], lane: PoolLane[Runner]) -> None:
        """Capture these, in their order. Raises `NotWarm` if there should be another eager step before."""
        for entry in entries:
            manager = self._managers[entry.chunk]
            try:
                self._capture(manager, entry, lane)
            except Exception as error:
                raise CaptureFailed(manager, manager.calls[entry.microbatch], error) from error
        if self._is_cold:
            raise NotWarm

    def _capture(self, manager: StageManager, entry: Entry, lane: PoolLane[Runner]) -> None:
        microbatch, call = entry.microbatch, manager.calls[entry.microbatch]
        if entry.kind is Kind.FORWARD:
            self._forward(manager, microbatch, call, lane)
        elif entry.kind is Kind.BACKWARD or (entry.kind is Kind.WEIGHT_GRAD and manager.stage.is_first):
            manager.pair().backward(
                *(manager.runners[microbatch], _gradients(call), self._incoming(entry, call)),
                backward_autocast(call.recorded),
            )
            self._done(manager, entry)
        elif entry.kind is Kind.INPUT_GRAD and not manager.stage.is_first:  # the first stage leaves all to its W part
            runner = manager.runners[microbatch]
            _refuse_split(runner)
            self._weights[entry.chunk, microbatch] = record_input_part(
                *(manager.pair(), runner, _gradients(call), self._incoming(entry, call), manager.name),
                backward_autocast(call.recorded),
            )
        elif entry.kind is Kind.WEIGHT_GRAD:
            manager.weights[microbatch] = record_weight_part(
                manager.pair(),
                manager.runners[microbatch],
                self._weights.pop((entry.chunk, microbatch)),
                backward_autocast(call.recorded),
                knows_origin=True,
            )
            self._done(manager, entry)

    def _forward(self, manager: StageManager, microbatch: int, call: StageCall, lane: PoolLane[Runner]) -> None:
        manager.check_capturable()
        different = changed_flags(call.recorded.ambient)
        if different:
            raise RuntimeError(f"flags of the process have changed since the call: {', '.join(different)}")
        number = self.numbers[(manager.chunk - 1) * self._num_microbatches + microbatch]
        own = {}
        for index, meta in _geometry(call).items():
            if (number, index) not in self._arguments:
                self._arguments[number, index] = meta.empty(manager.session.session.backend.device)
            own[index] = self._arguments[number, index]
        runner = manager.pair().forward(call.recorded, lane, CallBuffers(own))
        runner.backwards.are_copied = True
        call.site.runners = [runner]
        log, eager = runner.forward.log, call.recorded.log
        try:
            call.site.proof.compare(manager.name, eager, log, strict=manager.options.strict)
        except NotWarm:
            self._is_cold = True  # all calls are looked at before there is another eager step
        if not manager.runners:
            manager.guard(call.site, runner)
        manager.runners[microbatch] = runner

    def _incoming(self, entry: Entry, call: StageCall) -> dict[int, torch.Tensor]:
        taken = {i: self._gradients.get(meta) for i, meta in enumerate(_gradients(call)) if meta is not None}
        self._taken[entry.chunk, entry.microbatch] = list(taken.values())
        return taken

    def _done(self, manager: StageManager, entry: Entry) -> None:
        """Nothing of a microbatch is needed any more; what its graphs hand out is copied at once."""
        manager.runners[entry.microbatch].give_up_memory()
        for tensor in self._taken.pop((entry.chunk, entry.microbatch)):
            self._gradients.insert(tensor)


class CaptureFailed(Exception):
    """Which stage's graph could not be captured."""

    def __init__(self, manager: StageManager, call: StageCall, error: Exception) -> None:
        super().__init__(str(error))
        self.manager, self.call, self.error = manager, call, error


def _geometry(call: StageCall) -> dict[int, ArgMetadata]:
    """The tensors among a call's arguments, by leaf index."""
    leaves = enumerate(call.recorded.leaves)
    return {i: replace(leaf, requires_grad=False) for i, leaf in leaves if isinstance(leaf, ArgMetadata)}


def _gradients(call: StageCall) -> list[ArgMetadata | None]:
    """The gradients that came back to a call's results."""
    metas: list[Any] = call.recorded.metas
    if all(meta is None for meta in metas):
        raise CaptureError(
            "no gradient came back to the stage",
            rule="pipeline-stage",
            why="the schedule runs its backward, and there is nothing to record.",
            fix="leave a stage without trainable parameters out of graph_stage.",
        )
    return metas


def _refuse_split(runner: Runner) -> None:
    """Refuse a split backward where torch's own computes nothing, or goes round what would happen in autograd."""
    if not runner.edges.flows:
        raise CaptureError(
            "the backward of a stage is split in two, and no gradient flows to the inputs of the stage",
            rule="pipeline-stage",
            why="torch looks for weights on the way to the inputs, and would find none of them.",
            fix="let the inputs of the stage require gradients, or take a schedule that splits no backward.",
        )
    if runner.edges.outside:
        raise CaptureError(
            f"the backward of a stage is split in two, and {len(runner.edges.outside)} of its parameters have hooks, "
            "a `main_grad`, or are not its own",
            rule="pipeline-stage",
            why="torch adds to the gradients of the weights by itself where a backward is split, without hooks.",
            fix="remove the hooks, or take a schedule that splits no backward.",
        )
