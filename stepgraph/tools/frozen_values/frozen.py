"""`stepgraph.frozen` lists the host values that a graph has baked in, and says which of them somebody watches.

Python runs when a step is recorded, and not when it is replayed. A number that the step reads is then a constant of the
graph, and a flag has chosen which operations are in it. Whether it is so can be tried: move the value, record the step
again, which has no effect, and compare the two recordings, operation by operation, and on CUDA node by node. What
differs is where the value enters. Then the graph in use is asked whether its guards notice the move. A value in the
graph that nobody watches is a finding.

One number is moved at a time where there are few. Where there are many, groups are moved together and halved while
something differs. Flags are always moved one by one: of two that are flipped together, one may hide the other (`if
enabled and verbose`). All values are put back, also when the step raises.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.core.errors import CaptureError, CaptureRefused, Location, StepgraphWarning, refusal_in
from stepgraph.core.frames import error_location
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.tree import flatten
from stepgraph.engine.backends.nodes import NodeDifference, lasting, node_differences
from stepgraph.engine.call.proof import NeedsEagerCall
from stepgraph.engine.guards.protocol import Change, Remedy
from stepgraph.engine.oplog import Difference, differences
from stepgraph.engine.step.capture import capture
from stepgraph.engine.step.rehearsal import Rehearsal, Rehearsed
from stepgraph.engine.step.step import CapturedStep
from stepgraph.tools.checks.host_values import HostValue, host_values
from stepgraph.tools.frozen_values.frozen_report import Entry, FrozenReport, FrozenValue, State
from stepgraph.tools.frozen_values.number_origins import unexplained_numbers
from stepgraph.tools.program import program_of

__all__ = ["examine", "frozen", "judge"]

_FEW = 16
"""Numbers that are moved one at a time."""
MAX_RECORDINGS = 256
MAX_SECONDS = 120.0
"""Limits of one examination. What they leave open is watched, or `unknown`."""
_TURNS = 3
"""How often bytes of nodes must follow a value that no operation shows."""
_MAX_NUMBERS = 5
_UNEXPLAINED = "Computed from constants, or out of reach of the watch (docs/limits.md):"
_MAX_CALLS = 12
"""Calls after which a step without a graph is given up."""
_OWN_COPY = "No graph of the captured step serves this call yet: a copy with the same options was captured."
_PLAIN_STEP = "The step is not captured: the report is about stepgraph.capture(step)."
_HOST_TENSOR = "a tensor on the host: kernels are given its value; keep it on the device"
_REMEDIES = {
    Remedy.START_OVER: "a change: captured again",
    Remedy.AUDIT: "a change: recorded again",
    Remedy.RECAPTURE: "a change: recorded again",
    Remedy.MOVE_OUT: "a change: the optimizer leaves the graph",
}


@entry_point
def frozen(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> FrozenReport:
    """Return a report of the host values that a graph of this step has baked in, and whether they are watched.

    Example:
        >>> print(stepgraph.frozen(train_step, batch))    # a function, or a captured step
        >>> assert not stepgraph.frozen(train_step, batch).findings

    A captured step with a graph for these arguments is asked itself. Otherwise the step is called a few times, captured
    by a `stepgraph.capture` of its own, and the program's state is restored.
    """
    return examine(step, args, kwargs)


def examine(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FrozenReport:
    """Do what `frozen` does, and also set these environment variables. `progress` is told of values done, of all."""
    with _rehearsing(step, args, kwargs) as (rehearsal, notes):
        return _Examination(rehearsal, env or {}, progress).report(notes)


@contextlib.contextmanager
def _rehearsing(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Rehearsal, tuple[str, ...]]]:
    """Yield a rehearsal of the call, and notes on it: of the step's own graph, or of one that is made for it."""
    own = step.rehearsal(*args, **kwargs) if isinstance(step, CapturedStep) else None
    if own is not None:
        yield own, ()
        return
    made = step.fresh_copy() if isinstance(step, CapturedStep) else capture(step)
    leaves, _ = flatten((args, kwargs))
    with program_of(step, leaves).untouched(), made, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", StepgraphWarning)
        rehearsal = None
        for _ in range(_MAX_CALLS):
            made(*args, **kwargs)
            rehearsal = made.rehearsal(*args, **kwargs)
            if rehearsal is not None:
                break
        if rehearsal is None:
            reasons = ", ".join(made.report().eager_reasons)
            raise CaptureError(
                f"{made!r}: no graph serves this call after {_MAX_CALLS} calls ({reasons})",
                rule="varying-operations",
            )
        told = tuple(dict.fromkeys(str(warning.message) for warning in seen))
        yield rehearsal, (_OWN_COPY if isinstance(step, CapturedStep) else _PLAIN_STEP, *told)


