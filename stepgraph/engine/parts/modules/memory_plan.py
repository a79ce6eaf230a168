"""A memory plan places the graphs of a round in memory: one plan serves any order, the other a fixed order.

For any order (`AnyOrder`), each kind of call has a runner for each of its calls in flight at a time, in the lane of
that number, and every runner keeps the tensors at its edges.

For a fixed order (`FixedOrder`), each call of the round has its own runner, and all are in one lane. When its backward
is captured, the activations of a call are released for graphs that are captured later, and the tensors at its edges go
back to a `TensorReusePool`. The memory needed is that of the calls in flight at a time, as in eager. The price is one
set of graphs for each call, and a check before each replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

import torch

from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.memory.reuse_pool import TensorReusePool
from stepgraph.engine.parts.modules.site import ModuleCall
from stepgraph.engine.record.pair.lanes import PoolLane, PoolLanes
from stepgraph.engine.record.pair.runner import BackwardGraph, Runner


class AnyOrder:
    """A lane for each call in flight at a time; every runner keeps its own memory."""

    def __init__(self, lanes: PoolLanes) -> None:
        self._lanes = lanes

    def key(self, call: ModuleCall) -> Hashable:
        """Calls of one key have one runner."""
        return (id(call.site), call.slot)

    def lane(self, call: ModuleCall) -> PoolLane:
        """The lane of a call's graphs."""
        return self._lanes.at(call.slot)

    def has_room(self, call: ModuleCall) -> bool:
        """True if its kind may have another runner."""
        return len(call.site.runners) < call.site.manager.options.max_runners

    def buffers(self, call: ModuleCall, metas: Mapping[int, ArgMetadata]) -> dict[int, torch.Tensor]:
        """Buffers for arguments or for gradients of results, by index; missing ones are made for this call."""
        return {}

    def captured(self, call: ModuleCall, runner: Runner, backward: BackwardGraph) -> None:
        """Note that the backward of a call is captured."""


class FixedOrder:
    """One lane, a runner for each call, and memory that is passed from one call to the next."""

    def __init__(self, lane: PoolLane, device: torch.device) -> None:
        self._lane, self._pool = lane, TensorReusePool(device)
        self._needed: dict[int, list[torch.Tensor]] = defaultdict(list)

    def key(self, call: ModuleCall) -> Hashable:
        return id(call)

    def lane(self, call: ModuleCall) -> PoolLane:
        return self._lane

    def has_room(self, call: ModuleCall) -> bool:
        return True

    def buffers(self, call: ModuleCall, metas: Mapping[int, ArgMetadata]) -> dict[int, torch.Tensor]:
        taken = {index: self._pool.get(meta) for index, meta in metas.items()}
        self._needed[id(call)].extend(taken.values())
        return taken

    def captured(self, call: ModuleCall, runner: Runner, backward: BackwardGraph) -> None:
        runner.forget_activations()
        # what the graphs hand out may be one of these tensors, and is then needed for longer than the call
        handed_out = [*runner.result.tensors, *(g for g in backward.grads_out if g is not None)]
        kept = {t.untyped_storage()._cdata for t in handed_out}
        for tensor in self._needed.pop(id(call), []):
            if tensor.untyped_storage()._cdata not in kept:
                self._pool.insert(tensor)


MemoryPlan = AnyOrder | FixedOrder
"""The choice of runners, lanes and buffers for the calls of a round."""
