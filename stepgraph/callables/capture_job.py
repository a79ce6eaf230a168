"""A `CaptureJob` turns a request into graphs: it makes samples, warms up and captures. A failure leaves no traces."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from stepgraph.backends import Backend, backend_for, backend_named
from stepgraph.callables.call_shape import CallShape
from stepgraph.callables.graphed import GraphedCallable, GraphedSet, SetAudits, refuse_another_backward
from stepgraph.callables.request import Request
from stepgraph.callables.sample_graphs import GraphCapture, SampleGraphs
from stepgraph.callables.target import CaptureTarget
from stepgraph.callables.warm_up import CaptureTimeHooks, warm_up
from stepgraph.errors import CaptureError, InvalidArgument
from stepgraph.frames import warn_user
from stepgraph.observe.finder import devices
from stepgraph.oplog import first_difference
from stepgraph.order import Kind, samples_of
from stepgraph.order.cursor import Cursor, Turn
from stepgraph.pair.cached_casts import shared_cast
from stepgraph.pair.call import NotedArguments, RecordedCall
from stepgraph.pair.lanes import PoolLane
from stepgraph.pair.proof import EagerProof
from stepgraph.pair.runner import Runner
from stepgraph.pair.shared import PairSession
from stepgraph.rng.tracker import tracker_for
from stepgraph.session.proof import NotWarm
from stepgraph.session.session import Session
from stepgraph.signature import ambient_key
from stepgraph.tree import flatten


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
        chosen = backend_named(backend) if isinstance(backend, str) else backend
        session.settle(chosen if chosen is not None else backend_for(_device_of(request)))
        self._shared = PairSession(session)
        trains = request.trains
        self._targets = [
            CaptureTarget(each, index, self._shared, need_backward=trains)
            for index, each in enumerate(request.callables)
        ]
        with_order = request.order is not None
        for target in self._targets:
            _refuse_graphed(target)
            _refuse_ddp(target)
            target.route(self._targets)
            target.refuse_hooks(own=with_order)
        self.samples = [self._sample(index) for index in range(len(request.samples))]
        # with its own session the capture uses the memory that warm-up leaves, which is in lane 0
        self._lane = PoolLane(0) if owns_session else self._shared.lanes.exclusive()
        self._capture: GraphCapture | None = None
        self._kinds: dict[Hashable, tuple[list[SampleGraphs], EagerProof]] = {}
        """The samples of each kind of call, and the logs of its eager calls."""
        for each in self.samples:
            key = (each.index, each.shape.call.structure, each.shape.call.leaves)
            self._kinds.setdefault(key, ([], EagerProof()))[0].append(each)

    def _sample(self, index: int) -> SampleGraphs:
        sample = self._request.samples[index]
        target = self._targets[sample.callable_index]
        leaves, structure = flatten((sample.args, sample.kwargs))
        self._refuse_elsewhere(target, leaves)
        needs_backward = self._request.order is not None and self._request.trains
        shape = CallShape(target.name, leaves, structure, target.arguments, needs_backward=needs_backward)
        backend = self._shared.session.backend
        noted = NotedArguments.of(leaves)
        call = RecordedCall(  # not a real call: it has the flags that are set now
            shape.call,
            structure,
            leaves=noted.leaves,
            ambient=ambient_key(),
            training=target.training,
            in_ddp=False,
            fork=tracker_for(backend).active,
            aliased=noted.aliased,
            values=dict(noted.tensors) if backend.runs_while_recording else {},
        )
        return SampleGraphs(index, sample.callable_index, target, shape, call)

    def _refuse_elsewhere(self, target: CaptureTarget, leaves: Sequence[Any]) -> None:
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
        for samples, proof in self._kinds.values():
            given = self._request.samples[samples[0].number]
            leaves, structure = flatten((given.args, given.kwargs))
            calls.append((samples[0].target, samples[0].index, leaves, structure, proof))
        session = self._shared.session

        def run() -> None:
            with session.workspace.warming_up():
                warm_up(
                    calls,
                    session.backend,
                    self._hooks,
                    iterations=iterations,
                    trains=self._request.trains,
                )

        self._shared.warming(run)

    def capture(self, *, reuse: bool, retain: bool, allow_unused: bool) -> None:
        session, with_order = self._shared.session, self._request.order is not None
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
        for target in self._targets:
            own = [sample for sample in self.samples if sample.target is target]
            names = own[0].runner.forward.names if own else ()
            target.guard(names, own_hooks=with_order)
        for sample in self.samples:
            self._settle(sample, may_add=not (with_order and (shares or sample.has_split_weights)))

    def _prove(self) -> None:
        """Compare the recordings with the last eager calls; if one differs, warm up once more and compare again."""
        pending = list(self._kinds.values())
        while pending:
            cold = []
            for samples, proof in pending:
                eager = proof.latest
                logs = [sample.log for sample in samples]
                other = [log for log in logs if eager is not None and first_difference(eager, log) is not None]
                try:
                    proof.compare(samples[0].target.name, eager, (other or logs)[0], whose="callable")
                except NotWarm:
                    cold.append((samples, proof))
            pending = cold
            if cold:
                self.warm_up(1)

    def _settle(self, sample: SampleGraphs, *, may_add: bool) -> None:
        """Say where no backward can be added to those that are captured; others are recorded when they come."""
        runners = [each.runner for each in self.samples]  # not `self`, which would keep the samples alive
        sample.runner.tell_several = functools.partial(_warn_of_several, runners, sample.target.name)
        if sample.runner.backwards and not may_add:
            sample.runner.backwards.record = functools.partial(refuse_another_backward, sample.target.name)

    def graphed(
        self, begun: float, *, clone_param_grads: bool, retain: bool, audit: str | int
    ) -> list[GraphedCallable[..., Any]]:
        """Make the callables for the caller."""
        assert self._capture is not None
        buffers = self._capture.buffers.values()
        owner = GraphedSet(
            self._shared,
            self.samples,
            self._cursor(retain=retain),
            static_bytes=sum(t.untyped_storage().nbytes() for b in buffers for t in b) + self._capture.pool.num_bytes,
            num_buffers=len(buffers),
            capture_seconds=time.perf_counter() - begun,
            proofs=[proof for _, proof in self._kinds.values()],
            audits=SetAudits(self.samples, self._hooks, audit),
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
        lane = self._lane  # not `self`, which would keep the samples alive
        return Cursor(turns, fix, request.order, lambda: lane.is_busy)

    def give_up(self) -> None:
        """Free everything after a failure."""
        for sample in self.samples:
            sample.free()
        for target in self._targets:
            self._shared.grads.forget(target.pair.proxies.parameters)
        if self._owns_session:
            self._shared.close()
            self._shared.session.close()


@contextlib.contextmanager
def _gradients_aside(targets: Sequence[CaptureTarget]) -> Iterator[None]:
    """Let graphs that cannot be captured again add to their own memory, not to gradients that may be dropped."""
    kept = [(p, p.grad) for target in targets for p in target.parameters if p.grad is not None]
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
        runner.tell_several = None
    warn_user(str(shared_cast(f"{name}, called several times in one backward,")))


def _refuse_graphed(target: CaptureTarget) -> None:
    if target.is_module and isinstance(vars(target.module).get(target.method), GraphedCallable):
        raise InvalidArgument(
            f"{target.name} has graphs already",
            rule="sample-arguments",
            why="an earlier make_graphed_callables replaced its forward.",
            fix="call .reset() on it first.",
        )


def _refuse_ddp(target: CaptureTarget) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in target.module.modules()):
        raise CaptureError(
            f"{target.name} is or contains a DistributedDataParallel",
            rule="ddp-callable",
            fix="use stepgraph.graph_modules, which passes gradients to DDP, or graph the layers without DDP and "
            "reduce the gradients after the backward.",
        )


def _device_of(request: Request) -> torch.device:
    """Return the device of the samples; without tensors among them, the device of the parameters."""
    for sample in request.samples:
        for leaf in flatten((sample.args, sample.kwargs))[0]:
            if isinstance(leaf, torch.Tensor):
                return leaf.device
    return next(devices(iter(request.callables)), torch.device("cpu"))
