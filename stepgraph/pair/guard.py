"""A `SiteGuard` checks that everything which the graphs of one kind of call have baked in still holds.

Addresses, flags, modules, hooks and host values have guards of their own. A hook on a parameter is a matter for this
one: where a graph accumulates the gradient by itself, a hook that is added later would never run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from stepgraph.backends.threads import entries
from stepgraph.guards.model import ModelGuard
from stepgraph.oplog import Difference
from stepgraph.rng.tracker import NamesGuard
from stepgraph.values.watch import Change, Watch


@dataclass(frozen=True, slots=True)
class Changed:
    """What is not as it was."""

    why: str
    names: tuple[str, ...]
    """What to count it under: something that keeps changing is given up on."""
    values: tuple[Change, ...] = ()
    """The values among what the module's code can name: whether it does otherwise for them, an audit tells."""
    found: Difference | None = None
    """What an audit has found."""


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
        """`before` is the guard of graphs that are gone, which knows what may change without effect."""
        self._model, self._values, self._names, self._spell = model, values, tuple(names), spell
        self._unwatched: set[str] = set() if before is None else before._unwatched
        """Values that have changed without effect on the operations, by name: they are watched no more."""
        self._suspects: set[str] = set() if before is None else before._suspects
        """Those of them that are watched again, for an audit has found a change that nothing else explains."""
        values.drop(self._unwatched)
        self._inside = list(inside)
        """Parameters whose gradients the graphs accumulate by themselves."""
        self._handles_seen = RemovableHandle.next_id

    def changed(self) -> Changed | None:
        """What is not as it was; None in a few microseconds where all is."""
        why = self._model.changed()
        if RemovableHandle.next_id != self._handles_seen:
            why = why or self._new_hook()
        for names in self._names:
            why = why or names.changed()
        if why is not None:
            return Changed(why, (why,))
        changes = self._values.changed()
        if changes:
            return Changed("; ".join(map(str, changes)), tuple(c.name for c in changes), tuple(changes))
        return None

    def misspelt(self, ignore: Sequence[str]) -> dict[str, str | None]:
        """Names to ignore that nothing in reach has, with the nearest ones."""
        return self._values.misspelt(ignore)

    def agree(self, changes: Sequence[Change] = ()) -> None:
        """An audit has found the same operations although these values have changed: watch them no more.

        The module's code has run once more, so what is expected from now on is what is there now.
        """
        self._unwatched |= {change.name for change in changes} - self._suspects
        self._values.drop(self._unwatched)
        if self._values.changed():
            self._values.renew()

    def suspect(self) -> None:
        """The operations have changed, and no watched value has: watch again what was dropped, for good."""
        self._suspects |= self._unwatched
        self._unwatched.clear()

    def _new_hook(self) -> str | None:
        self._handles_seen = RemovableHandle.next_id
        for parameter in self._inside:
            if is_hooked(parameter):
                return f"a hook was added to `{self._spell(parameter)}`"
        return None


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether something happens in Python when a parameter gets its gradient."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(hooks) or hasattr(parameter, "main_grad")


has_global_hooks: Callable[[], bool] = torch_module._has_any_global_hook
"""Whether there are hooks on all modules of the process."""
_GLOBAL_HOOKS = tuple(
    f"_global_{kind}" for kind in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
)


def global_hook(safe: Collection[Any]) -> str | None:
    """A hook on all modules of the process that is not listed as safe, by name."""
    for hooks in _GLOBAL_HOOKS:
        for _, hook in entries(getattr(torch_module, hooks, {})):
            spelled = getattr(hook, "__qualname__", type(hook).__qualname__)
            if hook not in safe and spelled not in safe:
                return str(spelled)
    return None
