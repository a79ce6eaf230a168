"""A captured step replays a graph at each call that has a fitting one, and runs other calls eagerly.

The signature of a call finds its graph. If the graph's guards find no change, the inputs are copied in, the chain of
segments is replayed, and the caller gets copies of the outputs. If there is no graph yet, the step runs eagerly a few
times (`warmup`), then it is recorded (`record`), and the recording is replayed at once. N calls train exactly N steps,
replayed or eager.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import CaptureError, ClosedError, InvalidArgument, StepgraphError
from stepgraph.core.frames import untraced, warn_user
from stepgraph.core.tensor_attributes import refuse_unlike_buffers
from stepgraph.core.tracebacks import entry_point, trim
from stepgraph.core.tree import CallFlattener, Structure, flatten
from stepgraph.engine.backends import Backend
from stepgraph.engine.call.backend_choice import choose_backend, refuse_other_devices
from stepgraph.engine.call.failure import capture_error, cause_of, is_programs_own
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.call.messages import (
    keeps_changing,
    refuse_second_thread,
    state_changed,
    warn_misspelt,
    warn_operations_changed,
    warn_other_answer,
    warn_values_changed,
)
from stepgraph.engine.call.proof import CallProof, NeedsEagerCall, Shown, next_audit, tell_other_path
from stepgraph.engine.call.report import GraphReport, outline
from stepgraph.engine.call.session import Session
from stepgraph.engine.guards.host_values.decisions import Answers, Trace, undecided
from stepgraph.engine.guards.protocol import Change, Remedy, told
from stepgraph.engine.guards.signature import (
    AmbientReader,
    Signature,
    argument_names,
    leaf_keys,
    reason_for_eager,
    refuse_opaque,
    transform_around,
)
from stepgraph.engine.memory.outputs import detached
from stepgraph.engine.observe.discovery import Reached
from stepgraph.engine.observe.finder import reachable
from stepgraph.engine.oplog import Difference, is_logged
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.engine.optim.optimizer import make_capturable
from stepgraph.engine.step.arguments import on_device
from stepgraph.engine.step.binding import BoundSteps, has_own_name, options_of_copy
from stepgraph.engine.step.bucketing import Bucketing, Example
from stepgraph.engine.step.call import CallArgs, CapturedCall
from stepgraph.engine.step.definitions import forget_capture, note_capture
from stepgraph.engine.step.eviction import REASON, Action, Sites
from stepgraph.engine.step.nonfinite import FlagReader
from stepgraph.engine.step.options import StepOptions
from stepgraph.engine.step.record import Recorded, StepCapture
from stepgraph.engine.step.rehearsal import Rehearsal
from stepgraph.engine.step.report import Counts, Report, report_of
from stepgraph.engine.step.site import LastCall, Site
from stepgraph.engine.step.warmup import WarmUp, flags_of, surroundings

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Fallback(Protocol):
    """What a step goes on with after a failed capture, other than plain eager calls."""

    def begin(self) -> str:
        """Begin, after a failed capture. Return how the step goes on, for a warning."""

    def run(self, site: Site, call: Callable[[], Any]) -> Any:
        """Make an eager call of the step."""

    def report(self) -> GraphReport:
        """Report what is graphed in eager calls of the step, and what is not."""

    def close(self) -> None:
        """Free all graphs. After the next failed capture another one is made."""


_HARMLESS = frozenset(("late-optimizer",))
"""Rules of steps that are right in eager and have no graph: as for calls past `max_graphs`, only `strict` raises."""
_MAX_NEW_ANSWERS = 8
"""Other answers of a step to what it asks of host values that each get a graph, before its calls rest."""
MakeFallback = Callable[[str, Session, StepOptions], Fallback]


class _Life(enum.Enum):
    NEW = "no call has come yet"
    OPEN = "the backend is chosen"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a step was made with, for its copies and for the steps of instances."""

    arguments: tuple[str, ...]
    session: Session | None
    backend: Backend | str | None
    fallback: MakeFallback | None
    bound: BoundSteps


