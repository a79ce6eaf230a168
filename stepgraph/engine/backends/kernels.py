"""An operator whose kernel is a Python function is run as the operators that this function calls.

`torch.library.custom_op`, `triton_op` and `Library.impl` make such operators. A CUDA graph records the kernels that
these launch, so their Python is a part of the step: log and tape look inside. A dispatch mode sees an operator
as one, and its kernel runs outside of the mode. So the mode calls the kernel itself, and is entered again meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of torch.distributed's operators: a graph records the collective, not how it is started."""
_SHARED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
"""Where a kernel for all devices is registered; the first that there is counts."""
_FROM_PYTHON: Collection[str] = getattr(torch.library, "_impls", ())
"""All kernels that were registered from Python, as `namespace/operator/key`."""


class LooksInside:
    """A dispatch mode that calls Python kernels itself, and shows what they call to the mode above it, too."""

    above: AbstractContextManager[Any] | None = None
    """The mode above, which has just handed an operator down."""

    @contextlib.contextmanager
    def entered_with(self, mode: AbstractContextManager[Any]) -> Iterator[None]:
        """In this block an operator is handed down by the mode above."""
        self.above, before = mode, self.above
        try:
            yield
        finally:
            self.above = before


def mode_that_looks_inside() -> LooksInside | None:
    """The mode below the one whose handler runs that will call Python kernels."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, LooksInside)), None)


def may_be_python(func: Any) -> bool:
    """Whether an operator may have a kernel in Python. What is no operator of the dispatcher has none.

    Those of `prim` are questions about a tensor that TorchScript asks.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in COLLECTIVES or func.namespace == "prim":
        return False
    return func.namespace != "aten" or any(f"{_path(func)}/{key}" in _FROM_PYTHON for key in ("CPU", "CUDA", *_SHARED))


def python_kernel(func: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """The kernel of an operator for these arguments, if it is a Python function; to be called in its place."""
    device = next((leaf.device.type for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), "cpu")
    if device == "meta":
        return None
    asked = torch._C._dispatch_has_kernel_for_dispatch_key
    found = next((key for key in (device.upper(), *_SHARED) if asked(func.name(), key)), None)
    if f"{_path(func)}/{found}" not in _FROM_PYTHON:
        return None
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    has_rule = asked(func.name(), f"Autocast{device.upper()}")  # which has switched autocast off

    def kernel(*args: Any, **kwargs: Any) -> Any:
        autocast = None if has_rule else autocast_around(device)
        if autocast is None:
            return func.redispatch(keys, *args, **kwargs)
        with torch.autocast(device, autocast, cache_enabled=False):
            return func.redispatch(keys, *args, **kwargs)

    return kernel


def autocast_around(device: str) -> torch.dtype | None:
    """The dtype of autocast where an operator is called, read in the handler of a mode, which itself sees none."""
    with enable_reentrant_dispatch():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _path(func: Any) -> str:
    schema = func._schema
    short = schema.name.rpartition("::")[2]
    return f"{func.namespace}/{short}.{schema.overload_name}" if schema.overload_name else f"{func.namespace}/{short}"


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    elif isinstance(tree, dict):
        yield from _leaves(tuple(tree.values()))
    else:
        yield tree
