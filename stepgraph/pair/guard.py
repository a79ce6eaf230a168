"""A `SiteGuard` decides whether the graphs of one kind of call may still be replayed.

It asks the guards of the module first. If a value that the module's code reads has changed, the call is recorded again,
and its operations are compared with those of the graph. The same is done if an audit is due. Equal operations mean that
the change has no effect. A value that keeps changing without effect is no longer watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.guards.hooks import ParameterHooksGuard
from stepgraph.guards.model import ModelGuard
from stepgraph.guards.protocol import Change, FastCheck, GuardSet, Remedy, told
from stepgraph.guards.random_names import NamesGuard
from stepgraph.oplog import Difference
from stepgraph.session.proof import Harmless
from stepgraph.values.watch import Watch


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


class SiteGuard:
    """The guards of one kind of call."""

    def __init__(
        self,
        model: ModelGuard,
        values: Watch,
        inside: Sequence[torch.Tensor],
        names: Sequence[NamesGuard],
        spell: Callable[[Any], str],
        before: SiteGuard | None = None,
    ) -> None:
        """`inside` are the parameters whose gradients the graphs accumulate. `before` guarded earlier graphs."""
        self._values, self._model = values, model
        self._guards = GuardSet((model, ParameterHooksGuard(inside, spell), values, *names))
        self._harmless: Harmless = Harmless() if before is None else before._harmless
        values.drop(self._harmless.names)
        self._fast, self._checks, self._agreed = FastCheck(), 0, 0

    def holds(self) -> bool:
        """One fast check that nothing changed; False is inconclusive."""
        self._checks += 1
        return self._fast.holds()

    def look(self, differs: Callable[[], Difference | None], *, audited: bool) -> Finding | None:
        """Find a reason not to replay. `differs` records the call again and compares; `audited`: in any case."""
        changes = self._guards.changed()
        if changes and changes[0].remedy is not Remedy.AUDIT:
            return Finding(told(changes), (told(changes),))
        if not changes and not audited:
            self._fast.write(self._guards.expect, self._checks)
            return None
        found = differs()
        if found is None:
            self.agree(changes)
            return None
        if not changes:
            self._harmless.suspect()
            return Finding(str(found), (str(found.where or found.operation),), (), found)
        return Finding(told(changes), tuple(change.name for change in changes), changes, found)

    def changed_model(self) -> str | None:
        """Describe what changed in the model since the capture, or return None."""
        return told(changes) if (changes := self._model.changed()) else None

    def admit_hooks(self, names: Sequence[str]) -> None:
        """Ignore hooks of functions with these names on modules inside: the engine that replays runs them."""
        self._model.admit_hooks(names)

    @property
    def labels(self) -> set[str]:
        """The names of all values in reach."""
        return self._values.labels

    def agree(self, changes: Sequence[Change] = ()) -> None:
        """Note that a new recording was the same although these values have changed.

        The module's code has run once more, so the watch expects the present values from now on.
        """
        self._harmless.add(changes, self._checks - self._agreed)
        self._agreed = self._checks
        self._values.drop(self._harmless.names)
        if self._values.changed():
            self._values.renew()
        self._fast.drop()

    @property
    def unlooked(self) -> str | None:
        """A sentence about the values that are not watched."""
        found = [told for told in (self._values.unlooked, self._harmless.sentence) if told is not None]
        return "; ".join(found) or None
