"""`ModuleAttributes` remembers the attributes of modules, to see what a call changes and to restore them.

A forward may set attributes of its module: a counter, an auxiliary loss, a cache. A replay runs no Python, so code that
reads such an attribute afterwards would find that of the capture. In-place changes of buffers are part of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stepgraph.core.frames import is_own
from stepgraph.core.plain_values import MISSING, is_plain, same


class Slots:
    """Dictionaries of modules, as they are now."""

    def __init__(self, places: Iterable[tuple[torch.nn.Module, dict[str, Any]]]) -> None:
        self.kept = [(module, where, dict(where)) for module, where in places]

    def restore(self) -> None:
        for _, where, before in self.kept:
            if list(where) != list(before) or any(where[key] is not value for key, value in before.items()):
                where.clear()
                where.update(before)


class ModuleAttributes(Slots):
    """The attributes and buffers of modules, as they are now."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """`modules` by the names that messages call them by."""
        super().__init__((module, where) for module in modules.values() for where in (vars(module), module._buffers))
        self._names = {id(module): name for name, module in modules.items()}

    def changed(self) -> list[str]:
        """The attributes that have changed, except plain ones of a library's module: its own counts."""
        found = []
        for module, now, before in self.kept:
            name = self._names[id(module)]
            keys = [k for k in {*now, *before} if not same(now.get(k, MISSING), before.get(k, MISSING))]
            if not is_own(type(module)):
                keys = [k for k in keys if not (is_plain(now.get(k)) and is_plain(before.get(k)))]
            found += [f"{name}.{key}" for key in sorted(keys)]
        return found
