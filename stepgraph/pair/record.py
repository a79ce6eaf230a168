"""`PairCapture` records a module's forward and backward graphs.

Nothing runs while they are recorded, so no values are needed: arguments are buffers of the right geometry, and a
backward can be recorded at any time after its forward, whose autograd graph is kept. Both are transactions: a recording
that fails is dropped, with the module, its parameters and their gradients as before. So a call can be recorded once
more at any time, to see whether it still runs the operations that were recorded (`differs`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.backends import Graph
from stepgraph.buffers.borrowed import BorrowedTensor
from stepgraph.buffers.inputs import ArgMetadata, SharedBuffer, StaticInputs
from stepgraph.buffers.outputs import StaticOutputs, another_leaf, leaf_results
from stepgraph.errors import CaptureError
from stepgraph.grads.param_grads import ParamGrads
from stepgraph.guards.random_names import NamesGuard
from stepgraph.observe.module_attributes import ModuleAttributes
from stepgraph.observe.step_objects import leaves_behind
from stepgraph.oplog import Difference, Log, OpLog, first_difference
from stepgraph.pair.cached_casts import casts_behind, casts_twice, keeps_casts
from stepgraph.pair.call import RecordedCall, SameTensor
from stepgraph.pair.differentiate import (
    AccumulatesByItself,
    Inside,
    accumulate,
    differentiate,
    is_reentrant,
    recording_compiled_backwards,
    saved_memory,
    uses_up_saved,
)
from stepgraph.pair.lanes import PoolLane
from stepgraph.pair.parameter_proxies import ParameterProxies, without_hooks
from stepgraph.pair.proof import PairLogs, note_forward, noting
from stepgraph.pair.runner import BackwardGraph, InFlightSet, Runner
from stepgraph.rng.tracker import Segment, state_of_another_graph, tracker_for
from stepgraph.session.failure import refuse_changed_container
from stepgraph.session.session import Session
from stepgraph.signature import refuse_tensor_classes
from stepgraph.signature.ambient import as_called, autocast_now, under_autocast, without_saved_tensor_hooks
from stepgraph.signature.attributes import changed_attributes, put_on
from stepgraph.signature.memory import version_of
from stepgraph.tree import changed_containers, unflatten


class _CastsTwice(Exception):
    """A weight is cast for each of its uses, where eager casts it once: record with autocast's cache."""


