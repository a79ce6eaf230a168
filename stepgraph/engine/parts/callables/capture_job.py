"""A `CaptureJob` turns a request into graphs: it makes samples, warms up and captures. A failure leaves no traces."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError, InvalidArgument
from stepgraph.core.frames import warn_user
from stepgraph.core.storage import refuse_lazy
from stepgraph.core.tree import flatten
from stepgraph.engine.backends import Backend
from stepgraph.engine.call.backend_choice import choose_backend
from stepgraph.engine.call.proof import NeedsEagerCall
from stepgraph.engine.call.session import Session
from stepgraph.engine.guards.hooks import is_hooked
from stepgraph.engine.guards.signature import ambient_key
from stepgraph.engine.observe.ddp import reduced_parameters
from stepgraph.engine.oplog import first_difference
from stepgraph.engine.order import Kind, samples_of
from stepgraph.engine.order.cursor import Cursor, Turn
from stepgraph.engine.parts.callables.call_shape import CallShape
from stepgraph.engine.parts.callables.graphed import GraphedCallable, GraphedSet, refuse_another_backward
from stepgraph.engine.parts.callables.request import Request
from stepgraph.engine.parts.callables.sample_graphs import GraphCapture, SampleGraphs
from stepgraph.engine.parts.callables.target import refuse_ddp, target_of
from stepgraph.engine.parts.callables.warm_up import CaptureTimeHooks, WarmUpCall, warm_up
from stepgraph.engine.record.pair.cached_casts import shared_cast
from stepgraph.engine.record.pair.call import NotedArguments
from stepgraph.engine.record.pair.eager import note_call
from stepgraph.engine.record.pair.eager_proof import AuditTurns
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.lanes import PoolLane, under_way
from stepgraph.engine.record.pair.runner import Runner
from stepgraph.engine.record.pair.shared import PairSession
from stepgraph.engine.record.pair.target import PairTarget


class CaptureJob:
    """One capture, from the request to the graphs. It is a transaction."""

    def __init__(
        self,
        request: Request,
        session: Session,
        hooks: CaptureTimeHooks,
        backend: Backend | str | None,
        *,
        owns_session: bool,
    ) -> None:
        self._request, self._hooks, self._owns_session = request, hooks, owns_session
        arguments = flatten([(sample.args, sample.kwargs) for sample in request.samples])[0]
        session.settle(choose_backend(request.callables, arguments, backend, session))
        self._shared = PairSession(session)
        self._targets: list[PairTarget] = []
        # not `self`, which would keep the samples alive
        outside = functools.partial(_through_autograd, self._targets, reduced_parameters())
        for index, each in enumerate(request.callables):
            target = target_of(
                *(each, index, self._shared, outside),
                with_order=request.order is not None,
                need_backward=request.trains,
            )
            self._targets.append(target)
            if isinstance(each, torch.nn.Module):
                _refuse_graphed(target)
            refuse_lazy(
                [*target.module.named_parameters(), *target.module.named_buffers()],
                target.name,
            )
            refuse_ddp(each, target, with_order=request.order is not None)
            target.check_capturable(ambient_key())
        self._kinds: dict[Hashable, CallKind] = {}
        """The kinds of calls that differ in their callable or arguments."""
        self.samples = [self._sample(index) for index in range(len(request.samples))]
        # with its own session the capture uses the memory that warm-up leaves, which is in lane 0
        self._lane = PoolLane(0) if owns_session else self._shared.lanes.exclusive()
        self._capture: GraphCapture | None = None

    def _sample(self, index: int) -> SampleGraphs:
        sample = self._request.samples[index]
        target = self._targets[sample.callable_index]
        leaves, structure = flatten((sample.args, sample.kwargs))
        self._refuse_elsewhere(target, leaves)
        needs_backward = self._request.order is not None and self._request.trains
        described = (target.name, leaves, structure, target.arguments, target.modes())
        shape = CallShape(*described, needs_backward=needs_backward)
        key = (sample.callable_index, structure, shape.call.leaves)
        kind = self._kinds.setdefault(key, CallKind(shape.call, leaves))
        call = note_call(target, kind, NotedArguments.of(leaves), structure)
        return SampleGraphs(index, sample.callable_index, target, shape, kind, call)

    def _of_kind(self, kind: CallKind) -> list[SampleGraphs]:
        return [sample for sample in self.samples if sample.kind is kind]

    def _refuse_elsewhere(self, target: PairTarget, leaves: Sequence[Any]) -> None:
        backend = self._shared.session.backend
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not backend.owns(leaf):
                raise InvalidArgument(
                    f"{target.name}: a sample is on {leaf.device}, the graphs on {backend.device}",
                    rule="sample-arguments",
                    why="all of a graph is on one device.",
                    fix=f"pass samples on {backend.device}.",
                )

    def warm_up(self, iterations: int) -> None:
        """Call each callable `iterations` times for each kind of its samples."""
        calls = []
        for kind in self._kinds.values():
            sample = self._of_kind(kind)[0]
            given = self._request.samples[sample.number]
            leaves = flatten((given.args, given.kwargs))[0]
            calls.append(WarmUpCall(sample.target, kind, sample.call, sample.index, leaves))
        session = self._shared.session

        def run() -> None:
            with session.workspace.warming_up():
                trains = self._request.trains
                warm_up(calls, session.backend, self._hooks, iterations=iterations, trains=trains)

        self._shared.warming(run)

    def capture(self, *, reuse: bool, retain: bool, allow_unused: bool) -> None:
        session, with_order = self._shared.session, self._request.order is not None
        _refuse_rebuilt(self._targets)
        shares = reuse and not retain
        self._capture = GraphCapture(self._request, self.samples, self._lane, session.backend.device, self._hooks)
        self._capture.allow_unused = allow_unused
        with session.workspace.capturing():
            if with_order:
                with _gradients_aside(self._targets):
                    self._capture.run_in_order(reuse=shares)
            else:
                self._capture.run()
        session.backend.synchronize()
        self._prove()
        for kind in self._kinds.values():
            first = self._of_kind(kind)[0]
            first.target.guard(kind, first.runner)
        for sample in self.samples:
            self._settle(sample, may_add=not (with_order and (shares or sample.has_split_weights)))

    def _prove(self) -> None:
        """Compare the recordings with the last eager calls; if one differs, warm up once more and compare again."""
        pending = list(self._kinds.values())
        while pending:
            cold = []
            for kind in pending:
                eager, samples = kind.proof.latest, self._of_kind(kind)
                logs = [sample.log for sample in samples]
                other = [log for log in logs if eager is not None and first_difference(eager, log) is not None]
                try:
                    kind.proof.compare(samples[0].target.name, eager, (other or logs)[0], whose="callable")
                except NeedsEagerCall:
                    cold.append(kind)
            pending = cold
            if cold:
                self.warm_up(1)

    def _settle(self, sample: SampleGraphs, *, may_add: bool) -> None:
        """Say where no backward can be added to those that are captured; others are recorded when they come."""
        runners = [each.runner for each in self.samples]  # not `self`, which would keep the samples alive
        sample.runner.on_shared_backward = functools.partial(_warn_of_several, runners, sample.target.name)
        if sample.runner.backwards and not may_add:
            sample.runner.backwards.record = functools.partial(refuse_another_backward, sample.target.name)

    def graphed(
        self, begun: float, *, clone_param_grads: bool, retain: bool, audit: str | int
    ) -> list[GraphedCallable[..., Any]]:
        """Make the callables for the caller."""
        assert self._capture is not None
        self._shared.capture_seconds, self._shared.turns = time.perf_counter() - begun, AuditTurns(audit)
        owner = GraphedSet(
            self._shared,
            self.samples,
            self._cursor(retain=retain),
            static_bytes=self._capture.memory.num_bytes,
            num_buffers=self._capture.memory.num_buffers,
            hooks=self._hooks,
            owns_session=self._owns_session,
        )
        if not clone_param_grads:
            owner.lend_gradients()
        return [GraphedCallable(owner, sample) for sample in self.samples]

    def _cursor(self, *, retain: bool) -> Cursor | None:
        """Make the check of replays against the order: layer by layer in a chunk, in reverse for a backward."""
        request = self._request
        if request.order is None:
            return None
        turns = []
        for index, entry in enumerate(request.entries):
            numbers = list(samples_of(entry, request.num_layers_per_chunk, request.num_microbatches))
            layers = list(enumerate(numbers))
            for layer, number in layers if entry.kind is Kind.FORWARD else reversed(layers):
                sample, key = self.samples[number], (entry.kind, number)
                name = f"{entry}, layer {layer} (sample {number}: {sample.target.name})"
                if entry.kind not in (Kind.BACKWARD, Kind.INPUT_GRAD):
                    turns.append(Turn(key, name, index, any_order=entry.kind is Kind.WEIGHT_GRAD))
                elif sample.runner.backwards:  # otherwise autograd does not call it
                    turns.append(Turn(key, name, index, repeats=retain))
        fix = "call the graphed callables in that order, or capture them with the order that you run."
        return Cursor(turns, fix, request.order, under_way(self._lane, self._shared.session.backend.device))

    def give_up(self) -> None:
        """Free everything after a failure."""
        for sample in self.samples:
            sample.free()
        for target in self._targets:
            target.drop_pair()
        if self._owns_session:
            self._shared.close()
            self._shared.session.close()


def _through_autograd(targets: Sequence[PairTarget], reduced: frozenset[int], module: torch.nn.Module) -> set[int]:
    """Return the parameters whose gradients pass through autograd: hooked, DDP's, and those of several callables."""
    others = [target.module for target in targets if target.module is not module]
    foreign = {id(p) for other in others for p in other.parameters()}
    return {id(p) for p in module.parameters() if is_hooked(p) or id(p) in foreign or id(p) in reduced}


