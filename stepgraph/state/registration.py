"""What is registered on modules: parameters, buffers and modules that take another's place, told by torch as events.

torch keeps its registration hooks in dictionaries of the process and walks through them whenever any module is given a
parameter. Taking a hook out during such a walk breaks it ("OrderedDict mutated during iteration"), in code that has
nothing to do with us. The garbage collector can drop a listener at any moment, so a hook is only taken out when nobody
is on such a walk. A hook that has to stay does nothing, and is taken out when the next listener comes.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from stepgraph.frames import is_running

_Module = torch.nn.Module
_WALKERS: frozenset[types.CodeType] = frozenset(
    method.__code__
    for method in (_Module.register_parameter, _Module.register_buffer, _Module.add_module, _Module.__setattr__)
)
"""torch's functions that walk through the registration hooks."""


class RegistrationEvents:
    """Listens to torch's registration hooks; counts what is registered on the modules it is told of."""

    def __init__(self) -> None:
        self.count = 0
        self.is_closed = False
        self._modules: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._finalizer = weakref.finalize(self, _remove_all, self._handles)

    def listen_to(self, modules: Sequence[torch.nn.Module]) -> None:
        """Count registrations on these modules, too."""
        self._modules.update(map(id, modules))
        if not self._handles:
            hook = functools.partial(_registered, weakref.ref(self))
            self._handles += [
                torch_module.register_module_parameter_registration_hook(hook),
                torch_module.register_module_buffer_registration_hook(hook),
                torch_module.register_module_module_registration_hook(hook),
            ]
            for handle in self._handles:
                _sweep(handle)

    def saw(self, module: torch.nn.Module) -> None:
        self.count += id(module) in self._modules

    def close(self) -> None:
        """Listen no more."""
        self.is_closed = True
        self._modules.clear()
        self._finalizer()


def _registered(events: weakref.ref[RegistrationEvents], module: torch.nn.Module, name: str, value: Any) -> None:
    listener = events()
    if listener is not None:
        listener.saw(module)


def _remove_all(handles: list[RemovableHandle]) -> None:
    if not is_running(_WALKERS):  # below us, if the collector called, or in another thread
        for handle in handles:
            handle.remove()
    handles.clear()


def _sweep(handle: RemovableHandle) -> None:
    """Take out hooks that had to stay behind, from the dictionary that this handle's hook is in."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and not is_running(_WALKERS):
        for key, hook in list(hooks.items()):
            if isinstance(hook, functools.partial) and hook.func is _registered and _is_left_behind(*hook.args):
                del hooks[key]


def _is_left_behind(events: weakref.ref[RegistrationEvents]) -> bool:
    listener = events()
    return listener is None or listener.is_closed