class CapturedStep(Generic[P, R]):
    """A captured step. Call it like the function; see `stepgraph.capture`."""

    def __init__(
        self,
        function: Callable[P, R],
        options: StepOptions,
        session: Session | None,
        backend: Backend | str | None,
        fallback: MakeFallback | None = None,
    ) -> None:
        """`fallback` makes what the step goes on with under `on_error="modules"`."""
        functools.update_wrapper(self, function)
        name, arguments = getattr(function, "__name__", type(function).__name__), argument_names(function)
        self._function, self._options = function, options
        self._origin = _Origin(arguments, session, backend, fallback, BoundSteps(name))
        self._session = session if session is not None else Session()
        self._capture = StepCapture(name, function, self._session, options)
        self._sites = Sites(name, options, self._session)
        self._last: LastCall | None = None
        """A description of the last replayed call, for a fast match."""
        self._flatten = CallFlattener()
        self._counts = Counts()
        self._ambient = AmbientReader(observers=True)
        self._fallback: Fallback | None = None
        self._flags = FlagReader(name)
        buckets = options.buckets
        self._bucketing = Bucketing(function, name, arguments, buckets) if buckets is not None else None
        self._life = _Life.NEW
        self._session.when_dropped(self._forget_graphs)
        self._session.when_closed(self._flags.drain)

    @property
    def _name(self) -> str:
        return self._capture.name

    @property
    def _is_closed(self) -> bool:
        return self._life is _Life.CLOSED or self._session.closed

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> CapturedStep[P, R]: ...
    @overload
    def __get__(
        self: CapturedStep[Concatenate[Any, Q], R], instance: object, owner: type | None = ...
    ) -> CapturedStep[Q, R]: ...
    @untraced
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a captured method: each instance gets its own captured step."""
        return self if instance is None else self._origin.bound.of(instance, lambda: self._bind(instance, owner))

    def _bind(self, instance: Any, owner: type | None) -> CapturedStep[..., Any]:
        origin, bound = self._origin, self._function.__get__(instance, owner)
        return CapturedStep(bound, self._options, origin.session, origin.backend, origin.fallback)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedStep[P, R]:
        """Make a step of the copied function, without graphs. A session passed by the user is shared."""
        if has_own_name(self):
            return self
        function = copy.deepcopy(self._function, memo)
        if id(self) not in memo:  # the function's object may hold this step
            options, origin = options_of_copy(self._options, memo), self._origin
            memo[id(self)] = CapturedStep(function, options, origin.session, origin.backend, origin.fallback)
        return cast("CapturedStep[P, R]", memo[id(self)])

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a step of the same function, without graphs and with a new session."""
        if has_own_name(self):
            return str(vars(self)["__qualname__"])
        backend = self._origin.backend
        wanted = backend.name if isinstance(backend, Backend) else backend
        return _unpickled, (self._function, self._options, wanted, self._origin.fallback)

    def __repr__(self) -> str:
        graphs = sum(len(site.calls) for site in self._sites.values())
        counts, is_closed = self._counts, self._is_closed
        return outline(f"captured {self._name}", counts.calls, counts.replays, graphs, is_closed=is_closed)

    # -- calling

    @untraced
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step once: replay a graph that fits, or run eagerly if there is none yet."""
        calling = self._session.calling
        is_alone = calling.acquire(False)
        try:
            if not is_alone:
                refuse_second_thread(self._name)
            last = self._last
            if last is not None and not self._session.closed:
                known = last.fast_match.leaves_of(args, kwargs)
                if known is not None and self._ambient.read() is last.ambient and not self._is_capturing():
                    if self._flags.pending:
                        self._flags.check()
                    result: R
                    for call in last.site.calls:
                        if call.is_untouched():
                            if call.replays != call.proof.due:
                                result = self._run_untouched(call, known)
                            else:
                                result = self._audit(last.site, call, CallArgs(known, last.structure, (args, kwargs)))
                            return result
                    found = last.site.find()
                    if found is not None:
                        result = self._replay(last.site, found, CallArgs(known, last.structure, (args, kwargs)))
                        return result
            if self._session.closed or self._life is not _Life.OPEN:
                self._settle((args, kwargs))
            ambient = self._ambient.read()
            if (transform := transform_around(ambient)) is not None:
                self._counts.eager_reasons[transform] += 1
                return self._function(*args, **kwargs)
            leaves, structure = self._flatten(args, kwargs)
            if self._bucketing is None:
                return cast(R, self._dispatch(CallArgs(leaves, structure, (args, kwargs)), ambient))
            padded = self._bucketing.pad(leaves, structure)
            whole = self._dispatch(CallArgs(padded.leaves, structure, None), ambient)
            result = self._bucketing.cut(padded, structure, whole)
            if self._options.nan_check == "device" and not self._is_capturing():
                self._flags.post(self._counts.calls, self._bucketing.flags(whole, result), self._session.backend)
            return result
        except StepgraphError as error:
            self._counts.refused[error.rule] += 1
            trim(error)
            raise
        finally:
            if is_alone:
                calling.release()

    def _dispatch(self, given: CallArgs, ambient: tuple[Hashable, ...]) -> Any:
        leaves, structure = given.leaves, given.structure
        if self._is_capturing() or is_logged():  # called inside another captured step, as a part of it
            return self._call(given, leaves)
        if self._flags.pending:
            self._flags.check()
        keys = leaf_keys(leaves, gradients=True, on=self._session.backend.device.type)
        site = self._sites.get((structure, keys, ambient))
        if site is not None and site.learnt.written and (apart := site.keys_apart(keys, leaves)) is not None:
            keys, site = apart, self._sites.get((structure, apart, ambient))
        if site is not None:
            call = site.find()
            if call is not None:
                on = self._session.backend.device.type
                self._last = site.last_call(*given.own, ambient, structure, on) if given.own is not None else None
                return self._replay(site, call, given)
        return self._without_graph(site, given, keys, ambient)

    def _replay(self, site: Site, call: CapturedCall, given: CallArgs) -> Any:
        changes = call.guards.changed()
        remedy = changes[0].remedy if changes else None
        if remedy is Remedy.START_OVER:
            return self._start_over(site, told(changes), given)
        if call.proof.shown is Shown.LATER and not self._is_shown_now(site, call):
            return self._warm_up(site, "comparison", given)
        match remedy:
            case Remedy.AUDIT:
                return self._audit(site, call, given, changes)
            case Remedy.RECAPTURE:
                self._raise_if_strict(site, told(changes))
                return self._recapture(site, call, told(changes), given)
            case Remedy.MOVE_OUT:
                self._capture.moved.update((id(change.subject), str(change)) for change in changes)
                return self._recapture(site, call, told(changes), given)
        if call.replays == call.proof.due:
            return self._audit(site, call, given)
        call.write_row(self._counts.replays)
        return self._run(call, given.leaves)

    def _is_shown_now(self, site: Site, call: CapturedCall) -> bool:
        """Check that a graph recorded ahead has the operations of an eager call of its kind: only then use it."""
        eager = site.eager.logs.of(site.kind())
        if eager and self._capture.logs.agree(eager[-1], call.proof.log, call.proof.between):
            call.proof.shown = Shown.EQUAL
            return True
        if eager:  # it is captured again, as any other
            site.calls.remove(call)
            call.parts.chain.free()
        return False

    def _audit(self, site: Site, call: CapturedCall, given: CallArgs, changes: Sequence[Change] = ()) -> Any:
        """Record the call again, and compare: because an audit is due, or because of `changes`."""
        trace, at_code = site.predicates.traced(call.traceable(changes)), bool(changes) or call.replays <= 1
        before = call.host_values()
        try:
            with interrupts_held() as raise_held:
                audit = self._capture.audit(site, call, given, raise_held, trace, at_code=at_code)
                own = call.own_changes(changes, {change.name for _, change in site.eager.own_changes})
                if audit.found is None:
                    self._capture.agree(site, call, audit.recorded, changes, audit.trace)
                elif audit.has_new or self._is_other_answer(changes, audit.trace):
                    audit.recorded.made.drop()
        except NeedsEagerCall:
            before.restore()
            if self._is_other_answer(changes, trace):
                return self._other_answer(site, call, trace, changes, given)
            return self._start_over(site, "the step does something that no eager call did", given)
        except Exception as error:  # noqa: BLE001 (as in a capture)
            site.drop_graphs()
            return self._not_captured(site, error, given)
        self._counts.audits += 1
        if audit.found is None:
            result = self._run(call, given.leaves)
            self._rest(site)
        elif self._is_other_answer(changes, audit.trace):
            before.restore()
            return self._other_answer(site, call, trace, changes, given)
        else:
            recorded = None if audit.has_new else audit.recorded
            result = self._operations_changed(site, call, recorded, audit.found, changes, given)
        if own and site.calls:  # the step now changes host values, which no replay repeats: let warm-up see and name it
            site.drop_graphs()
            site.start_over(credit=self._options.warmup - 1)
        return result

    def _is_other_answer(self, changes: Sequence[Change], trace: Trace | None) -> bool:
        """Check whether all that has changed is the answer to something that the step asks of host values."""
        return trace is not None and bool(changes) and not undecided(changes, trace)

    def _other_answer(
        self, site: Site, call: CapturedCall, trace: Trace, changes: Sequence[Change], given: CallArgs
    ) -> Any:
        """Make a call with another answer than the graph's: calls of its kind get a graph of their own."""
        self._raise_if_strict(site, told(changes))
        call.answers.refuse(trace.decisions())
        site.predicates.learn(trace.decisions())
        site.predicates.new_answers += 1
        if site.predicates.new_answers > _MAX_NEW_ANSWERS:
            self._keep_eager(site, [change.name for change in changes])
        else:
            names = {change.name for change in changes}
            if not self._capture.restless.told.issuperset(names):
                self._capture.restless.told.update(names)
                warn_other_answer(self._name, changes, "step", "get a graph of their own, after a warm-up")
        _, keys, ambient = site.place
        return self._without_graph(site, given, keys, ambient)

    def _rest(self, site: Site) -> None:
        """After an audit without an effect: stay eager for a while if a value changes too often for audits."""
        names = self._capture.restless.names
        if names:
            if self._options.strict:
                raise keeps_changing(self._name, names, site.touched.ran.codes())
            self._keep_eager(site, names)

    def _keep_eager(self, site: Site, names: Sequence[str]) -> None:
        """Let calls run eagerly for a while: a value changes so often that audits cost more than a graph gains."""
        site.obstacle, pause = f"host value keeps changing: {', '.join(names)}", site.changes.rest()
        site.predicates.untraceable.clear()  # the step may do something else with them by then
        told_before = self._capture.restless.paused
        if not told_before.issuperset(names):
            told_before.update(names)
            error = keeps_changing(self._name, names, site.touched.ran.codes())
            warn_user(f"{error}\nThe next {pause} calls like this one stay eager, then the step is tried again.")
        site.drop_graphs()

    def _operations_changed(
        self,
        site: Site,
        call: CapturedCall,
        recorded: Recorded | None,
        found: Difference,
        changes: Sequence[Change],
        given: CallArgs,
    ) -> Any:
        """Replace a graph by a new recording, since the step now runs other operations.

        `recorded` is None if the step touches objects that no eager call has shown: then the step starts over.
        """
        why = told(changes) or str(found)
        names = [change.name for change in changes] or [str(found.where or found.operation)]
        often = site.changes.weigh(names, call.replays)
        if recorded is not None and self._options.strict:
            recorded.made.drop()
        self._raise_if_strict(site, why)
        pause = site.changes.pause if often else 0
        replays = call.replays - call.proof.agreed
        warn_operations_changed(self._name, found, changes, replays, stays_eager=bool(often), pause=pause)
        site.obstacle = f"the operations keep changing: {', '.join(often)}" if often else None
        if recorded is None:
            if site.obstacle is None:
                return self._start_over(site, why, given)
            site.drop_graphs()
            return self._eager(site, site.obstacle, given)
        site.calls.remove(call)
        call.parts.chain.free()
        self._counts.recapture_reasons[why] += 1
        self._counts.captures += 1
        due = next_audit(self._options.audit, 0)
        proof = CallProof(recorded.made.log, call.proof.shown, due, between=recorded.between)
        new = self._capture.keep(site, recorded, proof, Answers())
        site.calls.insert(0, new)
        result = self._run(new, given.leaves)  # even if the step stays eager: its Python has run for this call
        if often:
            site.drop_graphs()
        return result

    def _run(self, call: CapturedCall, leaves: Sequence[Any]) -> Any:
        call.replay(leaves)
        call.replays += 1
        self._counts.replays += 1
        if call.flags is not None:
            self._flags.post(self._counts.calls, call.flags, self._session.backend)
        return call.hand_out()

    def _run_untouched(self, call: CapturedCall, leaves: Sequence[Any]) -> Any:
        if call.straight is None:
            return self._run(call, leaves)
        call.replays += 1
        self._counts.replays += 1
        return call.straight(leaves)

    def _recapture(self, site: Site, call: CapturedCall, why: str, given: CallArgs) -> Any:
        """Record the same call again, without warm-up: the objects that it touches are known."""
        site.calls.remove(call)
        call.parts.chain.free()
        self._counts.recapture_reasons[why] += 1
        return self._capture_and_replay(site, given)

    def _start_over(self, site: Site, why: str, given: CallArgs) -> Any:
        """Run this call eagerly, since the model changed, and observe it. The next call is captured."""
        self._raise_if_strict(site, why)
        self._counts.recapture_reasons.update([why] if site.calls or site.was_captured else [])
        site.drop_graphs()
        site.start_over(credit=self._options.warmup - 1)
        return self._warm_up(site, f"changed: {why}", given)

    def _values_changed(self, site: Site, changes: Sequence[Change], given: CallArgs) -> Any:
        """Capture again because a baked-in host value changed, or stay eager for a while if that happens often."""
        self._raise_if_strict(site, told(changes))
        names = [change.name for change in changes]
        often = site.changes.weigh(names, site.most_replays)
        is_captured = bool(site.calls) or site.was_captured
        pause = site.changes.pause if often else 0
        warn_values_changed(self._name, changes, is_captured=is_captured, pause=pause)
        if not often:  # the step may touch other objects now: observe it again
            return self._start_over(site, told(changes), given)
        site.drop_graphs()
        site.obstacle = f"host value keeps changing: {', '.join(often)}"
        return self._eager(site, site.obstacle, given)

    def _raise_if_strict(self, site: Site, why: str) -> None:
        if self._options.strict and (site.calls or site.was_captured):
            raise state_changed(self._name, why)

    def _without_graph(
        self,
        site: Site | None,
        given: CallArgs,
        keys: tuple[Hashable, ...],
        ambient: tuple[Hashable, ...],
    ) -> Any:
        self._check_open()
        leaves, structure = given.leaves, given.structure
        if site is None:
            refuse_opaque(leaves)
            call = Signature(structure, keys, ambient, arguments=self._origin.arguments)
            site = Site(call)
            site.obstacle = reason_for_eager(ambient) or self._unlike_buffers(call, leaves)
        if site.obstacle is not None and site.changes.is_pause_over():  # what kept changing may rest by now
            site.obstacle = None
            site.start_over(credit=self._options.warmup - 1)
        if self._session.grads.are_exchanged(site.touched.parameters):
            self._counts.eager_reasons["a parameter has the gradient of another one"] += 1
            return self._run_eagerly(site, given)
        decision = self._sites.decide((structure, keys, ambient), site)
        if decision.action is Action.EAGER:
            return self._eager(site, decision.reason, given)
        if decision.action is Action.CAPTURE:
            return self._capture_and_replay(site, given)
        site.keep(leaves)
        return self._warm_up(site, decision.reason, given)

    def _unlike_buffers(self, call: Signature, leaves: Sequence[Any]) -> str | None:
        """Refuse arguments that no buffer can replace; under `on_error`, return why calls with them stay eager."""
        try:
            refuse_unlike_buffers(leaves, call.names())
        except InvalidArgument as error:
            if not self._options.goes_on_eagerly:
                raise
            return f"{error.what}   [{error.rule}]"
        return None

    def _warm_up(self, site: Site, reason: str, given: CallArgs) -> Any:
        try:
            self._capture.refuse_sharded(site)
        except CaptureError as error:
            return self._not_captured(site, error, given, has_parts=False)
        reached, self._capture.reached = self._capture.reached, None
        modes = site.modes()
        self._sites.before_warm_up(given.leaves)
        others = [other for other in self._sites.values() if other is not site]
        call = WarmUp(self._function, given, site, self._session, self._options)
        result, flags = call.run(self._capture.logs, others, reached)
        site.count_warm_call(modes)
        self._capture.look(site)
        self._counts.eager_reasons[reason] += 1
        self._flags.post(self._counts.calls, flags, self._session.backend)
        return result

    def _capture_and_replay(self, site: Site, given: CallArgs) -> Any:
        if self._bucketing is None:
            return self._capture_one(site, given)
        larger, smaller = self._bucketing.others(given.leaves, given.structure)
        for example in larger:
            self._capture_ahead(site, example, given.structure)
        result = self._capture_one(site, given)
        for example in smaller if site.calls else ():
            self._capture_ahead(site, example, given.structure)
        return result

    def _capture_ahead(self, site: Site, example: Example, structure: Structure) -> None:
        """Record a bucket that had no call yet. If that fails, the first call of the bucket reports why."""
        choice, leaves = example
        keys = leaf_keys(leaves, gradients=True, on=self._session.backend.device.type)
        place = (structure, keys, self._ambient.read())
        other = self._sites.get(place) or site.sibling(site.sign_as(keys), self._options.warmup)
        if other.find() is not None:
            return
        with contextlib.suppress(NeedsEagerCall, Exception), interrupts_held() as raise_held:
            call = self._capture.run(other, CallArgs(leaves, structure, None), raise_held, ahead=True)
            other.calls.insert(0, call)
            self._sites.add(place, other)
            self._counts.captures += 1
        if other.calls and self._bucketing is not None:
            self._bucketing.note(structure, choice, leaves, other.calls[0].parts.outputs.tree)

    def _capture_one(self, site: Site, given: CallArgs) -> Any:
        begun = time.perf_counter()
        dropped = self._sites.before_capture(given.leaves)
        self._counts.recapture_reasons.update({REASON: dropped} if dropped else {})
        with contextlib.ExitStack() as held:
            raise_held = held.enter_context(interrupts_held())
            try:
                call = self._capture.run(site, given, raise_held)
            except NeedsEagerCall as cold:
                held.close()
                if cold.values:
                    return self._values_changed(site, cold.values, given)
                if cold.rebuilt is not None:
                    return self._start_over(site, cold.rebuilt, given)
                return self._warm_up(site, "warm-up", given)
            except Exception as error:  # noqa: BLE001 (a failed capture is rolled back, whatever the error)
                held.close()
                return self._not_captured(site, error, given)
            self._counts.captures += 1
            site.calls.insert(0, call)
            self._session.backend.synchronize()
            self._counts.capture_seconds += time.perf_counter() - begun
            if self._counts.captures == 1:
                warn_misspelt(self._options.ignore, call.labels)
                if self._origin.fallback is not None:  # not a copy that a comparison has made
                    note_capture(self, self._name, self._function, site.touched.parameters)
            self._capture.output.warn(self._name)
            if call.proof.other_path is not None:
                tell_other_path(self._name, call.proof.other_path, strict=False)
            return self._run(call, given.leaves)

    def _not_captured(self, site: Site, error: Exception, given: CallArgs, *, has_parts: bool = True) -> Any:
        """Raise the error of a failed recording, or go on in eager. The recording has restored everything.

        `has_parts`: modules of the step may get graphs under `on_error="modules"`.
        """
        if is_programs_own(error):
            return self._call_as_eager(site, error, given)
        raised = capture_error(self._name, error, self._session.backend)
        is_harmless = raised.rule in _HARMLESS and not self._options.strict
        if not self._options.goes_on_eagerly and not is_harmless:
            raise raised from cause_of(raised, error)
        site.obstacle = f"capture failed: [{raised.rule}]"
        warn_user(f"{raised}\nThe step goes on {self._begin_fallback() if has_parts else 'in eager'}.")
        return self._eager(site, site.obstacle, given)

    def _call_as_eager(self, site: Site, error: Exception, given: CallArgs) -> Any:
        """Make the call eagerly, after the step raised an exception of the program's own: the program may expect it."""
        self._counts.eager_reasons[f"the step raised {type(error).__name__}"] += 1
        result = self._run_eagerly(site, given)
        site.obstacle = "capture failed: [step-raised]"  # eager raises nothing: the code asks whether it is captured
        warn_user(f"{capture_error(self._name, error, self._session.backend)}\nThe step goes on in eager.")
        return result

    def _begin_fallback(self) -> str:
        """Make what the step goes on with, where it is wanted. Return how the step goes on."""
        make, options = self._origin.fallback, self._options
        if make is None or options.on_error != "modules" or not options.goes_on_eagerly:
            return "in eager"
        if self._fallback is None:
            self._fallback = make(self._name, self._session, options)
        return self._fallback.begin()

    def _eager(self, site: Site, reason: str, given: CallArgs) -> Any:
        if site.obstacle is None:
            self._sites.report_past_limit(reason, site)
        self._counts.eager_reasons[reason] += 1
        return self._run_eagerly(site, given)

    def _run_eagerly(self, site: Site, given: CallArgs) -> Any:
        moved = on_device(given.leaves, self._session.backend)
        flags = flags_of(site, self._options, self._function)
        with surroundings(self._options.optimizer, self._session.backend), flags.at_optimizers():
            if self._fallback is None:
                result = self._call(given, moved)
            else:
                result = self._fallback.run(site, lambda: self._call(given, moved))
            found = flags.finish(result, site.touched.parameters, zip(site.sign().names(), moved, strict=True))
        self._flags.post(self._counts.calls, found, self._session.backend)
        return detached(result)

    def _call(self, given: CallArgs, leaves: Sequence[Any]) -> Any:
        args, kwargs = given.with_leaves(leaves)
        return cast(Callable[..., Any], self._function)(*args, **kwargs)

    def run_plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function itself, without graphs and uncounted: the reference that replays are compared with."""
        function = cast(Callable[..., Any], self._function)
        if self._options.optimizer != "capturable":
            return function(*args, **kwargs)
        if self._life is _Life.NEW:
            self._settle((args, kwargs))
        backend = self._session.backend

        def before_step(optimizer: Optimizer) -> None:
            make_capturable(optimizer, backend.device)

        with surroundings("capturable", backend), at_optimizer_steps(before_step):
            return function(*args, **kwargs)

    # -- setting up

    def _settle(self, call_tree: tuple[Any, Any]) -> None:
        """Choose the backend from what the step uses, at the first call."""
        self._check_open()
        leaves, _ = flatten(call_tree)
        objects = reachable(self._function)
        self._capture.reached = Reached(self._function, objects)
        self._session.settle(choose_backend(objects, leaves, self._origin.backend, self._session))
        self._is_capturing = self._session.backend.capture_probe
        refuse_other_devices(self._name, objects, leaves, self._session.backend)
        self._life = _Life.OPEN

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(
                f"{self._name}: this captured step was closed",
                rule="closed",
                why="close() freed its graphs.",
                fix="capture the step again: step = stepgraph.capture(train_step).",
            )

    # -- looking and ending

    @property
    def function(self) -> Callable[P, R]:
        """The function that was captured."""
        return self._function

    @property
    def options(self) -> StepOptions:
        """The options that the step was captured with."""
        return self._options

    def capture_like(self, function: Callable[..., Any]) -> CapturedStep[..., Any]:
        """Capture another function with the same options, in a session of its own."""
        return CapturedStep(function, self._options, None, self._origin.backend, self._origin.fallback)

    @property
    def replays(self) -> int:
        """Replayed calls so far; cheaper than a report."""
        return self._counts.replays

    @property
    def audits(self) -> int:
        """Audits so far; cheaper than a report."""
        return self._counts.audits

    def report(self) -> Report:
        """Return a report of graphs, replays, eager calls with their reasons, time and memory."""
        sites = list(self._sites.values())
        placements = self._capture.describe_placements(sites)
        found = report_of(self._name, self._session, sites, self._counts, placements, self._options)
        return found if self._fallback is None else replace(found, modules=self._fallback.report())

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Forget at the end of the block what calls in it have taught the step, except how often they were counted.

        If graphs were captured in the block, all are dropped: they may use state that is gone, and leave optimizers
        out whose numbers have changed there.
        """
        moved, captures = dict(self._capture.moved), self._counts.captures
        try:
            yield
        finally:
            if self._counts.captures != captures:
                self.reset()
                self._capture.moved.clear()
                self._capture.moved.update(moved)

    @contextlib.contextmanager
    def without_audits(self) -> Iterator[None]:
        """Put off audits of the graphs that there are now until the end of the block: they would mend a wrong graph."""
        calls = [call for site in self._sites.values() for call in site.calls]
        for call in calls:
            call.proof.due = -1
        try:
            yield
        finally:
            for call in calls:
                call.proof.due = next_audit(self._options.audit, call.replays)

    def rehearsal(self, *args: P.args, **kwargs: P.kwargs) -> Rehearsal | None:
        """Return a way to record this call again without effect, for `stepgraph.frozen`.

        None if no graph serves the call as things are now: there is none yet, or its guards have found a change.
        """
        if self._is_closed or self._life is not _Life.OPEN:
            return None
        leaves, structure = self._flatten(args, kwargs)
        if self._bucketing is not None:
            leaves = self._bucketing.pad(leaves, structure).leaves
        keys, ambient = leaf_keys(leaves, gradients=True, on=self._session.backend.device.type), self._ambient.read()
        site = self._sites.get((structure, keys, ambient))
        call = site.find() if site is not None and site.keys_apart(keys, leaves) is None else None
        if site is None or call is None or call.proof.shown is Shown.LATER or call.guards.changed():
            return None
        given = CallArgs(leaves, structure, None)
        return Rehearsal(self._capture, site, call, given, self._session.backend)

    def fresh_copy(self) -> CapturedStep[P, R]:
        """Return a captured step of the same function with the same options, without graphs, in its own session."""
        options = replace(self._options, on_error="raise", strict=False)
        return CapturedStep(self._function, options, None, self._origin.backend)

    def reset(self) -> None:
        """Drop all graphs. The next calls warm up and capture again."""
        for site in self._sites.values():
            site.drop_graphs()
        self._sites.clear()
        self._last = self._capture.reached = None
        if self._fallback is not None:
            self._fallback.close()
            self._fallback = None

    def reset_where(self, holds: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
        """Drop the graphs of calls whose arguments, other than tensors, pass a test. Return the arguments of the rest.

        Arguments are given by name. The next calls of the dropped kinds warm up and capture again.
        """
        for site in [site for site in self._sites.values() if holds(site.keep_alive)]:
            site.drop_graphs()
            self._sites.remove(site)
        self._last = None
        return [site.keep_alive for site in self._sites.values()]

    def _forget_graphs(self) -> None:
        """Start over, since the session has dropped all graphs."""
        for site in self._sites.values():
            site.start_over(credit=0)

    @entry_point
    def close(self) -> None:
        """Free the graphs, and the session if the step made it. A second call does nothing."""
        self._end()
        self._flags.check(wait=True)

    def _end(self) -> None:
        if self._life is not _Life.CLOSED:
            self.reset()
            self._life = _Life.CLOSED
            self._capture.close()
            forget_capture(self, self._function)
            if self._origin.session is None:
                self._session.close(tell=False)

    def __enter__(self) -> CapturedStep[P, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()  # do not hide the error that is being raised


def _unpickled(
    function: Callable[..., Any], options: StepOptions, backend: str | None, fallback: MakeFallback | None = None
) -> CapturedStep[..., Any]:
    if isinstance(function, CapturedStep):  # a captured method, pickled by its name
        return function
    return CapturedStep(function, options, None, backend, fallback)
