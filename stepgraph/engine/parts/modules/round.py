"""`RoundCapture` captures the graphs of one round, in the order in which its forwards and backwards came.

If a result is another call's argument, the second graph reads it where the first one writes it, and gradients go back
the same way. A tensor that several calls were given has one buffer. If a call cannot be captured, its module stays
eager, and the other modules are captured.

If the calls of a round share memory by its order (`memory_plan.FixedOrder`), `FixedRound` returns the runner whose turn
it is. Calls in another order are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stepgraph.engine.call.proof import NeedsEagerCall
from stepgraph.engine.memory.borrowed import BorrowedTensor
from stepgraph.engine.memory.inputs import ArgMetadata, SharedBuffer
from stepgraph.engine.order import Kind
from stepgraph.engine.order.cursor import Cursor, Turn
from stepgraph.engine.parts.modules.delayed import leaves_weights, never_asked, record_inputs, record_weights
from stepgraph.engine.parts.modules.memory_plan import FixedOrder, MemoryPlan
from stepgraph.engine.parts.modules.recorder import Event
from stepgraph.engine.parts.modules.site import ModuleCall, ModuleSite
from stepgraph.engine.record.pair.call import CallBuffers
from stepgraph.engine.record.pair.lanes import PoolLane, under_way
from stepgraph.engine.record.pair.ordered import InputPart
from stepgraph.engine.record.pair.runner import Grads, Runner


class RoundCapture:
    """The graphs of one round."""

    def __init__(self, events: Sequence[Event], memory_plan: MemoryPlan, device: torch.device) -> None:
        self._events, self._memory_plan, self._device = events, memory_plan, device
        self.runners: dict[Hashable, Runner] = {}
        self._grads: dict[Hashable, dict[int, tuple[torch.Tensor, BorrowedTensor]]] = {}
        self._shared = _shared_tensors(events)
        self._parts: dict[Hashable, tuple[ModuleCall, InputPart]] = {}
        """Backwards whose weight gradients come later in the round."""
        self._buffers: dict[tuple[int, int], SharedBuffer] = {}
        self._cold: set[ModuleSite] = set()
        """Kinds of calls that run eagerly once more in this round, and are captured at the next."""

    def run(self) -> None:
        """Capture all that is not captured yet."""
        for event in self._events:
            call, key = event.call, self._memory_plan.key(event.call)
            if call.site.kind.obstacle is not None or call.site in self._cold:
                continue
            try:
                self._capture(event, key)
            except NeedsEagerCall:
                self._drop(call)
                self._cold.add(call.site)
            except Exception as error:  # noqa: BLE001 (whatever broke it, the module stays eager)
                self._drop(call)
                call.site.manager.target.failed(call.site.kind, error)
        for call, _ in list(self._parts.values()):
            self._drop(call)
            call.site.manager.target.failed(call.site.kind, never_asked(call.site.manager.name))

    def _capture(self, event: Event, key: Hashable) -> None:
        call = event.call
        if event.kind is Kind.FORWARD:
            if key not in self.runners and self._memory_plan.has_room(call):
                self.runners[key] = self._forward(call)
        elif event.kind is Kind.WEIGHT_GRAD:
            if key in self._parts:
                self._weights(call, key)
        elif key in self.runners and not self.runners[key].backwards:
            self._backward(call, key)

    def _drop(self, call: ModuleCall) -> None:
        for runner in call.site.runners:
            runner.free()
        self.runners = {k: r for k, r in self.runners.items() if r not in call.site.runners}
        self._parts = {k: part for k, part in self._parts.items() if part[0].site is not call.site}
        call.site.runners = []

    def _forward(self, call: ModuleCall) -> Runner:
        site, target, eager = call.site, call.site.manager.target, call.eager
        target.check_capturable(eager.ambient)
        given, shared = self._given(call), self._shared_buffers(call)
        metas = {i: leaf for i, leaf in enumerate(eager.leaves) if isinstance(leaf, ArgMetadata)}
        own = self._memory_plan.buffers(call, {i: m for i, m in metas.items() if i not in given and i not in shared})
        buffers = CallBuffers(own, shared, given)
        site.uses.describe(eager)
        runner = target.pair().forward(eager, self._memory_plan.lane(call), buffers)
        site.add(runner)
        site.kind.proof.compare(target.name, eager.log, runner.forward.log, strict=target.options.strict)
        if len(site.runners) == 1:
            target.guard(site.kind, runner)
        site.recorded = eager
        return runner

    def _given(self, call: ModuleCall) -> dict[int, tuple[Runner, torch.Tensor]]:
        """The arguments that are results of graphs in the same lane."""
        given = {}
        for index, (producer, result) in call.made_by.items():
            runner = self.runners.get(self._memory_plan.key(producer))
            if runner is None or self._memory_plan.lane(producer) is not self._memory_plan.lane(call):
                continue
            if runner.result.is_own(result) and _fits(runner.result.tensors[result], call.eager.leaves[index]):
                given[index] = runner, runner.result.tensors[result].data
        return given

    def _shared_buffers(self, call: ModuleCall) -> dict[int, SharedBuffer]:
        used = {}
        for index, number in call.shared.items():
            meta = call.eager.leaves[index]
            if number in self._shared and not meta.requires_grad:
                key = (self._memory_plan.lane(call).number, number)  # another microbatch may pass another tensor
                if key not in self._buffers:
                    self._buffers[key] = SharedBuffer(meta.empty(self._device))
                used[index] = self._buffers[key]
        return used

    def _backward(self, call: ModuleCall, key: Hashable) -> None:
        runner, metas = self.runners[key], call.eager.metas
        present = {i: meta for i, meta in enumerate(metas) if meta is not None}
        offered = self._grads.get(key, {})
        chained = {i: g for i, g in offered.items() if i in present and _fits(g[0], present[i])}
        given = {i: grad for i, (grad, _) in chained.items()}
        given |= self._memory_plan.buffers(call, {i: m for i, m in present.items() if i not in given})
        lent = {i: lent for i, (_, lent) in chained.items()}
        site, eager, part = call.site, call.eager, None
        if leaves_weights(site, runner, eager):
            part = record_inputs(site, runner, eager, given, lent)
            self._parts[key], recorded = (call, part), part.backward
        else:
            recorded = site.manager.target.pair().backward(runner, metas, given, eager.backward_autocast, lent)
        for index, grad, lent_grad in zip(runner.edges.flows, recorded.grads_out, recorded.lent, strict=False):
            if grad is not None and lent_grad is not None and index in call.made_by and index not in eager.elsewhere:
                producer, result = call.made_by[index]
                if self._memory_plan.lane(producer) is self._memory_plan.lane(call):
                    self._grads.setdefault(self._memory_plan.key(producer), {})[result] = (grad, lent_grad)
        if part is None:
            self._memory_plan.captured(call, runner, recorded)

    def _weights(self, call: ModuleCall, key: Hashable) -> None:
        """Capture the weight gradients that a backward has left."""
        runner, (_, part) = self.runners[key], self._parts.pop(key)
        is_free = not isinstance(self._memory_plan, FixedOrder)
        record_weights(call.site, runner, call.eager, part, may_repeat=is_free)
        self._memory_plan.captured(call, runner, part.backward)


@dataclass(frozen=True, slots=True)
class _BackwardTurn:
    """The turns of one call's backward: a `ReplayOrder`."""

    cursor: Cursor
    number: int

    def fit_grads(self, grads: Grads) -> Grads:
        return grads

    def take_turn(self, grads: Grads) -> None:
        self.cursor.take(self.number)


