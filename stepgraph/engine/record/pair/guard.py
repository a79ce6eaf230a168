"""A `SiteGuard` decides whether the graphs of one kind of call may still be replayed.

It asks the guards of the module first. If a value that the module's code reads has changed, the call is recorded again
and compared with the graph. The same is done if an audit is due. Equal recordings mean that the change has no effect.
What the module asks of a number is noted meanwhile (`values.decisions`): as long as the answers are the same, further
changes of it need no audit, and with other answers the calls run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.call.proof import Restless
from stepgraph.engine.guards.hooks import ParameterHooksGuard
from stepgraph.engine.guards.host_values.decisions import HostValues, Predicates, Trace, undecided
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.guards.model import ModelGuard
from stepgraph.engine.guards.outside_memory import OutsideMemory
from stepgraph.engine.guards.protocol import Change, FastCheck, GuardSet, Remedy, told
from stepgraph.engine.guards.random_names import NamesGuard
from stepgraph.engine.oplog import Difference

_MANY = 3
"""Calls in a row with another answer, after which the graphs are recorded again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason to stop replaying graphs."""

    why: str
    names: tuple[str, ...]
    """The names under which changes are counted: a module that keeps changing stays eager."""
    changes: Sequence[Change] = ()
    """Values that the module's code can name."""
    difference: Difference | None = None
    """The first operation that has changed."""
    is_answer: bool = False
    """True if all that has changed is an answer to what the module asks of a number: the graphs may be right again."""


class SiteGuard:
    """The guards of one kind of call."""

    def __init__(
        self,
        model: ModelGuard,
        values: Watch,
        inside: Sequence[torch.Tensor],
        names: Sequence[NamesGuard],
        outside: OutsideMemory,
        spell: Callable[[Any], str],
        before: SiteGuard | None = None,
    ) -> None:
        """`inside` are the parameters whose gradients the graphs accumulate. `before` guarded earlier graphs."""
        self._values, self._model = values, model
        self._gradients = ParameterHooksGuard(inside, spell)
        self._guards = GuardSet((model, self._gradients, values, outside, *names))
        self._restless: Restless = Restless() if before is None else before._restless
        self._fast, self._checks, self._agreed = FastCheck(), 0, 0
        self._asked: Predicates = Predicates() if before is None else before._asked
        self._refused = 0
        """Calls in a row with an answer for which the graphs are wrong."""

    def holds(self) -> bool:
        """One fast check that nothing changed; False is inconclusive."""
        self._checks += 1
        if self._fast.holds():
            self._refused = 0
            return True
        return False

    def look(self, differs: Callable[[], Difference | None], *, audited: bool) -> Finding | None:
        """Find a reason not to replay. `differs` records the call again and compares; `audited`: in any case."""
        changes, answers = self._guards.changed(), self._values.answers
        if changes and changes[0].remedy is not Remedy.AUDIT:
            return Finding(told(changes), (told(changes),))
        if not answers.are_refused():
            self._refused = 0
        if not changes and not audited:
            self._fast.write(self._guards.expect, self._checks)
            return None
        names = tuple(change.name for change in changes)
        is_for_long = answers.are_refused() and self._is_refused_for_long()
        if answers.are_refused() and not is_for_long:
            return Finding(told(changes), names, changes, is_answer=True)
        trace, before = self._asked.traced(self._values.traceable(changes)), self._values.host_values()
        found, is_traced = self._compare(differs, trace, before)
        if found is None:
            return self.agree(changes, trace if is_traced else None)
        if not changes:
            return Finding(str(found), (str(found.where or found.operation),), (), found)
        before.restore()  # the call runs eagerly
        is_answer = is_traced and not is_for_long and not undecided(changes, trace)
        if is_answer:
            answers.refuse(trace.decisions())
        return Finding(told(changes), names, changes, found, is_answer)

    def _compare(
        self, differs: Callable[[], Difference | None], trace: Trace, before: HostValues
    ) -> tuple[Difference | None, bool]:
        """Compare, first with stand-ins for numbers that have changed.

        Return the difference, and whether what was asked of these explains it.
        A recording with stand-ins that differs, or fails, is made again without: only then it counts.
        """
        traced, is_failed = None, False
        if trace.places:
            try:
                with trace:
                    traced = differs()
            except Exception:  # noqa: BLE001 (the recording without stand-ins shows what it is)
                is_failed = True
            if traced is None and not is_failed:
                return None, True
            before.restore()
        found = differs()
        is_same = traced is not None and found == traced
        self._asked.refuse(trace, all_places=is_failed or not is_same)
        return found, is_same

    def repeats(self, differs: Callable[[], Difference | None]) -> bool:
        """True if a recording that `differs` makes in other circumstances has the operations of the graphs."""
        before = self._values.host_values()
        try:
            is_same = differs() is None
        except Exception:  # noqa: BLE001 (the call runs eagerly, and shows what it is)
            is_same = False
        if is_same:
            self.agree()
        else:
            before.restore()
        return is_same

    def _is_refused_for_long(self) -> bool:
        """Count a call with an answer for which the graphs are wrong. Return True after many in a row."""
        self._refused += 1
        return self._refused > _MANY

    def changed_model(self) -> str | None:
        """Describe what changed in the model or in the hooks of its parameters since the capture, or return None."""
        return told(changes) if (changes := self._model.changed() or self._gradients.changed()) else None

    def admit_hooks(self, names: Sequence[str]) -> None:
        """Ignore hooks of functions with these names on modules inside: the engine that replays runs them."""
        self._model.admit_hooks(names)

    @property
    def labels(self) -> set[str]:
        """The names of all values in reach."""
        return self._values.labels

    def agree(self, changes: Sequence[Change] = (), trace: Trace | None = None) -> Finding | None:
        """Note that a new recording was the same although these values have changed.

        The module's code has run once more, so the watch expects the present values from now on. Return a reason not
        to replay all the same: a value changes so often that audits cost more than a graph gains.
        """
        if trace is not None:
            self._values.answers.agree(trace.decisions(), self._values.noted)
        self._restless.add(undecided(changes, trace), self._checks - self._agreed)
        self._agreed = self._checks
        if self._values.changed() or trace is not None:
            self._values.renew()
        self._fast.drop()
        names = self._restless.names
        if not names:
            return None
        return Finding(f"a value changes at almost every call: {', '.join(names)}", tuple(names))

    @property
    def unlooked(self) -> str | None:
        """A sentence about the values that are not watched."""
        return self._values.unlooked
