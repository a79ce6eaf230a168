"""An audit records a call again, with the backwards that its runner has, and compares operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.oplog import Difference, first_difference
from stepgraph.engine.record.pair.call import CallBuffers, EagerCall
from stepgraph.engine.record.pair.ordered import record_input_part, record_weight_part
from stepgraph.engine.record.pair.record import PairCapture
from stepgraph.engine.record.pair.runner import BackwardGraph, Runner


def differs(
    pair: PairCapture,
    call: EagerCall,
    runner: Runner,
    around: Callable[[bool], AbstractContextManager[None]] = lambda backward: contextlib.nullcontext(),
) -> Difference | None:
    """Record a call again and compare; nothing takes effect.

    `around` is entered around a forward, and around a backward.
    """
    with torch.inference_mode(False), pair.session.workspace.capturing():
        with around(False):
            buffers = CallBuffers({} if call.values else runner.boundary.tensors)
            again = pair.forward(call, runner.lane, buffers)
        try:
            found = first_difference(runner.forward.log, again.forward.log)
            for key, backward in runner.backwards.items():
                if found is None:
                    with around(True), pair.random.moved_to(key[-1]):
                        found = _backward_differs(pair, again, key, backward)
        finally:
            again.free()
    return found


def _backward_differs(
    pair: PairCapture, again: Runner, key: tuple[Any, ...], backward: BackwardGraph
) -> Difference | None:
    """Record a backward again, for gradients of the same results, and compare."""
    autocast = (key[-3], key[-2])
    tensors, device = backward.grads_in.tensors, pair.session.backend.device
    metas = [ArgMetadata(t) if (t := tensors.get(i)) is not None else None for i in range(len(key) - 3)]
    given = dict(tensors)
    if pair.session.backend.runs_while_recording:
        given = {i: meta.empty(device) for i, meta in enumerate(metas) if meta is not None}
    if backward.weights is None:
        return first_difference(backward.log, pair.backward(again, metas, given, autocast).log)
    part = record_input_part(pair, again, metas, given, "the module", autocast)
    weights = record_weight_part(pair, again, part, autocast, knows_origin=True).recorded
    before = backward.weights.recorded
    return first_difference(backward.log, part.backward.log) or first_difference(before.log, weights.log)