class FixedRound:
    """The runners of a round, one for each call that was captured, by id of the recorded call."""

    def __init__(
        self, events: Sequence[Event], runners: Mapping[Hashable, Runner], lane: PoolLane, device: torch.device
    ) -> None:
        calls: dict[Runner, int] = {}
        turns: list[Turn] = []
        self._runners: list[Runner] = []
        """The runner of each turn."""
        for event in events:
            runner, site = runners.get(id(event.call)), event.call.site
            if runner is None or not _has_graph(runner, event.kind):
                continue
            name, number = site.manager.name, calls.setdefault(runner, len(calls))
            if event.kind is Kind.FORWARD:
                turns.append(Turn(site, f"forward of `{name}`", len(turns)))
            elif event.kind is Kind.WEIGHT_GRAD:
                key = (Kind.WEIGHT_GRAD, id(runner))
                turns.append(Turn(key, f"weight gradients of `{name}` (call {number})", len(turns)))
            else:
                turns.append(Turn(number, f"backward of `{name}` (call {number})", len(turns)))
            self._runners.append(runner)
        self.kinds = {turn.key for turn in turns}
        """The kinds of calls that have a turn; others are free."""
        fix = (
            "run that order, call handle.reset() if the order changes for good, or leave "
            "cuda_graph_use_single_mempool=False: then any order is allowed."
        )
        self._cursor = Cursor(turns, fix, is_under_way=under_way(lane, device))
        for runner, number in calls.items():
            if runner.backwards:
                runner.order = _BackwardTurn(self._cursor, number)

    def __len__(self) -> int:
        return len(self._runners)

    def take_forward(self, site: ModuleSite) -> Runner:
        """Return the runner whose turn it is; raise if it is another module's turn."""
        return self._runners[self._cursor.take(site)]

    def take_weights(self, runner: Runner) -> None:
        """Raise if it is not the turn of a runner's weight gradients."""
        if runner.order is not None:
            self._cursor.take((Kind.WEIGHT_GRAD, id(runner)))

    def end(self) -> None:
        """End the order after the graphs were dropped; backwards of calls in flight still run."""
        for runner in self._runners:
            runner.order = None


def _has_graph(runner: Runner, kind: Kind) -> bool:
    """True if a runner has a graph for such an event."""
    if kind is Kind.WEIGHT_GRAD:
        return any(backward.weights is not None for backward in runner.backwards.values())
    return kind is Kind.FORWARD or bool(runner.backwards)


def _fits(tensor: torch.Tensor, meta: ArgMetadata) -> bool:
    return tensor.shape == meta.shape and tensor.stride() == meta.stride and tensor.dtype == meta.dtype


def _shared_tensors(events: Iterable[Event]) -> set[int]:
    """The tensors that calls of several sites were given, by number."""
    sites: dict[int, set[int]] = {}
    for event in events:
        for number in event.call.shared.values():
            sites.setdefault(number, set()).add(id(event.call.site))
    return {number for number, users in sites.items() if len(users) > 1}
