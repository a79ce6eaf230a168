"""A backward that is split in two graphs, for orders in which the weight gradients come later.

The I part is the backward that autograd calls: it returns the gradients of the inputs only. The W part is a separate
graph that the caller replays by `backward_dw()`. It adds to the gradients' memory as a whole backward does. Parameters
whose gradients must pass through autograd get them at that time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.engine.backends import Graph
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.memory.borrowed import BorrowedTensor
from stepgraph.engine.memory.inputs import ArgMetadata, StaticInputs
from stepgraph.engine.memory.reuse_pool import TensorReusePool
from stepgraph.engine.oplog import OpLog, left_out
from stepgraph.engine.record.pair.call import EagerCall
from stepgraph.engine.record.pair.differentiate import without_aliases
from stepgraph.engine.record.pair.record import PairCapture
from stepgraph.engine.record.pair.runner import BackwardGraph, Grads, Runner, WeightGraph
from stepgraph.engine.record.pair.split_backward import WeightPart, input_gradients
from stepgraph.engine.record.pair.uses import is_reentrant

NO_AUTOCAST = (False, False)
"""A backward runs without autocast, even if autocast is on around the capture."""


class OrderedMemory:
    """Static memory that calls share by their order: arguments by a plan of buffers, gradients of results by a pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, TensorReusePool(device)
        self._arguments: dict[int, list[torch.Tensor]] = {}
        """By the number of a buffer."""
        self._gradients: dict[Hashable, dict[int, torch.Tensor]] = {}
        """By call, as long as the order needs them."""

    @property
    def num_buffers(self) -> int:
        """The number of sets of static arguments."""
        return len(self._arguments)

    @property
    def num_bytes(self) -> int:
        arguments = (tensor for tensors in self._arguments.values() for tensor in tensors)
        return sum(tensor.untyped_storage().nbytes() for tensor in arguments) + self._pool.num_bytes

    def arguments(self, number: int, call: EagerCall) -> dict[int, torch.Tensor]:
        """Return the static arguments of a call in a buffer, by leaf index."""
        metas = {i: leaf for i, leaf in enumerate(call.leaves) if isinstance(leaf, ArgMetadata)}
        if number not in self._arguments:
            self._arguments[number] = [meta.changed(requires_grad=False).empty(self._device) for meta in metas.values()]
        return dict(zip(metas, self._arguments[number], strict=True))

    def gradients(self, call: Hashable, metas: Sequence[ArgMetadata | None]) -> dict[int, torch.Tensor]:
        """Return static memory for the gradients of a call's results, by index."""
        if call not in self._gradients:
            self._gradients[call] = {i: self._pool.get(meta) for i, meta in enumerate(metas) if meta is not None}
        return self._gradients[call]

    def release(self, call: Hashable) -> None:
        """Let later calls use the gradients of a call."""
        for tensor in self._gradients.pop(call, {}).values():
            self._pool.insert(tensor)


@dataclass(frozen=True, slots=True)
class InputPart:
    """A recorded I part, and the tensors that its W part starts from, until that is recorded."""

    backward: BackwardGraph
    notes: OpLog
    weights: WeightPart
    inside: tuple[torch.Tensor, ...]
    """Parameters whose gradients the W part accumulates."""
    late: tuple[torch.Tensor, ...]
    """Parameters that get the gradients of the W part from autograd."""


