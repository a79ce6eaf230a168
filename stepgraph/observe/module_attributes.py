"""`ModuleAttributes` remembers the attributes of modules, to see what a call changes and to restore them.

A forward may set attributes of its module: a counter, an auxiliary loss, a cache. A replay runs no Python, so code that
reads such an attribute afterwards would find that of the capture. In-place changes of buffers are part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.frames import is_own
from stepgraph.signature import is_plain


class ModuleAttributes:
    """The attributes and buffers of modules, as they are now."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._kept = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]

    def _places(self) -> Iterator[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]]:
        for module, attributes, buffers in self._kept:
            yield module, vars(module), attributes
            yield module, module._buffers, buffers

    def changed(self, name: Callable[[torch.nn.Module], str]) -> list[str]:
        """The attributes that have changed, except plain ones of a library's module: its own counts."""
        found = []
        for module, now, before in self._places():
            keys = [k for k in {*now, *before} if not _same(now.get(k, _MISSING), before.get(k, _MISSING))]
            if not is_own(type(module)):
                keys = [k for k in keys if not (is_plain(now.get(k)) and is_plain(before.get(k)))]
            found += [f"{name(module)}.{key}" for key in sorted(keys)]
        return found

    def restore(self) -> None:
        for _, now, before in self._places():
            if len(now) != len(before) or any(now.get(key, _MISSING) is not value for key, value in before.items()):
                now.clear()
                now.update(before)


def _same(one: Any, two: Any) -> bool:
    return one is two or (type(one) is type(two) and is_plain(one) and bool(one == two))


_MISSING = object()
