"""A replay runs each noted operator with the arguments, and under the flags, that it was noted with.

An operator is noted after autocast has cast its arguments. But some kernels call operators in turn, which eager's
autocast sees: the fused ones of `nn.TransformerEncoderLayer`, and custom operators. For them autocast is switched on
again, in the recording and at replays. Grad mode, which a few kernels read, is restored for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stepgraph.engine.backends.kernels import autocast_around
from stepgraph.engine.backends.tape.memory import PoolPlace


class Ref(NamedTuple):
    """A tensor's address: a place and a geometry in it."""

    place: PoolPlace
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool


def leaves_of(tree: Any) -> list[Any]:
    """What lists, tuples and dictionaries hold: operators know no other containers, and torch's trees are slow."""
    found: list[Any] = []
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is list or kind is tuple:
            waiting += reversed(value)
        elif kind is dict:
            waiting += reversed(value.values())
        else:
            found.append(value)
    return found


def mapped(call: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with each leaf replaced, in the order of `leaves_of`."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([mapped(call, value) for value in tree])
    if kind is dict:
        return {name: mapped(call, value) for name, value in tree.items()}
    return call(tree)


def has_memory(kind: type) -> bool:
    """Whether tensors of this type have their own memory, and are no wrappers that dispatch to others."""
    dispatch_rule: Any = getattr(kind, "__torch_dispatch__", None)
    return kind is torch.Tensor or dispatch_rule is torch._C._disabled_torch_dispatch_impl


class Surroundings(NamedTuple):
    """The flags that kernels read."""

    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def of(cls, *, calls_operators: bool) -> Surroundings:
        """The flags where an operator is called, read in the handler of the mode that sees it."""
        return cls(torch.is_grad_enabled(), autocast_around("cpu") if calls_operators else None)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator as it would be called without the mode."""
        if self.autocast is None:
            return func(*args, **kwargs)
        with torch.autocast("cpu", self.autocast, cache_enabled=False):
            return func(*args, **kwargs)

    def put(self) -> None:
        """Set these flags."""
        torch._C._set_grad_enabled(self.grad)
        torch.set_autocast_enabled("cpu", self.autocast is not None)
        if self.autocast is not None:
            torch.set_autocast_dtype("cpu", self.autocast)


class PythonKernel:
    """The kernel of an operator that is a Python function; it runs inside `around`."""

    def __init__(
        self, kernel: Callable[..., Any], around: Callable[[PythonKernel], AbstractContextManager[Any]]
    ) -> None:
        self._kernel, self._around = kernel, around
        self.reads = False
        """Whether it has read a tensor on the host, past the dispatcher: by a library of its own, such as numpy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._around(self):
            return self._kernel(*args, **kwargs)


_FUSED = frozenset({"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"})


def calls_operators(func: torch._ops.OpOverload) -> bool:
    """Whether autocast has no rule for an operator that may call others."""
    if func.namespace == "aten" and func._schema.name not in _FUSED:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU")


@dataclass(slots=True)
class Op:
    """One noted operator: its arguments and where its results go, by address, and as tensors once they are bound."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[tuple[Any, int]]
    surroundings: Surroundings

    def run(self) -> None:
        """Call it again, and put its results in their places."""
        out = self.func(*self.args, **self.kwargs)
        if self.results:
            flat = (out,) if type(out) is torch.Tensor else leaves_of(out)
            for target, index in self.results:
                target.copy_(flat[index])


def run(ops: Iterable[Op]) -> None:
    """Run operators one after another."""
    grad, now = torch.is_grad_enabled(), None
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            for op in ops:
                if op.surroundings != now:
                    now = op.surroundings
                    now.put()
                op.run()
    finally:
        torch._C._set_grad_enabled(grad)