def record_input_part(
    pair: PairCapture,
    runner: Runner,
    metas: Sequence[ArgMetadata | None],
    given: Mapping[int, torch.Tensor],
    name: str,
    autocast: tuple[Any, Any] = NO_AUTOCAST,
    then: Callable[[Grads], None] | None = None,
    lent: Mapping[int, BorrowedTensor] | None = None,
) -> InputPart:
    """Record the I part as the runner's backward.

    `given` are buffers for the gradients; those that another graph returns are `lent`. `then` is called with the
    gradients of the inputs, to add further work to the graph.
    """
    results = [runner.result.tensors[i] for i in given]
    if is_reentrant(results):
        raise CaptureError(
            f"{name}: the backward of a callable with reentrant checkpointing is split in two",
            rule="reentrant-checkpoint",
            why="such checkpointing accumulates gradients itself, so the parts cannot be computed one by one.",
            fix="use checkpoint(..., use_reentrant=False).",
        )
    late = runner.edges.bound
    inside = pair.accumulated_inside(late)
    inputs = [runner.boundary.tensors[i] for i in runner.edges.flows]
    leaves = [pair.proxies.of(p) for p in (*inside, *late)]

    weights: list[WeightPart] = []

    def run(graph: Graph) -> tuple[Grads, tuple[()]]:
        grads, part = input_gradients(results, list(given.values()), inputs, leaves)
        weights.append(part)
        with torch.no_grad(), left_out():
            out = without_aliases(grads, list(given.values()))
            if then is not None:
                then(out)
        return out, ()

    notes, around = pair.backward_notes(runner, given), pair.around_backward(runner, autocast)
    recording = pair.record(runner.lane, notes, run, around, runner.forward)
    boundary = StaticInputs(given, in_use={i: other.is_held for i, other in (lent or {}).items()})
    backward = pair.keep(runner, metas, autocast, recording, boundary)
    runner.edges = dataclasses.replace(
        runner.edges, outside=(), bound=(), inside={}
    )  # autograd must not pass them a gradient in the I part, not even None
    return InputPart(backward, notes, weights[0], tuple(inside), late)


def record_weight_part(
    pair: PairCapture,
    runner: Runner,
    part: InputPart,
    autocast: tuple[Any, Any] = NO_AUTOCAST,
    *,
    knows_origin: bool = False,
    keeps_saved: bool = False,
    may_repeat: bool = False,
) -> WeightGraph:
    """Record the W part of an I part.

    `knows_origin`: the caller of a replay knows the random state before the forward. `keeps_saved`: keep the tensors
    that autograd has saved as long as the runner's results. `may_repeat`: keep also those that it starts from, so that
    it can be recorded again, and no later graph uses their memory.
    """
    memory = pair.grads.part(part.inside).memory  # it must not be born in the graph

    def run(graph: Graph) -> Grads:
        grads = part.weights.gradients(retain_graph=keeps_saved)
        pairs = [(to, grad) for to, grad in zip(memory, grads, strict=False) if grad is not None]
        if pairs:
            with torch.no_grad(), left_out():
                torch._foreach_add_([to for to, _ in pairs], [grad for _, grad in pairs])
        return grads

    notes, around = part.notes.followed_by(), pair.around_backward(runner, autocast, part.late)
    recording = pair.record(runner.lane, notes, run, around, runner.forward)
    random = recording.graph.random
    rewinds = recording.segment.rewinds or bool(random.rewinds_to)
    if random.draws or random.rewinds_to - {runner.forward.recording.graph} or (rewinds and not knows_origin):
        pair.session.release(recording.graph)
        raise CaptureError(
            "the split weight gradient is computed with random numbers",
            rule="rng-recompute",
            why="the random state of the forward is not known when the weight gradient is replayed.",
            fix="leave checkpointing with dropout out of the callable, or do not split the weight gradient (no -c.5).",
        )
    given = list(zip((*part.inside, *part.late), recording.made, strict=True))
    reached = [p for p, grad in given[: len(part.inside)] if grad is not None]
    through = [(p, grad) for p, grad in given[len(part.inside) :] if grad is not None]
    grads = [grad for _, grad in through]
    accumulated, number = pair.grads.part(reached, id(pair.module)), runner.lane.next_number()
    made = BackwardGraph(recording, StaticInputs({}), grads, accumulated, number, rewinds)
    runner.span.last_at = max(runner.span.last_at, made.captured_at)
    again = functools.partial(_record_again, pair, runner, part, autocast) if may_repeat else None
    part.backward.weights = WeightGraph(made, tuple([p for p, _ in through]), again)
    return part.backward.weights


def _record_again(pair: PairCapture, runner: Runner, part: InputPart, autocast: tuple[Any, Any]) -> WeightGraph:
    """Record a W part for the memory that gradients have now, and free the one before."""
    before = part.backward.weights
    options = {"knows_origin": True, "keeps_saved": True, "may_repeat": True}
    with interrupts_held():
        with torch.inference_mode(False), pair.session.workspace.capturing():
            made = record_weight_part(pair, runner, part, autocast, **options)
        if before is not None:
            pair.session.release(before.recorded.graph)
    return made
