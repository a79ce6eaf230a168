"""The flags around a call, put back for the time of a recording that is made later."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.signature import AMBIENT_NAMES, ambient_key

_RESTORED = ("grad mode", "inference mode", "autocast on cuda", "autocast on cpu", "autocast cache")


def other_flags(ambient: Sequence[Hashable]) -> list[str]:
    """The flags that are not as they were at a call, but for those that `as_called` puts back."""
    pairs = zip(AMBIENT_NAMES, ambient, ambient_key(), strict=True)
    return [name for name, then, now in pairs if then != now and name not in _RESTORED]


@contextlib.contextmanager
def as_called(ambient: Sequence[Hashable], *, cache: bool = False) -> Iterator[None]:
    """Grad mode, inference mode and autocast as they were at a call. `cache`: see `under_autocast`."""
    flags: dict[str, Any] = dict(zip(AMBIENT_NAMES, ambient, strict=True))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(flags["inference mode"]))
        stack.enter_context(torch.set_grad_enabled(flags["grad mode"]))
        stack.enter_context(under_autocast(flags["autocast on cuda"], flags["autocast on cpu"], cache=cache))
        yield


def autocast_now() -> tuple[Hashable, Hashable]:
    """The dtype of autocast on CUDA and on the CPU, or False where it is off."""
    cuda, cpu = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return cuda and torch.get_autocast_dtype("cuda"), cpu and torch.get_autocast_dtype("cpu")


@contextlib.contextmanager
def under_autocast(*dtypes: Any, cache: bool = False) -> Iterator[None]:
    """Autocast on CUDA and on the CPU with these dtypes, or off; without the cache, whose casts would be baked in.

    `cache`: with an empty one, that is emptied again. The region around it, if there is one, casts its weights anew.
    """
    with contextlib.ExitStack() as stack:
        if cache:
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        for device, dtype in zip(("cuda", "cpu"), dtypes, strict=True):
            if dtype or torch.is_autocast_enabled(device):
                kind = {"dtype": dtype} if dtype else {}
                stack.enter_context(torch.autocast(device, enabled=bool(dtype), cache_enabled=cache, **kind))
        yield


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Outside any hooks for tensors that autograd saves: activations of a graph stay where they are.

    A caller who checkpoints a graphed module from outside has such hooks set when it is called.
    """
    calls = torch._C._autograd
    top = getattr(calls, "_top_saved_tensors_default_hooks", None)  # where it is missing, they cannot be read
    taken: list[Any] = []
    while top is not None and (hooks := top(True)) is not None:
        taken.append(hooks)
        calls._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            calls._push_saved_tensors_default_hooks(*hooks)