class PairCapture:
    """Records the graphs of one module, or of one of its methods: of what `original` gives at the time."""

    def __init__(
        self,
        original: Callable[[], Callable[..., Any]],
        module: torch.nn.Module,
        session: Session,
        grads: ParamGrads,
        in_flight: InFlightSet,
        generators: Sequence[torch.Generator],
        logs: PairLogs,
        *,
        need_backward: bool,
    ) -> None:
        self._logs = logs
        self._recorded: WeakKeyDictionary[Runner, OpLog] = WeakKeyDictionary()
        """The log of each forward."""
        self._original, self._module, self._session = original, module, session
        self._random = tracker_for(session.backend)
        self._generators = tuple(generators)
        self._need_backward = need_backward
        self.proxies = ParameterProxies(module)
        self._grads, self._in_flight = grads, in_flight
        self._accumulates = False
        self._known: list[torch.Tensor] = []
        self.outside: set[int] = set()
        """Parameters, by id, whose gradients autograd accumulates: something must happen there in Python."""
        self.returned = WeakTensorKeyDictionary()
        """Parameters and other leaves that calls return as such; autograd accumulates their gradients, too."""

    # -- forward

    def forward(
        self,
        call: RecordedCall,
        given: Mapping[int, tuple[Runner, torch.Tensor]],
        shared: Mapping[int, SharedBuffer],
        own: Mapping[int, torch.Tensor],
        lane: PoolLane[Runner],
        then: Callable[[StaticOutputs], None] | None = None,
    ) -> Runner:
        """Record a forward.

        `given` are arguments that are another runner's results, `shared` those of several calls, `own` have a buffer.
        `then` is called with the result, for what else the graph is to do.
        """
        try:
            return self._forward(call, given, shared, own, lane, then, cache=False)
        except _CastsTwice:
            return self._forward(call, given, shared, own, lane, then, cache=True)

    def _forward(
        self,
        call: RecordedCall,
        given: Mapping[int, tuple[Runner, torch.Tensor]],
        shared: Mapping[int, SharedBuffer],
        own: Mapping[int, torch.Tensor],
        lane: PoolLane[Runner],
        then: Callable[[StaticOutputs], None] | None,
        *,
        cache: bool,
    ) -> Runner:
        """Record a forward, with or without autocast's cache."""
        buffers = {**own, **{i: b.tensor for i, b in shared.items()}, **{i: t for i, (_, t) in given.items()}}
        tensors = self._arguments(call, buffers)
        versions = {i: version_of(t) for i, t in tensors.items()}
        leaves = [_filled(i, leaf, tensors) for i, leaf in enumerate(call.leaves)]
        args, kwargs = unflatten(call.structure, leaves)
        names = NamesGuard(self._random)
        log = self._logs.of_call(self._module, leaves, call.ambient, self._session.backend.device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._random.moved_to(call.fork))
            stack.enter_context(self._surroundings(call.training))
            stack.enter_context(as_called(call.ambient, cache=cache))
            stack.enter_context(contextlib.nullcontext() if self._need_backward else torch.no_grad())
            segment = self._random.begin_segment()
            with self._recording(lane) as graph:
                result = self._result(self._logged(log, args, kwargs, leaves), tensors)
                mutated = [i for i, t in tensors.items() if version_of(t) != versions[i]]
                if not cache and keeps_casts(call.ambient) and casts_twice(result.tensors):
                    raise _CastsTwice
                self._refuse(call, graph, tensors, mutated)
                refuse_changed_container(_changed(call, leaves, (args, kwargs), tensors), "the module")
                refuse_tensor_classes(result.tensors, ["result"] * len(result.tensors))
                if then is not None:
                    then(result)
        result.settle([*self._module.parameters(), *self._module.buffers()])
        differentiable = any(result.differentiable)
        self._known = self._reached(result) if differentiable else list(self.proxies.parameters)
        self._known += [t for t in result.objects if t.requires_grad and all(t is not known for known in self._known)]
        runner = Runner(
            graph,
            StaticInputs(tensors, shared, {i: producer.is_live for i, (producer, _) in given.items()}),
            result,
            mutated=mutated,
            flows=[i for i, t in tensors.items() if t.requires_grad] if differentiable else [],
            outside=self._outside(call, result, tensors) if differentiable else [],
            saved=saved_memory(result.tensors),
            anchor=torch.empty(0, device="cpu", requires_grad=differentiable),  # where autograd has least to do for it
            in_flight=self._in_flight,
            lane=lane,
            captured_at=lane.next_number(),
            training=call.training,
            random=self._random,
            segment=segment,
            names=names.if_needed(),
            release_graph=self._session.release,
        )
        runner.capture_backward, self._recorded[runner] = self.backward_now, log
        runner.uses_up_saved = uses_up_saved(result.tensors)
        runner.keeps_casts = keeps_casts(call.ambient) and bool(casts_behind(result.tensors))
        return runner

    def _logged(self, log: OpLog, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        """Call the module, and note its operations."""
        with noting(log):
            made = self._original()(*args, **kwargs)
            note_forward(log, made, leaves)
        return made

    def note_returned(self, made: Any, arguments: Sequence[Any]) -> None:
        """Remember the parameters and other leaves that an eager call on stand-ins has returned as such."""
        originals, given = self.proxies.originals, set(map(id, arguments))
        for index, leaf in leaf_results(made).items():
            if index not in given:
                self.returned[originals.get(index, leaf)] = None

    def _result(self, made: Any, tensors: dict[int, torch.Tensor]) -> StaticOutputs:
        """The results, with the objects themselves where stand-ins or known leaves are returned as such."""
        objects = {id(leaf): leaf for leaf in self.returned} | self.proxies.originals
        given = set(map(id, tensors.values()))
        leaves = leaf_results(made)
        if any(index not in objects and index not in given for index in leaves):
            raise another_leaf()
        for index in leaves.keys() & objects.keys():
            self.returned[objects[index]] = None
        return StaticOutputs(made, tensors, objects)

    def _arguments(self, call: RecordedCall, buffers: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """A buffer for each tensor of a call, by leaf index."""
        found: dict[int, torch.Tensor] = {}
        for index, leaf in enumerate(call.leaves):
            if isinstance(leaf, ArgMetadata) and index in buffers:
                found[index] = buffers[index].detach().requires_grad_(leaf.requires_grad)
            elif isinstance(leaf, ArgMetadata):
                found[index] = leaf.empty(self._session.backend.device)
        for index, tensor in found.items():
            put_on(tensor, call.signature.leaves[index])
        if call.values:
            StaticInputs({i: found[i] for i in call.values}).load(call.values)
        return found

    def _refuse(
        self, call: RecordedCall, graph: Graph, tensors: Mapping[int, torch.Tensor], mutated: Sequence[int]
    ) -> None:
        """Refuse a forward whose replay could not do what eager does."""
        names = call.signature.names()
        for index in mutated:
            if tensors[index].requires_grad or tensors[index].grad_fn is not None:
                raise CaptureError(
                    f"the module changes argument `{names[index]}` in place, and gradients flow through it",
                    rule="inplace-argument",
                    why="the caller's tensor would have to become a part of the module's autograd graph.",
                    fix="use the out-of-place form, and return the new tensor.",
                )
            if index in call.aliased:
                raise CaptureError(
                    f"the module writes to argument `{names[index]}`, which shares memory with another one",
                    rule="shared-input",
                    why="each argument is copied into a buffer of its own, where the write would not be seen.",
                    fix="pass the whole tensor once and take views inside the module, or pass a clone.",
                )
        if graph.random.rewinds_to:
            raise _rewinds_elsewhere()

    def _outside(
        self, call: RecordedCall, result: StaticOutputs, tensors: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """The parameters whose gradients autograd accumulates: chosen ones, returned ones, those of other modules."""
        known = {id(t) for t in (*tensors.values(), *self.proxies.leaves)}
        found = list(leaves_behind([t for t in result.tensors if t.requires_grad]))
        # what a reentrant backward reaches is not known before it runs
        used = self.proxies.parameters if is_reentrant(result.tensors) else self._reached(result)
        chosen = self.outside | {id(p) for p in used if p in self.returned}
        routed = [p for p in self.proxies.parameters if call.in_ddp or id(p) in chosen]
        return [*routed, *{id(leaf): leaf for leaf in found if id(leaf) not in known}.values()]

    def _reached(self, result: StaticOutputs) -> list[torch.Tensor]:
        reached = {id(leaf) for leaf in leaves_behind([t for t in result.tensors if t.requires_grad])}
        pairs = zip(self.proxies.parameters, self.proxies.leaves, strict=True)
        return [parameter for parameter, leaf in pairs if id(leaf) in reached]

    def known_parameters(self) -> list[torch.Tensor]:
        """The parameters that the last forward's graph rests on, frozen ones among them."""
        frozen = [p for p in self._module.parameters() if not p.requires_grad]
        return [*self._known, *frozen]

    def inside(self) -> list[torch.Tensor]:
        """The parameters whose gradients the graphs accumulate by themselves."""
        return [p for p in self.proxies.parameters if id(p) not in self.outside and p not in self.returned]

    # -- backward

    def backward_now(self, runner: Runner, metas: Sequence[ArgMetadata | None]) -> BackwardGraph:
        """Record a backward that is asked for in the middle of one."""
        with self._session.workspace.capturing():
            return self.backward(runner, metas, {}, {}, autocast_now())

    def backward(
        self,
        runner: Runner,
        metas: Sequence[ArgMetadata | None],
        given: Mapping[int, torch.Tensor],
        lent: Mapping[int, BorrowedTensor],
        autocast: tuple[Any, Any],
        then: Callable[[Sequence[torch.Tensor | None]], None] | None = None,
    ) -> BackwardGraph:
        """Record the backward for gradients of this geometry.

        `given` have a buffer; those of them that another graph hands out are `lent`. `then` is called with the
        gradients of the node's inputs, for what else the graph is to do.
        """
        device = self._session.backend.device
        present = {i: meta for i, meta in enumerate(metas) if meta is not None}
        incoming = {i: given[i] if i in given else meta.empty(device) for i, meta in present.items()}
        boundary = StaticInputs(incoming, in_use={i: other.is_held for i, other in lent.items()})
        results = [runner.result.tensors[i] for i in present]
        before = [dict(p.__dict__) for p in self.proxies.leaves]
        segment = self._random.begin_segment(runner.segment)
        self._accumulates = self._accumulates or is_reentrant(results)
        record = functools.partial(self._record_backward, runner, results, incoming, autocast, segment, then)
        try:
            graph, edges, parameters, log = record()
        except AccumulatesByItself:
            self._accumulates = True
            graph, edges, parameters, log = record()
        key = (*(None if meta is None else meta.layout for meta in metas), *autocast, self._random.active)
        return self._keep(runner, key, graph, segment, boundary, edges, parameters, log, self._marks(before))

    def _keep(
        self,
        runner: Runner,
        key: Hashable,
        graph: Graph,
        segment: Segment,
        boundary: StaticInputs,
        edges: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.Tensor],
        log: Log,
        marks: Sequence[tuple[torch.Tensor, dict[str, Any]]] = (),
    ) -> BackwardGraph:
        """Let a runner know a recorded backward."""
        try:
            rewinds = self._rewinds(runner, graph, segment)
        except CaptureError:
            self._session.release(graph)
            raise
        made = BackwardGraph(
            *(graph, boundary, edges, self._grads.part(parameters, id(self._module)), marks),
            captured_at=runner.lane.next_number(),
            rewinds=rewinds,
            log=log,
        )
        runner.add_backward(key, made)
        return made

    def _record_backward(
        self,
        runner: Runner,
        results: Sequence[torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        autocast: tuple[Any, Any],
        segment: Segment,
        then: Callable[[Sequence[torch.Tensor | None]], None] | None,
    ) -> tuple[Graph, list[torch.Tensor | None], list[torch.Tensor], Log]:
        proxies = dict(zip(map(id, self.proxies.parameters), self.proxies.leaves, strict=True))
        foreign = [p for p in runner.outside if id(p) not in proxies]
        if foreign and self._accumulates:
            raise CaptureError(
                "a module with reentrant checkpointing uses a parameter that is not its own",
                rule="reentrant-checkpoint",
                why="such checkpointing accumulates gradients by itself, where no recording may reach.",
                fix="checkpoint(..., use_reentrant=False), or make the parameter one of the module's.",
            )
        edges = [runner.boundary.tensors[i] for i in runner.flows]
        edges += [proxies.get(id(p), p) for p in runner.outside]
        reached = {id(leaf) for leaf in leaves_behind(results)}
        routed = {id(p) for p in runner.outside}
        chosen = [p for p in self.proxies.parameters if id(p) not in routed]
        chosen = [p for p in chosen if self._accumulates or id(proxies[id(p)]) in reached]
        memory = self._grads.part(chosen).memory  # it must not be born in the graph
        inside = [Inside(p, proxies[id(p)], m) for p, m in zip(chosen, memory, strict=True)]
        run = accumulate if self._accumulates else differentiate
        around = (self._surroundings(runner.training), under_autocast(*autocast), without_hooks(foreign))
        log = self._backward_log(runner, incoming, chosen, memory)
        with around[0], around[1], around[2], self._recording(runner.lane, segment) as graph:
            with noting(log):
                found, parameters = run(results, list(incoming.values()), edges, inside)
            if then is not None:
                then(found)
        return graph, found, parameters, log.finish()

    def _backward_log(
        self,
        runner: Runner,
        incoming: Mapping[int, torch.Tensor],
        parameters: Sequence[torch.Tensor],
        memory: Sequence[torch.Tensor],
    ) -> OpLog:
        """A log for a backward that adds to the gradients of these parameters, in this memory."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        added = {names.get(id(p), f"parameter {i}"): m for i, (p, m) in enumerate(zip(parameters, memory, strict=True))}
        return self._logs.of_backward(self._recorded[runner], self._module, incoming, added)

    def _rewinds(self, runner: Runner, graph: Graph, segment: Segment) -> bool:
        """Whether a backward repeats draws of its forward; refused where a replay could not."""
        if graph.random.rewinds_to - {runner.graph}:
            raise _rewinds_elsewhere()
        rewinds = segment.rewinds or bool(graph.random.rewinds_to)
        if rewinds and graph.random.draws:
            raise CaptureError(
                "the module's backward goes back to the forward's random state, and also draws new numbers",
                rule="rng-recompute",
                why="the graph of the backward begins where that of the forward began, so that a recomputation draws "
                "the same numbers; others in the same graph could not go on from where the generator is.",
                fix="graph the checkpointed part and the part whose backward draws as two modules.",
            )
        return rewinds

    def _marks(self, before: Sequence[dict[str, Any]]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Plain attributes that the backward has set on stand-ins, for the parameters they stand for."""
        found = []
        for parameter, leaf, old in zip(self.proxies.parameters, self.proxies.leaves, before, strict=True):
            new = {k: v for k, v in leaf.__dict__.items() if isinstance(v, (bool, int, str)) and old.get(k) is not v}
            if new:
                found.append((parameter, new))
        return found

    # -- auditing

    def log_of(self, runner: Runner) -> Log:
        """What was noted of a runner's forward."""
        return self._recorded[runner].finish()

    def differs(
        self,
        call: RecordedCall,
        runner: Runner,
        around: Callable[[bool], AbstractContextManager[None]] = lambda backward: contextlib.nullcontext(),
    ) -> Difference | None:
        """Record a call again, with the backwards that its runner has, and compare. Nothing takes effect.

        `around` is entered around a forward, and around a backward.
        """
        with torch.inference_mode(False), self._session.workspace.capturing():
            with around(False):
                again = self.forward(call, {}, {}, {} if call.values else runner.boundary.tensors, runner.lane)
            try:
                found = first_difference(self.log_of(runner), self.log_of(again))
                for key, backward in runner.backwards.items():
                    if found is None and isinstance(key, tuple):
                        with around(True), self._random.moved_to(key[-1]):
                            found = self._backward_differs(again, runner, key, backward)
            finally:
                again.free()
        return found

    def _backward_differs(
        self, again: Runner, runner: Runner, key: tuple[Any, ...], backward: BackwardGraph
    ) -> Difference | None:
        metas, given, autocast = self._as_before(again, key, backward)
        return first_difference(backward.log, self.backward(again, metas, given, {}, autocast).log)

    def _as_before(
        self, again: Runner, key: tuple[Any, ...], backward: BackwardGraph
    ) -> tuple[list[ArgMetadata | None], dict[int, torch.Tensor], tuple[Any, Any]]:
        """What a backward was recorded for: gradients of which results, in which memory, and how autocast was."""
        tensors = backward.grads_in.tensors
        metas = [ArgMetadata.of(t) if (t := tensors.get(i)) is not None else None for i in range(len(key) - 3)]
        given = {} if self._session.backend.runs_while_recording else dict(tensors)
        return metas, given, (key[-3], key[-2])

    # -- recording

    @contextlib.contextmanager
    def _surroundings(self, training: Sequence[bool]) -> Iterator[None]:
        """The module as it was at the call, with stand-ins for its parameters."""
        before = ModuleAttributes(list(self._module.modules()))
        for module, flag in zip(with_modes(self._module), training, strict=True):
            module.training = flag  # an evaluation is captured while the model trains, and the other way round
        try:
            with self.proxies.in_place(), without_saved_tensor_hooks(), recording_compiled_backwards():
                yield
        finally:
            before.restore()

    @contextlib.contextmanager
    def _recording(self, lane: PoolLane[Runner], segment: Segment | None = None) -> Iterator[Graph]:
        """Record a graph. `segment`: what it does with the random states of its forward."""
        generators = tuple(dict.fromkeys((*self._generators, *self._random.generators)))
        graph = self._session.workspace.graph(generators, lane.number)
        graph.begin()
        try:
            yield graph
            if segment is not None and (segment.rewinds or graph.random.rewinds_to):
                graph.will_replay_from()
            graph.end()
        except BaseException:
            graph.abort()
            raise
        self._session.adopt(graph)


def with_modes(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that have a training flag of their own; a compiled one shows that of the module in it."""
    return [inner for inner in module.modules() if "training" in vars(inner)]


def _rewinds_elsewhere() -> CaptureError:
    return state_of_another_graph(
        "the module sets the random state",
        "set random states outside the module, or graph the part that reads the state together with it.",
    )


def _changed(
    call: RecordedCall, leaves: Sequence[Any], given: tuple[Any, Any], tensors: Mapping[int, torch.Tensor]
) -> str | None:
    """What the module has changed about the containers and on the tensors that it was given, in words."""
    known = call.signature
    changed = changed_containers(call.structure, leaves, given, known.arguments, removed=True)
    if changed is not None:
        return changed
    names = known.names()
    return changed_attributes((names[index], tensor, known.leaves[index]) for index, tensor in tensors.items())


def _filled(index: int, leaf: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """An argument of the recording."""
    if isinstance(leaf, SameTensor):
        return tensors[leaf.index]
    return tensors.get(index, leaf)
