"""A capture is a transaction: it records the step once, without any effect, or restores everything."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import CaptureError, CaptureRefused
from stepgraph.core.tensor_attributes import changed_attributes
from stepgraph.core.tree import Structure, changed_containers, unflatten
from stepgraph.engine.backends.random.host_random import refuse_rewound
from stepgraph.engine.backends.random.tracker import tracker_for
from stepgraph.engine.call.failure import refuse_changed_container
from stepgraph.engine.call.proof import (
    CallProof,
    NeedsEagerCall,
    Restless,
    Shown,
    StepLogs,
    next_audit,
    other_path,
    varying_operations,
)
from stepgraph.engine.call.session import Session
from stepgraph.engine.grads.step_grads import GradCapture, still_in_use
from stepgraph.engine.guards.hooks import refuse_hooks
from stepgraph.engine.guards.host_values.decisions import Answers, HostValues, Trace, undecided, without_stand_ins
from stepgraph.engine.guards.host_values.uses import Uses
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.guards.model import ModelGuard
from stepgraph.engine.guards.optimizer import NumbersGuard, ParametersGuard, ScalerGuard, StateGuard
from stepgraph.engine.guards.outside_memory import OutsideMemory
from stepgraph.engine.guards.protocol import Change, GuardSet, told
from stepgraph.engine.guards.random_names import NamesGuard
from stepgraph.engine.guards.registration import RegistrationEvents
from stepgraph.engine.guards.signature import Signature
from stepgraph.engine.memory.outputs import StaticOutputs, detached
from stepgraph.engine.observe.ddp import Replicas, refuse_replicas
from stepgraph.engine.observe.discovery import Reached, discovering, scalers_among
from stepgraph.engine.observe.eager_call import Obstacle
from stepgraph.engine.observe.escaped_tensors import Place, is_newborn, kept_tensor, tracking_new_objects
from stepgraph.engine.observe.finder import found_by, tensors_in
from stepgraph.engine.observe.lines import line_of_return
from stepgraph.engine.observe.output import Output
from stepgraph.engine.observe.own_changes import ModelState
from stepgraph.engine.observe.sharding import refuse_sharded
from stepgraph.engine.observe.step_objects import StepObjects, numbered
from stepgraph.engine.observe.taken_back import ContainersBefore
from stepgraph.engine.oplog import Difference, Log, first_difference
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.engine.optim.effects import refuse_unknown_results
from stepgraph.engine.optim.optimizer import (
    HostCounters,
    KeptState,
    Placement,
    captured_inside,
    check_forced,
    cut_at,
    letting_step,
    place,
)
from stepgraph.engine.optim.read_numbers import ReadNumbers, Reads, refusing_writes
from stepgraph.engine.optim.scaler import ScalerCapture
from stepgraph.engine.record.chain import Chain, ChainRecorder, GraphLink
from stepgraph.engine.step.arguments import StepArguments
from stepgraph.engine.step.call import CallArgs, CapturedCall, Guards, Replay, StartState
from stepgraph.engine.step.nonfinite import Flags
from stepgraph.engine.step.options import StepOptions
from stepgraph.engine.step.site import EagerState, Site
from stepgraph.engine.step.warmup import (
    flags_of,
    other_result,
    own_change,
    surroundings,
)

_MAX_ATTEMPTS = 6
"""Number of recordings of one call that may each show something that the next one must do."""


@dataclass(frozen=True, slots=True)
class Look:
    """What to note while the step's Python runs in a recording, besides its operations."""

    at_code: bool = True
    """Which code runs, since it may have changed."""
    trace: Trace | None = None
    """What is asked of host values."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """The products of one run of the step under capture. None of it has taken effect yet."""

    chain: Chain
    outputs: StaticOutputs
    grads: GradCapture
    scalers: ScalerCapture
    flags: Flags | None
    read: ReadNumbers
    kept: Place | None
    """The place where the step kept a tensor that it made, if any."""
    modes: list[tuple[torch.nn.Module, bool]]
    """Modules whose `training` flag the step changes, and the new value."""
    log: Log
    containers: ContainersBefore

    def drop(self) -> None:
        """Restore everything as before the recording."""
        self.containers.take_back()
        self.chain.free()
        self.grads.rollback()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording, with its inputs, optimizers and start state."""

    signature: Signature
    kind: Hashable
    """The site's kind of call before the recording, which may have changed gradients and modes since."""
    inputs: StepArguments
    made: _Recording
    inside: tuple[Optimizer, ...]
    outside: tuple[Optimizer, ...]
    scalers: list[torch.amp.GradScaler]
    counters: HostCounters
    random: NamesGuard
    replicas: Replicas
    is_first: bool
    """True if the session had no graphs, which may write where this one leaves something."""

    @property
    def between(self) -> list[Any]:
        """The optimizers and scalers that run between graphs."""
        return [*self.outside, *self.made.scalers.between]