@dataclass(frozen=True, slots=True)
class _Effect:
    """The effect of moving a value."""

    moved_to: Any
    operations: tuple[Difference, ...] = ()
    nodes: tuple[NodeDifference, ...] = ()
    failure: str = ""
    where: Location | None = None

    @property
    def is_none(self) -> bool:
        return not (self.operations or self.nodes or self.failure)


class _Examination:
    """Moves the values of one step and records it."""

    def __init__(self, rehearsal: Rehearsal, env: Mapping[str, str], progress: Callable[[int, int], None]) -> None:
        self._rehearsal, self._progress = rehearsal, progress
        self._recordings, self._until = 0, time.monotonic() + MAX_SECONDS
        self._host = host_values(rehearsal, env)
        self._items = self._host.values
        with self._moved():
            self._base = self._record()
        with self._moved():
            second = self._record()
        self._noise = _node_differences(self._base, second)
        self._varying = list(differences(self._base.log, second.log))
        self._drifted = list(differences(rehearsal.log, self._base.log))
        self._effects: dict[str, _Effect | None] = {}
        """By name; None if no recording was left to find out."""

    def report(self, notes: Sequence[str]) -> FrozenReport:
        noticed, obstacles = self._ask()
        movable = [n for n in self._items if n.near and (n.put or n.argument is not None) and n.name not in obstacles]
        movable.sort(key=lambda item: (item.name in noticed, item.is_flag))  # those that may be findings come first
        for _, batch in itertools.groupby(movable, lambda item: (item.name in noticed, item.is_flag)):
            self._resolve(list(batch), self._near)
        idle = [n for n in movable if n.far and (e := self._effects.get(n.name)) is not None and e.is_none]
        self._resolve(idle, self._far)
        values = [self._value(n, noticed.get(n.name), obstacles.get(n.name, n.obstacle)) for n in self._items]
        order = list(State)
        values = [*self._out_of_reach(), *sorted(values, key=lambda value: order.index(value.state))]
        has_nodes = bool(self._base.nodes) and all(nodes is not None for nodes in self._base.nodes)
        notes = [*notes, *self._unexplained()]
        if self._host.is_cut_short:
            notes = [*notes, "The step can name too many objects: not all were searched for values."]
        compared = "operations and nodes" if has_nodes else "operations"
        rehearsal = self._rehearsal
        return FrozenReport(
            rehearsal.name, rehearsal.backend.name, tuple(values), self._recordings, compared, tuple(notes)
        )

    @contextlib.contextmanager
    def _moved(self, moves: Sequence[tuple[HostValue, Any]] = ()) -> Iterator[None]:
        """Move values during the block. They are put back, the last one first, however it ends."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._host.restore)
            for item, value in moves:
                assert item.put is not None
                stack.callback(item.put(value))
            yield

    def _record(self, leaves: Sequence[Any] | None = None) -> Rehearsed:
        self._recordings += 1
        return self._rehearsal.record(leaves)

    # -- asking the engine

    def _ask(self) -> tuple[dict[str, str], dict[str, str]]:
        """Move each value alone. Return how the engine notices it, and why others cannot be moved, by name."""
        noticed: dict[str, str] = {}
        obstacles: dict[str, str] = {}
        for item in self._items:
            if item.argument is not None:
                if item.others and self._rehearsal.has_other_graph(self._leaves_with(item, item.others[0])):
                    noticed[item.name] = "an argument: a graph for each value"
            elif item.is_compared and not self._rehearsal.is_ignored(item.name):
                noticed[item.name] = _REMEDIES[Remedy.AUDIT]
            elif item.put is not None and item.others:
                try:
                    with self._moved([(item, item.others[0])]):
                        changes = self._rehearsal.changes()
                except (AttributeError, TypeError, ValueError) as error:
                    obstacles[item.name] = f"it cannot be written: {error}"
                    continue
                if changes:
                    noticed[item.name] = _noticed(changes)
        return noticed, obstacles

    def _leaves_with(self, item: HostValue, value: Any) -> list[Any]:
        leaves = [leaf for _, leaf in self._rehearsal.arguments]
        assert item.argument is not None
        leaves[item.argument] = value
        return leaves

    # -- recording

    def _resolve(self, items: Sequence[HostValue], pick: Callable[[HostValue], Sequence[Any]]) -> None:
        """Find the effect of each value: alone, or in groups that are halved while they have an effect."""
        alone = [item for item in items if item.argument is not None or item.is_flag]
        others = [item for item in items if item.argument is None and not item.is_flag]
        groups = [others] if len(others) > _FEW else [[item] for item in others]
        groups += [[item] for item in alone]
        while groups:
            group = groups.pop(0)
            if self._is_spent():
                self._effects |= {item.name: self._effects.get(item.name) for item in group}
            elif len(group) == 1:
                self._settle(group[0], self._alone(group[0], pick(group[0])), pick)
            elif self._try([(item, pick(item)[0]) for item in group]).is_none:
                for item in group:
                    self._settle(item, _Effect(pick(item)[0]), pick)
            else:
                groups[:0] = [group[: len(group) // 2], group[len(group) // 2 :]]
            self._progress(len(self._effects), len(self._items))

    def _is_spent(self) -> bool:
        return self._recordings >= MAX_RECORDINGS or time.monotonic() > self._until

    def _settle(self, item: HostValue, effect: _Effect, pick: Callable[[HostValue], Sequence[Any]]) -> None:
        """Keep an effect. That a step fails far away from its numbers proves nothing."""
        if pick == self._near or not effect.failure:
            self._effects[item.name] = effect

    def _near(self, item: HostValue) -> Sequence[Any]:
        return item.near

    def _far(self, item: HostValue) -> Sequence[Any]:
        return item.far

    def _alone(self, item: HostValue, values: Sequence[Any]) -> _Effect:
        """Move one value: to the first value with which the step does not fail."""
        tried = [self._try([(item, values[0])])]
        while tried[-1].failure and len(tried) < len(values) and not self._is_spent():
            tried.append(self._try([(item, values[len(tried)])]))
        return tried[-1] if tried[-1].operations or tried[-1].nodes else tried[0]

    def _try(self, moves: Sequence[tuple[HostValue, Any]]) -> _Effect:
        """Record with these values moved, and compare."""
        _, value = moves[0]
        try:
            now = self._record_moved(moves)
            known = {(one.index, one.operation) for one in self._varying}
            found = [one for one in differences(self._base.log, now.log) if (one.index, one.operation) not in known]
            if len(now.log) != len(self._base.log):  # operations after the first difference have only changed places
                found = found[:1]
            nodes = self._following(moves, _node_differences(self._base, now), 1 if found else _TURNS)
        except NeedsEagerCall:
            return _Effect(value, failure="the step then does something that no eager call did")
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a step fails in any way when its values are moved)
            raised = refusal_in(error) or error
            where = raised.where if isinstance(raised, CaptureRefused | CaptureError) else error_location(raised)
            text = str(raised).partition("\n")[0]
            return _Effect(value, failure=f"another value raises: {type(raised).__name__}: {text}", where=where)
        return _Effect(value, tuple(found), tuple(nodes))

    def _record_moved(self, moves: Sequence[tuple[HostValue, Any]]) -> Rehearsed:
        argument = next((self._leaves_with(*move) for move in moves if move[0].argument is not None), None)
        with self._moved([move for move in moves if move[0].argument is None]):
            return self._record(argument)

    def _following(
        self, moves: Sequence[tuple[HostValue, Any]], nodes: list[NodeDifference], turns: int
    ) -> list[NodeDifference]:
        """Keep the differences that go when all is put back, and come again with the moves, turn after turn.

        Kernels are given structures with bytes that nobody wrote, left over from calls before. They change now and
        then, by chance together with a value. So there are more turns where only nodes tell that it has an effect.
        """
        nodes = lasting(nodes, nodes, self._noise)
        for _ in range(turns):
            if nodes:
                nodes = lasting(nodes, nodes, _node_differences(self._base, self._record_moved(())))
            if nodes:
                nodes = lasting(nodes, _node_differences(self._base, self._record_moved(moves)), ())
        return nodes

    # -- judging

    def _value(self, item: HostValue, noticed: str | None, obstacle: str) -> FrozenValue:
        effect = self._effects.get(item.name, _Effect(""))
        outside = {id(optimizer) for optimizer, is_outside in self._rehearsal.optimizers if is_outside}
        unwatched = _HOST_TENSOR if item.is_tensor else self._rehearsal.why_not_watched(item.name)
        state, reason = judge(item, effect, noticed, obstacle, unwatched, is_outside=id(item.optimizer) in outside)
        entries = () if effect is None else _entries_of(effect)
        moved = "" if effect is None or (effect.is_none and obstacle) else _told(effect.moved_to)
        nodes = () if effect is None else tuple(map(str, effect.nodes))
        return FrozenValue(item.name, _told(item.value), moved, state, reason, entries, nodes)

    def _unexplained(self) -> Iterator[str]:
        """Say which numbers of the recording come from no value that was moved."""
        ran = self._rehearsal.ran
        if not ran.is_known:  # so are the constants of the code
            return
        moved = {one.index for effect in self._effects.values() if effect is not None for one in effect.operations}
        told = [str(entry) for entry in unexplained_numbers(self._base.log, moved, ran.codes())]
        if told:
            more = f", and {len(told) - _MAX_NUMBERS} more" if len(told) > _MAX_NUMBERS else ""
            yield f"{_UNEXPLAINED} {', '.join(told[:_MAX_NUMBERS])}{more}."

    def _out_of_reach(self) -> Iterator[FrozenValue]:
        """Values that no name was found for: the operations differ although nothing was moved."""
        for found, when in ((self._drifted, "since the capture"), (self._varying, "from recording to recording")):
            if found:
                effect = _Effect("", tuple(found))
                reason = f"changed {when}, and no name in reach explains it: a file, the time, another process"
                yield FrozenValue("(out of reach)", "", "", State.BAKED, reason, _entries_of(effect))


def judge(
    item: HostValue, effect: _Effect | None, noticed: str | None, obstacle: str, unwatched: str, *, is_outside: bool
) -> tuple[State, str]:
    """Decide what a graph does with a value, and say why. `noticed` says how the engine reacts to a change."""
    if item.is_on_device:
        return State.TENSOR, "each replay reads it; change it in place"
    is_live = item.optimizer is not None and is_outside
    if effect is None and not is_live:
        told = "where it enters was not found out in time"
        return (State.WATCHED, f"{noticed}; {told}") if noticed else (State.UNKNOWN, told)
    if obstacle and item.asked:  # the guards were asked, although the step was not recorded
        return (State.FIXED, f"{obstacle}; {noticed}") if noticed else (State.UNKNOWN, f"{obstacle}; {unwatched}")
    if obstacle:
        return State.FIXED, obstacle
    if effect is not None and not effect.is_none:
        if effect.failure:
            unwatched, noticed = f"{effect.failure}; {unwatched}", noticed and f"{effect.failure}; {noticed}"
        return (State.WATCHED, noticed) if noticed else (State.BAKED, unwatched)
    if effect is None or is_live:  # a value that the step reads, too, would be noticed
        return State.LIVE, f"{type(item.optimizer).__name__} runs between graphs and reads it at each step"
    return State.NO_EFFECT, f"the same operations with {_told(effect.moved_to)}"


def _noticed(changes: Sequence[Change]) -> str:
    return _REMEDIES[changes[0].remedy]


def _node_differences(before: Rehearsed, now: Rehearsed) -> list[NodeDifference]:
    """The differences of all graphs whose nodes could be read."""
    found: list[NodeDifference] = []
    for one, two in zip(before.nodes, now.nodes, strict=False):
        if one is not None and two is not None:
            found += node_differences(one, two)
    return found


def _entries_of(effect: _Effect) -> tuple[Entry, ...]:
    """The places of an effect, each once: a number enters a forward and its backward at one line."""
    if effect.failure:
        where = effect.where
        return () if where is None else (Entry("the step fails", where.file, where.line, "", effect.failure),)
    found: dict[tuple[Any, ...], Entry] = {}
    for one in effect.operations:
        file, line = (one.where.file, one.where.line) if one.where is not None else (None, None)
        found.setdefault((one.operation, file, line), Entry(one.operation, file, line, one.before, one.now))
    if not found:
        for node in effect.nodes:
            found.setdefault((node.node, node.place), Entry(node.node, None, None, node.before, node.now))
    return tuple(found.values())


def _told(value: Any) -> str:
    return value if isinstance(value, str) else "absent" if value is None else repr(value)
