"""An `OrderedPair` records the graphs of a callable whose weight gradients may be split off from its backward.

The I part is the backward that autograd comes to: it hands out the gradients of the inputs and leaves the weights
alone. The W part is a graph of its own that the caller replays by `backward_dw()`. It adds to the gradients' memory as
a whole backward does; parameters whose gradients must pass through autograd are given theirs there, then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from stepgraph.backends import Graph
from stepgraph.buffers.borrowed import BorrowedTensor, lend_by_address, lend_out
from stepgraph.buffers.inputs import ArgMetadata, StaticInputs
from stepgraph.errors import CaptureError
from stepgraph.grads.param_grads import GradPart
from stepgraph.oplog import Difference, Log, OpLog, first_difference
from stepgraph.pair.differentiate import copy_if_aliased, is_reentrant
from stepgraph.pair.parameter_proxies import without_hooks
from stepgraph.pair.proof import noting
from stepgraph.pair.record import PairCapture
from stepgraph.pair.runner import BackwardGraph, Runner
from stepgraph.pair.split_backward import WeightPart, input_gradients
from stepgraph.signature.ambient import under_autocast

NO_AUTOCAST = (False, False)
"""A backward runs without autocast, whatever is around the call that captures it."""


class WeightGraph:
    """A recorded W part."""

    def __init__(
        self,
        graph: Graph,
        accumulated: GradPart,
        through_autograd: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        rewinds: bool,
    ) -> None:
        self.graph, self.accumulated = graph, accumulated
        self.rewinds = rewinds
        """Whether it recomputes a part of the forward with the forward's random numbers."""
        self._parameters = [parameter for parameter, _ in through_autograd]
        self._grads = [grad for _, grad in through_autograd]
        self._lent: list[BorrowedTensor] = lend_out(self._grads)

    def give_up(self) -> None:
        """Let graphs that are captured later have the memory of its gradients."""
        self._lent, self._grads = lend_by_address(self._grads), []

    def run(self, origin: Any = None) -> bool:
        """Replay it; False if the memory of a gradient is no longer the one it was recorded for.

        `origin` is where the random generators were before the forward, if it goes back there.
        """
        if self.graph.follow is not None:
            self.graph.follow()
        if not self.accumulated.attach():
            return False
        if self.rewinds:
            self.graph.replay_from(origin)
        else:
            self.graph.replay()
        self.accumulated.finish(last=True)
        if self._parameters:
            torch.autograd.backward(self._parameters, [lent.copy() for lent in self._lent])
        return True