@dataclass(frozen=True, slots=True)
class Audit:
    """A captured call, recorded again and compared."""

    recorded: Recorded
    has_new: bool
    """Whether it touches new modules, parameters or optimizers."""
    found: Difference | None
    trace: Trace | None
    """What it has asked of host values, if that is known."""


class StepCapture:
    """Records one signature of a step."""

    def __init__(self, name: str, function: Callable[..., Any], session: Session, options: StepOptions) -> None:
        self.name, self._function = name, function
        self._session, self._options = session, options
        self._events = RegistrationEvents()
        self.logs = StepLogs()
        self.output = Output()
        self.restless = Restless()
        self.moved: dict[int, str] = {}
        """Why optimizers were moved out of the graph, by id."""
        self.reached: Reached | None = None
        """The objects that the step can reach, between the choice of the backend and the first call."""

    def close(self) -> None:
        """Stop listening to the model."""
        self._events.close()

    def refuse_sharded(self, site: Site) -> None:
        """Refuse a step with a model that FSDP shards: of all in reach before the first call, of all called later."""
        in_reach = self.reached.objects if self.reached is not None else ()
        roots = [value for value in in_reach if issubclass(type(value), torch.nn.Module)]
        refuse_sharded(self.name, [*site.touched.all_modules, *(m for root in roots for m in root.modules())])

    def placements(self, site: Site) -> dict[int, Placement]:
        """Return where each optimizer of the step runs, by id."""
        found = {}
        for optimizer in site.touched.optimizers:
            if id(optimizer) in site.learnt.scaled:
                found[id(optimizer)] = Placement(False, "a GradScaler steps it")
            else:
                found[id(optimizer)] = place(optimizer, self._options.optimizer, self.moved.get(id(optimizer)))
        return found

    def describe_placements(self, sites: Sequence[Site]) -> dict[str, str]:
        """Describe the placements at all sites, by the names of the optimizers' classes: `Adam`, `Adam#2`."""
        names: dict[int, str] = {}
        found: dict[str, str] = {}
        for site in sites:
            placements = self.placements(site)
            for optimizer in site.touched.optimizers:
                name = names.setdefault(id(optimizer), numbered(type(optimizer).__name__, names.values()))
                placement = placements[id(optimizer)]
                where = "inside the graph" if placement.inside else "eager, between graphs"
                if site.calls:
                    found[name] = f"{where} ({placement.reason})"
                else:
                    found.setdefault(name, f"eager, without a graph; in a capture: {where} ({placement.reason})")
        return found

    def run(self, site: Site, given: CallArgs, raise_held: Callable[[], None], *, ahead: bool = False) -> CapturedCall:
        """Record the step for these inputs, and keep the recording. `ahead`: the graph is for a later call."""
        refuse_hooks(self.name, site.touched.modules, self._options.safe_hooks, site.touched.name, everywhere=True)
        trace = site.predicates.traced(() if ahead else site.traceable())
        varying = site.obstacles.get("varying-output") if trace.places else None  # the trace may say with which value
        for obstacle in site.obstacles.values():
            if obstacle is not varying:
                raise obstacle.error(self.name)
        self._check_warm(site, ahead=ahead)
        if trace.places:
            before = HostValues(trace.places) if site.eager.values is None else site.eager.values.host_values()
            with contextlib.suppress(Exception), site.learnt.unsurprised():
                if varying is None:
                    return self._record_and_keep(site, given, raise_held, Look(trace=trace))
                self.record(site, given, raise_held, look=Look(trace=trace)).made.drop()
            self._refuse_own(site, trace)
            before.restore()
            site.predicates.refuse(trace, all_places=trace.is_spoiled)
            if not trace.is_spoiled and site.predicates.learn(
                trace.decisions()
            ):  # the eager call before may have been of another kind
                raise NeedsEagerCall
            if varying is not None:
                raise varying.error(self.name)
        return self._record_and_keep(site, given, raise_held, Look(), ahead=ahead)

    def _record_and_keep(
        self, site: Site, given: CallArgs, raise_held: Callable[[], None], look: Look, *, ahead: bool = False
    ) -> CapturedCall:
        recorded = self.record(site, given, raise_held, look=look)
        try:
            proof = self._prove(site, recorded, look, ahead=ahead)
            if look.trace is not None:
                self._refuse_own(site, look.trace)
                if not self._hears(site, look.trace):
                    raise NeedsEagerCall
        except BaseException:
            recorded.made.drop()
            raise
        answers = Answers(look.trace.decisions() if look.trace is not None else None)
        return self.keep(site, recorded, proof, answers, ahead=ahead)

    def record(
        self,
        site: Site,
        given: CallArgs,
        raise_held: Callable[[], None],
        *,
        look: Look,
        is_again: bool = False,
    ) -> Recorded:
        """Record the step for these inputs. Nothing takes effect, and a failure restores everything.

        `is_again`: the call has a graph, whose gradients this recording may use. `raise_held` raises an interrupt that
        arrived meanwhile; it is called when all is recorded and nothing has taken effect.
        """
        signature, kind, leaves = site.sign(), site.kind(), given.leaves
        refuse_replicas(self.name, site.touched, self._options.safe_hooks, self._session.backend)
        replicas, placements = Replicas(site.touched.modules), self.placements(site)
        for optimizer in site.touched.optimizers:
            check_forced(optimizer, self._options.optimizer, placements[id(optimizer)])
        inside = [o for o in site.touched.optimizers if placements[id(o)].inside]
        outside = [o for o in site.touched.optimizers if not placements[id(o)].inside]
        reach = found_by(site.with_objects(self._function), site.touched.ran)
        objects = reach.objects
        inputs = StepArguments(leaves, self._session.backend)
        inputs.hold_grads(leaves, signature.names())
        inputs.load(leaves)
        random = NamesGuard(tracker_for(self._session.backend))
        is_first = not self._session.num_graphs
        for attempt in itertools.count(1):
            inputs.watch()
            inputs.watch_state(leaves, _own_tensors(site, objects))
            counters, state = HostCounters(inside, self._session.backend), KeptState([*inside, *outside])
            containers = ContainersBefore(reach, self._session.workspace.held)
            try:
                with replicas.recording(self._session.drop_graphs):
                    made = self._record(
                        *(site, given.structure, inputs.leaves, inside, outside, objects, containers),
                        look=look,
                        moves_gradients=is_again and attempt == 1 and not replicas.is_needed,
                    )
            finally:
                counters.rollback()
                lost, is_other = state.rollback()
            if not self._leaves_state(site, made, inside, lost, is_other=is_other or made.scalers.has_begun):
                return self.record(site, given, raise_held, look=look, is_again=is_again)
            if self._is_usable(site, made, is_first=is_first):
                break
            made.drop()
            inputs.refuse_rebound(signature.names())
            if attempt == _MAX_ATTEMPTS:
                self._surprised(site, still_in_use(self.name))
        try:
            self._check(site, kind, leaves, inputs, made)
            self._refuse_rewound(site, kind, made, [*outside, *made.scalers.between])
            raise_held()
        except BaseException:
            made.drop()
            raise
        placed = (tuple(inside), tuple(outside), scalers_among(objects))
        return Recorded(signature, kind, inputs, made, *placed, counters, random, replicas, is_first)

    def _leaves_state(
        self, site: Site, made: _Recording, inside: Sequence[Optimizer], lost: Sequence[Optimizer], *, is_other: bool
    ) -> bool:
        """Check what a recording did to the state of optimizers.

        Return False if it has taken out state of optimizers `inside` the graph: they run between graphs from now on.
        """
        leaving = {id(o): f"the step takes out state of {type(o).__name__}" for o in lost if o in inside}
        if leaving or is_other:
            made.drop()
        self.moved.update(leaving)
        if is_other and not leaving:
            self._surprised(site, own_change(self.name, "makes new state of an optimizer or a GradScaler at each call"))
        return not leaving

    def _is_usable(self, site: Site, made: _Recording, *, is_first: bool) -> bool:
        """Return whether a recording may be kept. Otherwise note what the next one must do."""
        site.learnt.hold_grads = site.learnt.hold_grads or not made.grads.entries_unused
        site.learnt.cut_scalers = site.learnt.cut_scalers or not made.scalers.is_sound
        if not made.grads.entries_unused or not made.scalers.is_sound:
            return False
        return is_first or not made.grads.move_out(self._session.workspace.held)

    def _check(
        self, site: Site, kind: Hashable, leaves: Sequence[Any], inputs: StepArguments, made: _Recording
    ) -> None:
        """Refuse a recording that cannot be replayed."""
        names = site.sign().names()
        inputs.note_use(leaves, names, seen=site.learnt.written)
        site.learnt.written |= inputs.written
        inputs.refuse_shared_state(leaves, names, _stepped(site.touched.optimizers))
        other = other_result(site, kind, made.outputs.tree)
        if other is not None:
            site.eager.results.pop(kind)
            where = line_of_return(self._function)
            self._surprised(site, Obstacle("varying-output", other, where=where).error(self.name))
        if made.kept is not None:
            ignored = () if made.kept.name is None else (made.kept.name,)
            what = f"the step makes a tensor and keeps it in `{made.kept.label}`"
            self._surprised(site, Obstacle("kept-tensor", what, ignored).error(self.name))  # a cache keeps it but once

    def _refuse_rewound(self, site: Site, kind: Hashable, made: _Recording, between: Sequence[Any]) -> None:
        """Refuse a recording that moves a generator, if the same operations have left it where it was.

        After other operations that says nothing: an eager call must show what these do.
        """
        graphs = [link.graph for link in made.chain.links if isinstance(link, GraphLink)]
        eager = site.eager.logs.of(kind)
        try:
            refuse_rewound(site.unmoved(kind), graphs)
        except CaptureRefused as refused:
            if eager and self.logs.agree(eager[-1], made.log, between):
                raise
            self._surprised(site, CaptureError.from_entry(self.name, refused.row, operation=refused.operation))

    def record_again(
        self, site: Site, given: CallArgs, raise_held: Callable[[], None], look: Look
    ) -> tuple[Recorded, bool]:
        """Record a captured call again. Also return whether it touches new modules, parameters or optimizers."""
        known = site.touched.known()
        found = _WithGradients(known)
        whole = site.with_objects(self._function)
        try:
            with discovering(found, whole, (), lambda optimizer: None):
                recorded = self.record(site, given, raise_held, look=look, is_again=True)
        finally:
            found.put_back()
        found.let_go(known)  # objects made by the recording itself are not new
        inputs = {id(leaf) for leaf in (*given.leaves, *recorded.inputs.leaves)}
        return recorded, bool(found.known() - known - inputs)

    def audit(
        self,
        site: Site,
        call: CapturedCall,
        given: CallArgs,
        raise_held: Callable[[], None],
        trace: Trace,
        *,
        at_code: bool,
    ) -> Audit:
        """Record a captured call again and compare, first with stand-ins for numbers that have changed.

        A recording with stand-ins that differs, or fails, is made again without: only then it counts.
        """
        log, traced, is_failed = call.proof.log, None, False
        if trace.places:
            before = call.host_values()
            try:
                with site.learnt.unsurprised():
                    recorded, has_new = self.record_again(site, given, raise_held, Look(at_code=at_code, trace=trace))
                if not self._hears(site, trace):
                    is_failed = True
                elif first_difference(log, recorded.made.log) is None:
                    return Audit(recorded, has_new, None, trace)
                recorded.made.drop()
                traced = recorded.made.log
            except NeedsEagerCall:
                if self._hears(site, trace):  # what the step asked has another answer, and another result
                    raise
                is_failed = True
            except Exception:  # noqa: BLE001 (the recording without stand-ins shows what it is)
                is_failed = True
            before.restore()
        recorded, has_new = self.record_again(site, given, raise_held, Look(at_code=at_code))
        found = first_difference(log, recorded.made.log)
        is_same = traced is not None and first_difference(traced, recorded.made.log) is None
        site.predicates.refuse(trace, all_places=is_failed or not is_same)
        return Audit(recorded, has_new, found, trace if is_same else None)

    @staticmethod
    def _hears(site: Site, trace: Trace) -> bool:
        """Check the code that has run in a recording, too; note if a stand-in may not have heard all of it."""
        uses = Uses(site.touched.ran.codes())
        trace.is_spoiled = trace.is_spoiled or not all(map(uses.only_ask, trace.places))
        return not trace.is_spoiled

    def _refuse_own(self, site: Site, trace: Trace) -> None:
        """Refuse a step that depends on a value of a library's that it changes itself: a replay does not change it."""
        asked = trace.asked()
        found = [change for place, change in site.eager.own_changes if place is not None and place.spot in asked]
        if found:
            names = tuple(change.name for change in found)
            what = f"the step itself changes {told(found)}"
            raise Obstacle("host-value", what, names).error(self.name)

    def _check_warm(self, site: Site, *, ahead: bool) -> None:
        """Before a recording: raise `NeedsEagerCall` if the model changed since the last eager call, or there was none.

        An optimizer inside the graph whose numbers have changed since then is moved out of the graph.
        """
        state = site.eager.state
        rebuilt = state.model.changed() if state is not None else ()
        if rebuilt:
            raise NeedsEagerCall(told(rebuilt))
        if not ahead and not site.eager.logs.of(site.kind()) and site.learnt.may_be_surprised():
            raise NeedsEagerCall
        for guard in state.numbers if state is not None else ():
            for change in guard.changed():
                self.moved.setdefault(id(change.subject), str(change))

    def _prove(self, site: Site, recorded: Recorded, look: Look, *, ahead: bool) -> CallProof:
        """Compare a recording with the eager calls of its kind."""
        log, due = recorded.made.log, next_audit(self._options.audit, 0)
        eager = site.eager.logs.of(recorded.kind)
        if not eager:
            return CallProof(log, Shown.LATER if ahead else Shown.NOT, due, between=recorded.between)
        changed = site.eager.values.changed() if site.eager.values is not None else []
        try:
            verdict = self.logs.judge(eager, log, recorded.between)
        except NeedsEagerCall:
            raise NeedsEagerCall(values=changed) from None
        if verdict.found is not None:
            if changed or look.trace is not None:
                raise NeedsEagerCall(values=changed)
            if verdict.between is not None:
                self._surprised(site, varying_operations(self.name, verdict.between))
            if self._options.strict:
                raise other_path(self.name, verdict.found)
        shown = Shown.EQUAL if verdict.found is None else Shown.OTHER_PATH
        return CallProof(log, shown, due, verdict.found, between=recorded.between)

    def keep(
        self, site: Site, recorded: Recorded, proof: CallProof, answers: Answers, *, ahead: bool = False
    ) -> CapturedCall:
        """Make a recording take effect. `ahead`: it is for a later call, and every `.grad` stays unchanged."""
        made = recorded.made
        site.learnt.surprises = 0
        (made.grads.commit_ahead if ahead else made.grads.commit)()
        if (note_loaded := made.chain.note_loaded) is not None:
            for buffer in made.grads.loaded:
                note_loaded(buffer)
        self._name_memory(made, is_first=recorded.is_first)
        parameters, inside = site.touched.parameters, list(recorded.inside)
        if site.learnt.cut_scalers:
            site.learnt.scaled |= made.scalers.stepped
            inside = [o for o in inside if id(o) not in site.learnt.scaled]
        scalers = [] if site.learnt.cut_scalers else recorded.scalers
        watch = self._watch(site, recorded.outside, made.read.found, answers)
        guards = Guards(
            (self._model_guard(site, steady=parameters), *map(ParametersGuard, site.touched.all_optimizers)),
            watch,
            (
                *(StateGuard(o) for o in (*inside, *made.read.states.values())),
                *(ScalerGuard(s) for s in scalers),
                *recorded.random.if_needed(),
                *(NumbersGuard(o) for o in inside),
            ),
            OutsideMemory(made.log, watch.tensors),
        )
        counting = (recorded.counters, recorded.replicas)
        replay = Replay(
            *(recorded.inputs, made.chain, made.outputs),
            made.outputs.copier() if self._options.outputs == "copy" else made.outputs.give,
            *(made.grads.carried_in, made.grads.added_to),
            tuple(part.advance for part in counting if part.is_needed),
            *(made.modes, made.flags),
        )
        modules = site.touched.all_modules
        start = StartState(recorded.signature, modules, parameters, replay, recorded.random, recorded.replicas)
        return CapturedCall(recorded.signature, replay, start, guards, proof)

    def _name_memory(self, made: _Recording, *, is_first: bool) -> None:
        """Keep what Python finds after a replay where no other graph writes, and let the backend watch it."""
        workspace, found = self._session.workspace, [grad for _, grad in made.chain.final if grad is not None]
        if self._options.outputs == "static":
            if not is_first:
                made.outputs.move_out(workspace.held)
            found += made.outputs.given
        workspace.note_named(found, [link.graph for link in made.chain.links if isinstance(link, GraphLink)])

    def agree(
        self, site: Site, call: CapturedCall, recorded: Recorded, changes: Sequence[Change], trace: Trace | None
    ) -> None:
        """Drop a new recording that equals the graph's: `changes` had no effect on it.

        The step's code has run once more, so the watch starts again from the present values.
        """
        recorded.made.drop()
        if trace is not None:
            call.answers.agree(trace.decisions(), call.noted)
        self.restless.add(undecided(changes, trace), call.replays - call.proof.agreed)
        call.watch(self._watch(site, recorded.outside, recorded.made.read.found, call.answers), recorded.made.log)
        call.proof.agreed, call.proof.due = call.replays, next_audit(self._options.audit, call.replays)

    def _watch(
        self, site: Site, outside: Sequence[Optimizer], read: Reads | None = None, answers: Answers | None = None
    ) -> Watch:
        whole, touched = site.with_objects(self._function), site.touched
        return Watch(whole, self._options.ignore, touched.named_modules, read, outside, touched.ran, answers)

    def whole(self, site: Site) -> Callable[..., Any]:
        """Return the step with all objects that a watch looks into."""
        return site.with_objects(self._function)

    @property
    def unwatched(self) -> tuple[Collection[str], str | int]:
        """The names that the user ignores, and `audit=`."""
        return self._options.ignore, self._options.audit

    def look(self, site: Site) -> None:
        """After an eager call: note the state that must not change before the step is recorded."""
        inside = [o for o in site.touched.optimizers if place(o, self._options.optimizer).inside]
        model = GuardSet((self._model_guard(site), *map(ParametersGuard, site.touched.all_optimizers)))
        site.eager.state = EagerState(model, tuple(map(NumbersGuard, inside)))

    def _model_guard(self, site: Site, steady: Sequence[torch.Tensor] = ()) -> ModelGuard:
        touched = site.touched
        return ModelGuard(
            *(touched.all_modules, touched.all_parameters, touched.name, self._events),
            hooked=touched.modules,
            whole_step=True,
            steady=steady,
        )

    def _surprised(self, site: Site, error: CaptureError) -> NoReturn:
        """Ask for one more eager call, since the recording showed what none has; if that goes on, raise the error."""
        changed = site.eager.values.changed() if site.eager.values is not None else []
        if changed:  # they may be why
            raise NeedsEagerCall(values=changed)
        if not site.learnt.may_be_surprised():
            raise error
        raise NeedsEagerCall

    def _record(
        self,
        site: Site,
        structure: Structure,
        leaves: Sequence[Any],
        inside: Sequence[Optimizer],
        outside: Sequence[Optimizer],
        objects: Sequence[Any],
        containers: ContainersBefore,
        *,
        look: Look,
        moves_gradients: bool,
    ) -> _Recording:
        recorder = ChainRecorder(self._session, self._options.generators)
        grads = self._grads(site, recorder, moves_gradients)
        found = scalers_among(objects)
        read = ReadNumbers()
        imitate = functools.partial(read.imitate, site.effects)
        scalers = ScalerCapture(found, inside, recorder.cut, imitate, whole=not site.learnt.cut_scalers)
        flags = flags_of(site, self._options, self._function)
        known = {id(o) for o in inside}
        with contextlib.ExitStack() as stack:
            stack.enter_context(surroundings(self._options.optimizer, self._session.backend))
            stack.enter_context(cut_at(outside, recorder.cut, flags.see_optimizer, imitate))
            stack.enter_context(scalers.recording())
            stack.enter_context(flags.at_optimizers())
            stack.enter_context(captured_inside(inside))
            stack.enter_context(read.noting([*outside, *objects], recorder.cut, running=inside))
            stack.enter_context(tracking_new_objects())
            stack.enter_context(grads.moving_at_once())
            late = functools.partial(self._late, site)
            stack.enter_context(_seeing_optimizers(known, site.touched.ended_kinds, late))
            model = ModelState(site.touched.all_modules, site.touched.all_parameters)
            try:
                grads.begin()
                with self._session.workspace.capturing():
                    try:
                        args, kwargs = unflatten(structure, leaves)  # new for each recording, as for each eager call
                        recorder.begin(grads)
                        with refusing_writes(inside):
                            outputs, log = self._logged(site, leaves, args, kwargs, look)
                        refuse_unknown_results(outputs.plain_values)
                        changed = changed_containers(structure, leaves, (args, kwargs), site.sign().arguments)
                        refuse_changed_container(changed or changed_attributes(site.with_keys(leaves)))
                        named = zip(site.sign().names(), leaves, strict=True)
                        found_flags = flags.finish(outputs.tree, site.touched.parameters, named)
                        if (own := model.changed(site.touched.name)) is not None:
                            raise own_change(self.name, own)
                        kept = self._kept(site, outputs, flags.tensors, found_flags)
                        chain = recorder.finish()
                        modes = model.take_modes()
                    except BaseException:
                        recorder.abort()
                        raise
            except BaseException:
                containers.take_back()
                model.restore()
                grads.rollback()
                raise
        return _Recording(chain, outputs, grads, scalers, found_flags, read, kept, modes, log, containers)

    def _grads(self, site: Site, recorder: ChainRecorder, moves: bool) -> GradCapture:
        known = (site.touched.parameters, self._session.grads, recorder.recorded_anything)
        return GradCapture(*known, hold=site.learnt.hold_grads, has_addresses=moves)

    def _logged(
        self, site: Site, leaves: Sequence[Any], args: Any, kwargs: Any, look: Look
    ) -> tuple[StaticOutputs, Log]:
        """Run the step, and note which operations run, and what else there is to look at."""
        device, ran = self._session.backend.device, site.touched.ran
        ignored = tensors_in(site.with_objects(self._function), self._options.ignore)
        arguments = site.arguments_with_grad(leaves)
        with (
            ran.noting() if look.at_code or look.trace is not None else contextlib.nullcontext(),
            self.logs.noting(leaves, site.touched, device, ignored, arguments) as log,
            look.trace or contextlib.nullcontext(),
            self.output.noticed(),
        ):
            result = self._function(*args, **kwargs)
            log.note_result(result)
        return StaticOutputs(detached(without_stand_ins(result))), log.finish()

    def _late(self, site: Site, optimizer: Optimizer) -> NoReturn:
        if any(optimizer is known for known in site.touched.optimizers):
            raise CaptureError(
                f"{type(optimizer).__name__}.step was not called as `optimizer.step()`",
                rule="late-optimizer",
                why="this optimizer runs between graphs. Stepgraph can cut a call of `optimizer.step()` out of a "
                "recording, but not a compiled or stored `step`.",
                fix="call optimizer.step() itself, or use an optimizer that runs inside the graph (fused=True).",
            )
        error = CaptureError(
            f"{type(optimizer).__name__}.step was called, but not during warm-up",
            rule="late-optimizer",
            fix="call every optimizer at each step, or raise warmup= until all have been called once.",
        )
        self._surprised(site, error)

    def _kept(
        self, site: Site, outputs: StaticOutputs, flags: Sequence[torch.Tensor], found: Flags | None
    ) -> Place | None:
        grads = [p.grad for p in site.touched.parameters if p.grad is not None]
        ours = [*flags, found.bad] if found is not None else flags
        whole = site.with_objects(self._function)
        return kept_tensor([*grads, *outputs.tensors, *ours], self._session.workspace.held, whole, self._options.ignore)


