"""`ModuleMethod` finds the method that graphs replace: the one that eager code would call now.

A method of the class is looked up in the class each time, so that a replacement (`Block.forward = other`) is followed.
A method among the module's own attributes is kept, because the graphs have its place there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModuleMethod:
    """A method of one module."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._found = self._in_class()
        self._bound: Callable[..., Any] = getattr(module, name)
        self._is_own = name in vars(module) or self._found is _MISSING

    def __call__(self) -> Callable[..., Any]:
        """The method, bound to the module."""
        if not self._is_own and (found := self._in_class()) is not self._found:
            self._found = found
            self._bound = found.__get__(self._module, type(self._module)) if hasattr(found, "__get__") else found
        return self._bound

    def _in_class(self) -> Any:
        owners = (vars(owner) for owner in type(self._module).__mro__)
        return next((owned[self._name] for owned in owners if self._name in owned), _MISSING)


def called_method(module: torch.nn.Module, method: str = "forward") -> str:
    """The attribute that is called for a method; after `module.compile()` it is not `forward`."""
    compiled = method == "forward" and module._compiled_call_impl is not None
    return "_compiled_call_impl" if compiled else method


def put_in_place(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an object. The returned function restores it, unless it was set again since."""
    before = vars(owner).get(name, _MISSING)
    vars(owner)[name] = value

    def take_back() -> None:
        if vars(owner).get(name) is not value:
            return
        if before is _MISSING:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before

    return take_back


_MISSING = object()