@contextlib.contextmanager
def _gradients_aside(targets: Sequence[PairTarget]) -> Iterator[None]:
    """Let graphs that cannot be captured again add to their own memory, not to gradients that may be dropped."""
    kept = [(p, p.grad) for target in targets for p in target.module.parameters() if p.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def _warn_of_several(runners: Sequence[Runner], name: str) -> None:
    """Warn once that one backward covers several calls of a callable, under autocast with its cache."""
    for runner in runners:
        runner.on_shared_backward = None
    warn_user(str(shared_cast(f"{name}, called several times in one backward,")))


def _refuse_rebuilt(targets: Sequence[PairTarget]) -> None:
    """Refuse callables whose modules have changed in the warm-up, which noted the calls of others."""
    for target in targets:
        if (rebuilt := target.rebuilt()) is not None:
            raise CaptureError(
                f"{target.name}: {rebuilt} while it warmed up",
                rule="own-change",
                why="graphs are captured with the modules that the callable had before: their parameters and modes.",
                fix="make all modules before make_graphed_callables; call the callable once if it makes them itself.",
            )


def _refuse_graphed(target: PairTarget) -> None:
    if isinstance(vars(target.module).get(target.method), GraphedCallable):
        raise InvalidArgument(
            f"{target.name} has graphs already",
            rule="sample-arguments",
            why="an earlier make_graphed_callables replaced its forward.",
            fix="call .reset() on it first.",
        )
