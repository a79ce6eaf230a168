"""`ModuleAttributes` remembers what modules hold in their attributes, to see what a call changes and to restore it.

A forward may hang things on its module: a counter, an auxiliary loss, a cache. A replay runs no Python, so whoever
reads such an attribute afterwards would find that of the capture. In-place changes of buffers are no such thing: they
are part of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stepgraph.frames import is_own
from stepgraph.signature import is_plain


class ModuleAttributes:
    """The attributes and buffers of modules, as they are now."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """`modules` by the names that messages call them by."""
        self._kept = [(name, module, dict(vars(module)), dict(module._buffers)) for name, module in modules.items()]

    def _places(self) -> Iterator[tuple[str, torch.nn.Module, dict[str, Any], dict[str, Any]]]:
        for name, module, attributes, buffers in self._kept:
            yield name, module, vars(module), attributes
            yield name, module, module._buffers, buffers

    def changed(self) -> list[str]:
        """The attributes that have changed, but for plain ones of a library's module: its own counts."""
        found = []
        for name, module, now, before in self._places():
            keys = [k for k in {*now, *before} if not _same(now.get(k, _MISSING), before.get(k, _MISSING))]
            if not is_own(type(module)):
                keys = [k for k in keys if not (is_plain(now.get(k)) and is_plain(before.get(k)))]
            found += [f"{name}.{key}" for key in sorted(keys)]
        return found

    def restore(self) -> None:
        """Make all as it was."""
        for _, _, now, before in self._places():
            if len(now) != len(before) or any(now.get(key, _MISSING) is not value for key, value in before.items()):
                now.clear()
                now.update(before)


def _same(one: Any, two: Any) -> bool:
    return one is two or (type(one) is type(two) and is_plain(one) and bool(one == two))


_MISSING = object()