class OrderedPair(PairCapture):
    """Records the graphs of one callable."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: dict[int, tuple[torch.Tensor, ...]] = {}
        """Parameters, by id of the runner, that autograd gives the gradients of the W part to."""
        self._input_logs: WeakKeyDictionary[Runner, OpLog] = WeakKeyDictionary()
        """The logs of I parts whose W part is still to come."""
        self._weight_logs: WeakKeyDictionary[Runner, tuple[Log, bool]] = WeakKeyDictionary()
        """Of each runner with a W part: its log, and whether it is replayed by one who knows the random origin."""

    def input_part(
        self,
        runner: Runner,
        metas: Sequence[ArgMetadata | None],
        given: Mapping[int, torch.Tensor],
        name: str,
        autocast: tuple[Any, Any] = NO_AUTOCAST,
        then: Callable[[Sequence[torch.Tensor | None]], None] | None = None,
    ) -> WeightPart:
        """Record the I part as the runner's backward; what the W part needs is kept until that is recorded.

        `then` is called with the gradients of the inputs, for what else the graph is to do.
        """
        results = [runner.result.tensors[i] for i in given]
        self._refuse_split(runner, results, name)
        segment = self._random.begin_segment(runner.segment)
        inputs = [runner.boundary.tensors[i] for i in runner.flows]
        own = {t.untyped_storage()._cdata for t in given.values()}
        log = self._backward_log(runner, given, (), ())
        with self._around(runner, autocast), self._recording(runner.lane, segment) as graph:
            with noting(log):
                found, weights = input_gradients(results, list(given.values()), inputs, self._weights(runner))
            with torch.no_grad():
                out = [copy_if_aliased(grad, own) for grad in found]
            if then is not None:
                then(out)
        key = (*(None if meta is None else meta.layout for meta in metas), *autocast, self._random.active)
        self._keep(runner, key, graph, segment, StaticInputs(given), out, [], log.finish())
        self._input_logs[runner] = log
        self._late[id(runner)], runner.outside = runner.outside, ()  # not even None comes to them in this part
        return weights

    def weight_part(
        self,
        runner: Runner,
        weights: WeightPart,
        autocast: tuple[Any, Any] = NO_AUTOCAST,
        *,
        knows_origin: bool = False,
        keeps_saved: bool = False,
    ) -> WeightGraph:
        """Record the W part.

        `knows_origin`: whoever replays it knows where the forward's random numbers began. `keeps_saved`: what autograd
        has saved goes with the runner's results, not now.
        """
        late = self._late.pop(id(runner))
        segment = self._random.begin_segment(runner.segment)
        routed = {id(p) for p in late}
        chosen = [p for p in self.proxies.parameters if id(p) not in routed]
        memory = self._grads.part(chosen).memory  # it must not be born in the graph
        log = self._input_logs.pop(runner).followed_by()
        with self._around(runner, autocast, late), self._recording(runner.lane, segment) as graph:
            with noting(log):
                grads = weights.gradients(retain_graph=keeps_saved)
            pairs = [(to, grad) for to, grad in zip(memory, grads[: len(chosen)], strict=True) if grad is not None]
            if pairs:
                with torch.no_grad():
                    torch._foreach_add_([to for to, _ in pairs], [grad for _, grad in pairs])
        rewinds = segment.rewinds or bool(graph.random.rewinds_to)
        refused = graph.random.draws or bool(graph.random.rewinds_to - {runner.graph})
        if refused or (rewinds and not knows_origin):
            self._session.release(graph)
            raise CaptureError(
                "the weight gradients, which are split off, are computed with random numbers",
                rule="rng-recompute",
                why="the random state of the forward is not known where they are replayed.",
                fix="leave checkpointing with dropout out of the callable, or split no weight gradient off (no -c.5).",
            )
        runner.last_at = max(runner.last_at, runner.lane.next_number())
        reached = [p for p, grad in zip(chosen, grads, strict=False) if grad is not None]
        outside = zip(late, grads[len(chosen) :], strict=True)
        through = [(parameter, grad) for parameter, grad in outside if grad is not None]
        self._weight_logs[runner] = (log.finish(), knows_origin)
        return WeightGraph(graph, self._grads.part(reached, id(self._module)), through, rewinds=rewinds)

    def _backward_differs(
        self, again: Runner, runner: Runner, key: tuple[Any, ...], backward: BackwardGraph
    ) -> Difference | None:
        """The same for a backward that is split: both parts are recorded again, and compared."""
        if runner not in self._weight_logs:
            return super()._backward_differs(again, runner, key, backward)
        metas, given, autocast = self._as_before(again, key, backward)
        given = given or {i: meta.empty(self._session.backend.device) for i, meta in enumerate(metas) if meta}
        part = self.input_part(again, metas, given, "the module", autocast)
        log, knows_origin = self._weight_logs[runner]
        weights = self.weight_part(again, part, autocast, knows_origin=knows_origin)
        self._session.release(weights.graph)
        found = first_difference(backward.log, next(iter(again.backwards.values())).log)
        return found or first_difference(log, self._weight_logs[again][0])

    def _weights(self, runner: Runner) -> list[torch.Tensor]:
        """The leaves that the W part computes gradients for: those inside, then those outside."""
        leaves = dict(zip(map(id, self.proxies.parameters), self.proxies.leaves, strict=True))
        routed = {id(p) for p in runner.outside}
        inside = [leaf for p, leaf in zip(self.proxies.parameters, leaves.values(), strict=True) if id(p) not in routed]
        return [*inside, *(leaves.get(id(p), p) for p in runner.outside)]

    @contextlib.contextmanager
    def _around(
        self, runner: Runner, autocast: tuple[Any, Any], outside: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        own = set(map(id, self.proxies.parameters))
        foreign = [p for p in outside or runner.outside if id(p) not in own]
        with self._surroundings(runner.training), under_autocast(*autocast), without_hooks(foreign):
            yield

    def _refuse_split(self, runner: Runner, results: Sequence[torch.Tensor], name: str) -> None:
        if is_reentrant(results):
            raise CaptureError(
                f"{name}: the backward of a callable with reentrant checkpointing is split in two",
                rule="reentrant-checkpoint",
                why="such checkpointing accumulates gradients by itself; they cannot be asked for.",
                fix="checkpoint(..., use_reentrant=False).",
            )