class _WithGradients(StepObjects):
    """The objects that a call touches, with the gradient of each parameter not in `known` when the call reached it."""

    def __init__(self, known: Container[int]) -> None:
        super().__init__()
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}
        """Weak: tensors made by the recording itself are not kept alive."""
        self._known = known

    def add_parameter(self, parameter: torch.Tensor, name: str = "") -> None:
        if id(parameter) not in self._known:
            self._found.setdefault(id(parameter), (weakref.ref(parameter), parameter.grad))
        super().add_parameter(parameter, name)

    def put_back(self) -> None:
        """Restore the gradients of new parameters after a recording, which restores only those of `known` ones."""
        for alive, grad in self._found.values():
            parameter = alive()
            if parameter is not None:
                parameter.grad = grad
        self._found.clear()


def _own_tensors(site: Site, objects: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the step's own tensors with their names: parameters, gradients, buffers, and tensors of its closure."""
    for parameter in site.touched.parameters:
        yield f"`{site.touched.name(parameter)}`", parameter
        if parameter.grad is not None:
            yield f"`{site.touched.name(parameter)}.grad`", parameter.grad
    for path, module in site.touched.named_modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            yield f"`{path}.{name}`", buffer
    for value in objects:
        if issubclass(type(value), torch.Tensor):
            yield "a tensor that the step's own code uses", value


def _stepped(optimizers: Sequence[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


@contextlib.contextmanager
def _seeing_optimizers(known: set[int], made: Sequence[type], late: Callable[[Optimizer], NoReturn]) -> Iterator[None]:
    """Let optimizers step that are `known`, by id, or that the step itself makes: new ones of the classes `made`.

    Call `late` for all others.
    """

    def see(optimizer: Optimizer) -> None:
        if id(optimizer) in known:
            return
        if type(optimizer) not in made or not is_newborn(optimizer):
            late(optimizer)
        let_step(optimizer)

    with letting_step() as let_step, at_optimizer_steps(see):
        yield
