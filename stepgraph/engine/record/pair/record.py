"""`PairCapture` records a module's forward and backward graphs.

Nothing runs during a recording, so no values are needed: arguments are buffers of the right geometry, and a backward
can be recorded at any time after its forward, whose autograd graph is kept. Both are transactions: a failed recording
leaves the module, its parameters and their gradients as before. So a call can be recorded again at any time, to check
that its operations have not changed (`pair.audit`).

All graphs are made in one place (`PairCapture.record`), which returns the graph and the log of its operations.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from stepgraph.core.ambient import as_called, autocast_now, under_autocast, without_saved_tensor_hooks
from stepgraph.core.errors import CaptureError
from stepgraph.core.tensor_attributes import changed_attributes, put_on
from stepgraph.core.tensor_memory import version_of
from stepgraph.core.tree import changed_containers, unflatten
from stepgraph.engine.backends import Graph
from stepgraph.engine.backends.random.tracker import state_of_another_graph, tracker_for
from stepgraph.engine.call.failure import refuse_changed_container
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.guards.hooks import is_hooked
from stepgraph.engine.guards.random_names import NamesGuard
from stepgraph.engine.guards.signature import refuse_tensor_classes
from stepgraph.engine.guards.signature.key import is_computed
from stepgraph.engine.memory.borrowed import BorrowedTensor
from stepgraph.engine.memory.inputs import ArgMetadata, StaticInputs
from stepgraph.engine.memory.outputs import StaticOutputs, another_leaf, leaf_results
from stepgraph.engine.observe.ddp import reduced_parameters
from stepgraph.engine.observe.finder import found_by
from stepgraph.engine.observe.module_attributes import ModuleAttributes
from stepgraph.engine.observe.step_objects import leaves_behind
from stepgraph.engine.observe.taken_back import ContainersBefore
from stepgraph.engine.oplog import OpLog, left_out
from stepgraph.engine.record.pair.cached_casts import as_computed, casts_behind, casts_twice, keeps_casts
from stepgraph.engine.record.pair.call import CallBuffers, EagerCall, SameTensor
from stepgraph.engine.record.pair.differentiate import (
    AccumulatesByItself,
    Inside,
    accumulate,
    differentiate,
    recording_compiled_backwards,
    saved_memory,
    uses_up_saved,
)
from stepgraph.engine.record.pair.eager_proof import attributes_of, note_forward, noting
from stepgraph.engine.record.pair.lanes import PoolLane
from stepgraph.engine.record.pair.parameter_proxies import ParameterProxies, without_hooks
from stepgraph.engine.record.pair.runner import (
    AutogradEdges,
    BackwardGraph,
    Backwards,
    ForwardGraph,
    Grads,
    Recording,
    Runner,
)
from stepgraph.engine.record.pair.shared import PairSession
from stepgraph.engine.record.pair.uses import NotedUses, count_uses, is_reentrant


class _CastsTwice(Exception):
    """A weight is cast for each use, but eager casts it once; record with autocast's cache."""


