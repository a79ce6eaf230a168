"""Makes eager calls of a module that will be graphed, and notes arguments, operations and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.storage import special_kind
from stepgraph.core.tree import Structure
from stepgraph.engine.guards.signature import ambient_key
from stepgraph.engine.memory.inputs import copied
from stepgraph.engine.memory.outputs import StaticOutputs, leaf_results
from stepgraph.engine.observe.ddp import in_ddp
from stepgraph.engine.observe.eager_call import CallObserver
from stepgraph.engine.record.pair.call import EagerCall, NotedArguments
from stepgraph.engine.record.pair.eager_proof import attributes_of, note_forward, noting
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.target import PairTarget


@dataclass(frozen=True, slots=True)
class EagerResult:
    """The result of a call."""

    value: Any
    outputs: StaticOutputs
    returned: list[torch.Tensor]
    """Parameters, or other leaves, that it returned themselves."""


def note_call(target: PairTarget, kind: CallKind, arguments: NotedArguments, structure: Structure) -> EagerCall:
    """Describe a call that is about to be made."""
    needs_values = target.shared.session.backend.runs_while_recording
    return EagerCall(
        kind.signature,
        structure,
        leaves=arguments.leaves,
        ambient=ambient_key(),
        training=kind.signature.training,
        in_ddp=in_ddp(),
        fork=target.fork,
        aliased=arguments.aliased,
        values={i: copied(t) for i, t in arguments.tensors.items() if needs_values and not special_kind(t)},
    )


def run_call(
    target: PairTarget,
    kind: CallKind,
    call: EagerCall,
    leaves: Sequence[Any],
    tensors: dict[int, torch.Tensor],
    run: Callable[[], Any],
) -> EagerResult:
    """Make the call with `run`. Note its operations, its results, and effects that no replay can repeat."""
    shared, device = target.shared, target.shared.session.backend.device
    watched = CallObserver.of_module(target.original, target.named_modules(), target.options.ignore, device, kind.ran)
    log = shared.logs.of_call(target.module, leaves, call.ambient, device)
    with noting(log), watched.watching():
        before = attributes_of(target.module)
        value = shared.warming(kind.ran.noted(run))
        note_forward(log, target.module, before, value, leaves)
    call.log = log.finish()
    kind.proof.add(call.log)
    given = set(map(id, tensors.values()))
    returned = {i: t for i, t in leaf_results(value).items() if i not in given}
    outputs = StaticOutputs(value, tensors, {**target.state_by_id(), **returned})
    call.num_results, call.is_differentiable = len(outputs.tensors), any(outputs.differentiable)
    varies = kind.compare_result(target.name, outputs)
    kind.seen = watched.finding(target.name) or varies
    return EagerResult(value, outputs, list(returned.values()))
