"""torch's registration hooks report parameters, buffers and modules that are registered on watched modules.

The garbage collector can drop a listener at any moment, also while torch iterates over its registration hooks, in this
thread or in another. `HookPlace` makes that safe.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from stepgraph.engine.backends.threads import HookPlace

_Module = torch.nn.Module
_WALKERS: frozenset[types.CodeType] = frozenset(
    method.__code__
    for method in (_Module.register_parameter, _Module.register_buffer, _Module.add_module, _Module.__setattr__)
)
"""torch's functions that iterate over the registration hooks."""
_PLACES = tuple(
    HookPlace(getattr(torch_module, f"_global_{kind}_registration_hooks"), _WALKERS)
    for kind in ("parameter", "buffer", "module")
)


class RegistrationEvents:
    """Counts registrations on given modules, by torch's registration hooks."""

    def __init__(self) -> None:
        self.count = 0
        self.is_closed = False
        self._modules: set[int] = set()
        self._hook = functools.partial(_registered, weakref.ref(self))
        self._listens = False
        self._finalizer = weakref.finalize(self, _leave_all, self._hook)

    def listen_to(self, modules: Sequence[torch.nn.Module]) -> None:
        """Also count registrations on these modules."""
        self._modules.update(map(id, modules))
        if not self._listens:
            self._listens = True
            for place in _PLACES:
                place.listen(self._hook)

    def saw(self, module: torch.nn.Module) -> None:
        self.count += id(module) in self._modules

    def close(self) -> None:
        self.is_closed = True
        self._modules.clear()
        self._finalizer()


def _registered(events: weakref.ref[RegistrationEvents], module: torch.nn.Module, name: str, value: Any) -> None:
    listener = events()
    if listener is not None:
        listener.saw(module)


def _leave_all(hook: Callable[..., None]) -> None:
    for place in _PLACES:
        place.leave(hook)