class PairCapture:
    """Records the graphs of one module, or of the function that `original` returns at the time.

    `outside` are parameters, by id, whose gradients autograd accumulates: something must happen there in Python.
    """

    def __init__(
        self,
        original: Callable[[], Callable[..., Any]],
        module: torch.nn.Module,
        shared: PairSession,
        outside: Iterable[int] = (),
        generators: Sequence[torch.Generator] = (),
        *,
        need_backward: bool = True,
    ) -> None:
        self._original, self.module, self._shared = original, module, shared
        self.session, self.grads = shared.session, shared.grads
        self.random = tracker_for(shared.session.backend)
        self._generators, self._need_backward = tuple(generators), need_backward
        self.proxies = ParameterProxies(module)
        self._with_modes = with_modes(module)
        self._accumulates = False
        self._known: list[torch.Tensor] = []
        self._apart: set[int] = set()
        self._outside = frozenset(outside)
        self._returned = shared.returned

    # -- any graph

    def record(
        self,
        lane: PoolLane,
        notes: OpLog,
        run: Callable[[Graph], Any],
        around: Iterable[AbstractContextManager[Any]],
        forward: ForwardGraph | None = None,
    ) -> Recording:
        """Record what `run` does inside `around`, and note its operations.

        `forward` is the graph whose random states a backward may return to.
        """
        generators = tuple(dict.fromkeys((*self._generators, *self.random.generators)))
        with contextlib.ExitStack() as stack:
            for each in around:
                stack.enter_context(each)
            segment = self.random.begin_segment(None if forward is None else forward.recording.segment)
            graph = self.session.workspace.graph(generators, lane.number)
            graph.begin()
            try:
                with noting(notes), self._shared.logs.output.noticed():
                    made = run(graph)
                if forward is not None and (segment.rewinds or graph.random.rewinds_to):
                    graph.will_replay_from()
                graph.end()
            except BaseException:
                graph.abort()
                raise
            self.session.adopt(graph)
        self._shared.logs.output.warn(type(self.module).__name__)
        return Recording(graph, graph.launch, notes, segment, made)

    @contextlib.contextmanager
    def _surroundings(self, training: Sequence[bool]) -> Iterator[None]:
        """Put the module in the state of the call, with proxies for its parameters."""
        before = ModuleAttributes(dict(self.module.named_modules()))
        containers = ContainersBefore(found_by(self._original()), self.session.workspace.held)
        for module, flag in zip(self._with_modes, training, strict=True):
            module.training = flag  # an evaluation is captured while the model trains, and the other way round
        try:
            with self.proxies.in_place(), without_saved_tensor_hooks(), recording_compiled_backwards():
                yield
        finally:
            containers.take_back()
            before.restore()

    # -- forward

    def forward(
        self,
        call: EagerCall,
        lane: PoolLane,
        buffers: CallBuffers | None = None,
        then: Callable[[StaticOutputs], None] | None = None,
        *,
        cache: bool = False,
    ) -> Runner:
        """Record a forward.

        `then` is called with the result, to add further work to the graph. `cache`: with autocast's cache, which is
        used if a weight is cast more than once without it.
        """
        buffers = buffers or CallBuffers()
        tensors = self._arguments(call, buffers.tensors())
        versions = {i: version_of(t) for i, t in tensors.items()}
        leaves = [_filled(i, leaf, tensors) for i, leaf in enumerate(call.leaves)]
        args, kwargs = unflatten(call.structure, leaves)
        names = NamesGuard(self.random)
        notes = self._shared.logs.of_call(self.module, leaves, call.ambient, self.session.backend.device)

        def run(graph: Graph) -> tuple[StaticOutputs, tuple[int, ...]]:
            before = attributes_of(self.module)
            made = self._original()(*args, **kwargs)
            note_forward(notes, self.module, before, made, leaves)
            with left_out():
                self.proxies.refuse_moved()
                result = self._result(made, tensors)
                mutated = tuple([i for i, t in tensors.items() if version_of(t) != versions[i]])
                if not cache and keeps_casts(call.ambient) and casts_twice(result.tensors):
                    raise _CastsTwice
                _refuse(call, graph, tensors, mutated)
                refuse_changed_container(_changed(call, leaves, (args, kwargs), tensors), "the module")
                refuse_tensor_classes(result.tensors, ["result"] * len(result.tensors))
                if then is not None:
                    then(result)
            return result, mutated

        mode = contextlib.nullcontext() if self._need_backward else torch.no_grad()
        ambient = as_called(call.ambient, cache=cache)
        around = (self.random.moved_to(call.fork), self._surroundings(call.training), ambient, mode)
        try:
            recording = self.record(lane, notes, run, around)
        except _CastsTwice:
            return self.forward(call, lane, buffers, then, cache=True)
        result, mutated = recording.made
        result.settle([*self.module.parameters(), *self.module.buffers()])
        in_use = {i: producer.is_live for i, (producer, _) in buffers.given.items()}
        boundary = StaticInputs(tensors, buffers.shared, in_use)
        forward = ForwardGraph(recording, boundary, result, mutated, call.training, names.if_needed())
        backwards = Backwards(self._backward_now, self.random, self.session, self.grads.other_uses)
        edges = self._edges(call, result, tensors)
        if edges.inside:
            self._shared.in_flight.begin()
        return Runner(forward, edges, lane, self._shared.in_flight.of(self.module), backwards)

    def note_returned(self, made: Any, arguments: Sequence[Any]) -> None:
        """Remember the parameters and other leaves that an eager call on proxies has returned themselves."""
        originals, given = self.proxies.originals, set(map(id, arguments))
        for index, leaf in leaf_results(made).items():
            if index not in given:
                self._returned[originals.get(index, leaf)] = None

    def _result(self, made: Any, tensors: dict[int, torch.Tensor]) -> StaticOutputs:
        """The results; a returned proxy or known leaf stands for the object itself."""
        objects = {id(leaf): leaf for leaf in self._returned} | self.proxies.originals
        given = set(map(id, tensors.values()))
        leaves = leaf_results(made)
        if any(index not in objects and index not in given for index in leaves):
            raise another_leaf()
        for index in leaves.keys() & objects.keys():
            self._returned[objects[index]] = None
        return StaticOutputs(made, tensors, objects)

    def _arguments(self, call: EagerCall, buffers: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """A buffer for each tensor of a call, by leaf index."""
        found: dict[int, torch.Tensor] = {}
        for index, leaf in enumerate(call.leaves):
            if isinstance(leaf, ArgMetadata) and index in buffers:
                found[index] = buffers[index].detach().requires_grad_(leaf.requires_grad)
            elif isinstance(leaf, ArgMetadata):
                found[index] = leaf.empty(self.session.backend.device)
        has_casts = keeps_casts(call.ambient)
        for index, tensor in found.items():
            key = call.signature.leaves[index]
            found[index] = put_on(as_computed(tensor) if has_casts and is_computed(key) else tensor, key)
        if call.values:
            StaticInputs({i: found[i] for i in call.values}).load(call.values)
        return found

    def _edges(self, call: EagerCall, result: StaticOutputs, tensors: Mapping[int, torch.Tensor]) -> AutogradEdges:
        """Describe how autograd passes through a forward, and the parameters that it uses."""
        differentiable = any(result.differentiable)
        anchor = torch.empty(0, device="cpu", requires_grad=differentiable)  # where autograd has least to do for it
        flows: list[int] = []
        outside, bound, apart = [], [], []
        repeated: dict[int, tuple[torch.Tensor, int]] = {}
        at_once = is_reentrant(result.tensors)
        self._known = list(self.proxies.parameters)
        if differentiable:
            behind = list(leaves_behind([t for t in result.tensors if t.requires_grad]))
            reached = set(map(id, behind))
            self._known = [p for p in self._known if id(self.proxies.of(p)) in reached]
            flows = self._flows(call, result, tensors)
            own = {id(t) for t in (*tensors.values(), *self.proxies.leaves)}
            foreign = {id(leaf): leaf for leaf in behind if id(leaf) not in own}
            bound = [*self._through_autograd(call, result), *foreign.values()]
            repeated = self._repeated(result, bound)
            apart = [p for p, _ in repeated.values() if self._are_apart(p, bound, at_once=at_once)]
            several = {id(p): repeated.pop(id(p))[1] for p in apart}
            outside = [p for p in dict.fromkeys([*bound, *apart]) for _ in range(several.get(id(p), 1))]
        self._known += [t for t in result.objects if t.requires_grad and all(t is not known for known in self._known)]
        saved = saved_memory(result.tensors)
        pairs = zip(result.tensors, result.differentiable, strict=True)
        return AutogradEdges(
            flows=tuple(flows),
            outside=tuple(outside),
            bound=tuple(bound),
            apart=tuple(apart),
            summed=frozenset(repeated),
            adds_at_once=at_once,
            inside=self._names_inside(outside, result) if differentiable else {},
            saved_inputs=tuple([i for i in dict.fromkeys(flows) if _storage(tensors[i]) in saved]),
            saved_results=tuple([i for i, (t, known) in enumerate(pairs) if known and _storage(t) in saved]),
            anchor=anchor,
            anchor_node=torch.autograd.graph.get_gradient_edge(anchor).node if differentiable else None,
            uses_up_saved=uses_up_saved(result.tensors),
            keeps_casts=keeps_casts(call.ambient) and bool(casts_behind(result.tensors)),
        )

    def _names_inside(self, outside: Sequence[torch.Tensor], result: StaticOutputs) -> dict[str, torch.Tensor]:
        """The parameters that the forward uses and whose gradients its graphs accumulate, by name.

        None with reentrant checkpointing: its inner backwards add each share to `.grad` at once, in eager too.
        """
        if is_reentrant(result.tensors):
            return {}
        used = set(map(id, self._known))
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        own = type(self.module).__name__
        found = [p for p in self.accumulated_inside(outside) if id(p) in used]
        return {f"{own}.{names.get(id(p), f'parameter {index}')}": p for index, p in enumerate(found)}

    def _through_autograd(self, call: EagerCall, result: StaticOutputs) -> list[torch.Tensor]:
        """The module's parameters whose gradients autograd accumulates: chosen ones, and returned ones, if used.

        A parameter without a use gets no gradient, and DDP's reducer must not hear of it, as in eager.
        """
        # what a reentrant backward reaches is not known before it runs
        at_once = is_reentrant(result.tensors)
        used = self.proxies.parameters if at_once else self._known
        if at_once and not call.in_ddp:  # with eager's checkpoint, too, autograd does not add up what it has inside
            reduced = reduced_parameters()
            return [p for p in used if id(p) in self._outside and (is_hooked(p) or id(p) in reduced)]
        return [p for p in used if call.in_ddp or id(p) in self._outside or p in self._returned]

    def _flows(self, call: EagerCall, result: StaticOutputs, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """The arguments that gradients flow back to, once for each use if there are others outside."""
        found = [i for i, tensor in tensors.items() if tensor.requires_grad]
        counts = count_uses(_differentiable(result), [tensors[i] for i in found if i in call.elsewhere])
        return [i for i in found for _ in range(max(1, counts[id(tensors[i])]))]

    def _repeated(self, result: StaticOutputs, bound: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, int]]:
        """The parameters with uses that autograd adds up, and the numbers of the uses, by id.

        Reentrant checkpointing adds what it has inside at once, so that one use beside it counts there, too.
        """
        results, least = _differentiable(result), 1 if is_reentrant(result.tensors) else 2
        parameters = {id(p): p for p in (*self._known, *bound)}
        counts = count_uses(results, map(self.proxies.of, parameters.values()))
        numbers = {key: counts[id(self.proxies.of(p))] for key, p in parameters.items()}
        return {key: (p, numbers[key]) for key, p in parameters.items() if numbers[key] >= least}

    def _are_apart(self, parameter: torch.Tensor, bound: Sequence[torch.Tensor], *, at_once: bool) -> bool:
        """True if autograd must add up the uses of a parameter one by one: there are others, or there may be.

        That stays so for all graphs of the module: a call that is recorded again must have the same operations.
        """
        others = self.grads.other_uses
        if at_once:  # other uses cannot be told from those inside a checkpoint, which may not be handed out
            return bool(others.found([parameter]))
        if not others.are_none(parameter) or any(parameter is each for each in bound):
            self._apart.add(id(parameter))
        return id(parameter) in self._apart

    def known_parameters(self) -> list[torch.Tensor]:
        """The parameters that the last forward's graph uses, also frozen ones."""
        frozen = [p for p in self.module.parameters() if not p.requires_grad]
        return [*self._known, *frozen]

    def inside(self) -> list[torch.Tensor]:
        """The parameters whose gradients the graphs accumulate by themselves."""
        return [p for p in self.proxies.parameters if id(p) not in self._outside and p not in self._returned]

    # -- backward

    def _backward_now(self, runner: Runner, metas: Sequence[ArgMetadata | None]) -> BackwardGraph:
        """Record a backward in the middle of a running one."""
        with interrupts_held(), self.session.workspace.capturing():
            return self.backward(runner, metas, {}, autocast_now())

    def backward(
        self,
        runner: Runner,
        metas: Sequence[ArgMetadata | None],
        given: Mapping[int, torch.Tensor],
        autocast: tuple[Any, Any],
        lent: Mapping[int, BorrowedTensor] | None = None,
        then: Callable[[Grads], None] | None = None,
    ) -> BackwardGraph:
        """Record the backward for gradients of this geometry.

        `given` are buffers for gradients; those that another graph returns are `lent`. `then` is called with the
        gradients of the node's inputs, to add further work to the graph.
        """
        device = self.session.backend.device
        present = {i: meta for i, meta in enumerate(metas) if meta is not None}
        incoming = {i: given[i] if i in given else meta.empty(device) for i, meta in present.items()}
        results = [runner.result.tensors[i] for i in present]
        self._accumulates = self._accumulates or is_reentrant(results)
        outside, inside = runner.edges.outside, self._inside(runner, results)
        edges = [*(runner.boundary.tensors[i] for i in runner.edges.flows), *map(self.proxies.of, outside)]
        num_flows = len(runner.edges.flows)
        apart = [edge for edge, number in Counter(edges[:num_flows]).items() if number > 1]
        apart += map(self.proxies.of, runner.edges.apart)
        before = [dict(p.__dict__) for p in self.proxies.leaves]

        def run(graph: Graph) -> tuple[Grads, list[torch.Tensor]]:
            compute = accumulate if self._accumulates else differentiate
            uses = NotedUses(edges, apart)
            grads, parameters = compute(results, list(incoming.values()), uses, inside)
            arrival = [place - num_flows for place in uses.arrival if place >= num_flows]
            runner.edges = dataclasses.replace(runner.edges, arrival=tuple(arrival))
            if then is not None:
                with left_out():
                    then(grads)
            return grads, parameters

        notes, around = self.backward_notes(runner, incoming, inside), self.around_backward(runner, autocast)
        try:
            recording = self.record(runner.lane, notes, run, around, runner.forward)
        except AccumulatesByItself:
            self._accumulates = True
            for leaf, attributes in zip(self.proxies.leaves, before, strict=True):
                leaf.__dict__.clear()
                leaf.__dict__.update(attributes)
            return self.backward(runner, metas, given, autocast, lent, then)
        boundary = StaticInputs(incoming, in_use={i: other.is_held for i, other in (lent or {}).items()})
        return self.keep(runner, metas, autocast, recording, boundary, self._marks(before))

    def _inside(self, runner: Runner, results: Sequence[torch.Tensor]) -> list[Inside]:
        """The parameters whose gradients the backward from these results accumulates."""
        outside = runner.edges.outside
        if self._accumulates and not all(self.proxies.has(p) for p in outside):
            raise CaptureError(
                "a module with reentrant checkpointing uses a parameter of another module",
                rule="reentrant-checkpoint",
            )
        reached = {id(leaf) for leaf in leaves_behind(results)}
        chosen = self.accumulated_inside(outside)
        chosen = [p for p in chosen if self._accumulates or id(self.proxies.of(p)) in reached]
        memory = self.grads.part(chosen).memory  # it must not be born in the graph
        return [Inside(p, self.proxies.of(p), m) for p, m in zip(chosen, memory, strict=True)]

    def keep(
        self,
        runner: Runner,
        metas: Sequence[ArgMetadata | None],
        autocast: tuple[Any, Any],
        recording: Recording,
        boundary: StaticInputs,
        marks: Sequence[tuple[torch.Tensor, dict[str, Any]]] = (),
    ) -> BackwardGraph:
        """Add a recorded backward to a runner."""
        try:
            rewinds = _rewinds(runner, recording)
        except CaptureError:
            self.session.release(recording.graph)
            raise
        grads, parameters = recording.made
        accumulated, number = self.grads.part(parameters, id(self.module)), runner.lane.next_number()
        made = BackwardGraph(recording, boundary, grads, accumulated, number, rewinds, marks)
        key = (*(None if meta is None else meta.layout for meta in metas), *autocast, self.random.active)
        runner.add_backward(key, made)
        return made

    def accumulated_inside(self, outside: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters whose gradients the graphs accumulate, if autograd accumulates these."""
        routed = set(map(id, outside))
        return [p for p in self.proxies.parameters if id(p) not in routed]

    def around_backward(
        self, runner: Runner, autocast: tuple[Any, Any], outside: Sequence[torch.Tensor] = ()
    ) -> Iterable[AbstractContextManager[Any]]:
        """The contexts that a backward is recorded in. `outside` replaces that of the runner."""
        foreign = [p for p in outside or runner.edges.outside if not self.proxies.has(p)]
        return self._surroundings(runner.forward.training), under_autocast(*autocast), without_hooks(foreign)

    def backward_notes(
        self, runner: Runner, incoming: Mapping[int, torch.Tensor], inside: Sequence[Inside] = ()
    ) -> OpLog:
        """Return a log for a backward that adds to the gradients of these parameters."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        added = {names.get(id(each.parameter), f"parameter {i}"): each.memory for i, each in enumerate(inside)}
        return self._shared.logs.of_backward(runner.forward.recording.notes, self.module, incoming, added)

    def _marks(self, before: Sequence[dict[str, Any]]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Plain attributes that the backward has set on proxies, by parameter."""
        found = []
        for parameter, leaf, old in zip(self.proxies.parameters, self.proxies.leaves, before, strict=True):
            new = {k: v for k, v in leaf.__dict__.items() if isinstance(v, (bool, int, str)) and old.get(k) is not v}
            if new:
                found.append((parameter, new))
        return found


def with_modes(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that have their own training flag; a compiled module shows the flag of the module in it."""
    return [inner for inner in module.modules() if "training" in vars(inner)]


def _differentiable(result: StaticOutputs) -> list[torch.Tensor]:
    return [tensor for tensor in result.tensors if tensor.requires_grad]


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _rewinds(runner: Runner, recording: Recording) -> bool:
    """True if a backward repeats random draws of its forward; refuse what a replay could not repeat."""
    random = recording.graph.random
    if random.rewinds_to - {runner.forward.recording.graph}:
        raise _rewinds_elsewhere()
    rewinds = recording.segment.rewinds or bool(random.rewinds_to)
    if rewinds and random.draws:
        raise CaptureError(
            "the module's backward returns to the forward's random state, and also draws new numbers",
            rule="rng-recompute",
            why="the backward's graph starts from the random state of the forward, so that a recomputation draws the "
            "same numbers. New numbers in the same graph would repeat old ones.",
            fix="graph the checkpointed part and the part whose backward draws numbers as two modules.",
        )
    return rewinds


def _rewinds_elsewhere() -> CaptureError:
    return state_of_another_graph(
        "the module sets the random state",
        "set random states outside the module, or graph the part that reads the state together with it.",
    )


def _refuse(call: EagerCall, graph: Graph, tensors: Mapping[int, torch.Tensor], mutated: Sequence[int]) -> None:
    """Refuse a forward whose replay would differ from eager."""
    if graph.random.rewinds_to:
        raise _rewinds_elsewhere()
    names = call.signature.names()
    for index in mutated:
        if tensors[index].requires_grad or tensors[index].grad_fn is not None:
            raise CaptureError(
                f"the module changes argument `{names[index]}` in place, and gradients flow through it",
                rule="inplace-argument",
            )
        if index in call.aliased:
            raise CaptureError(
                f"the module writes to argument `{names[index]}`, which shares memory with another one",
                rule="shared-input",
                why="each argument is copied into its own buffer, so the other argument would not see the write.",
                fix="pass the whole tensor once and take views inside the module, or pass a clone.",
            )


def _changed(
    call: EagerCall, leaves: Sequence[Any], given: tuple[Any, Any], tensors: Mapping[int, torch.Tensor]
) -> str | None:
    """Describe the changes that the module made to the containers and tensors that it was given."""
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
