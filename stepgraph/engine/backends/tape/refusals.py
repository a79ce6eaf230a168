"""The tape refuses what CUDA refuses, by a list that was checked on a GPU case by case.

There are three checks. ATen's own tags mark most operators whose result or shape depends on data. A short table names
those that synchronize inside their CUDA kernels without a tag. A function mode catches what never reaches the
dispatcher on CPU tensors: `.tolist()`, `.numpy()`, `print(x)`. Every tensor made from Python values passes through
`lift_fresh`, which marks host data. Scalars assigned to a slice or a mask are fine on CUDA (`x[mask] = 0.0` is a fill),
one assigned to a single element is not (`x[0] = 1.0` is a copy), so such scalars are marked. Newer versions of torch
make no tensor of an assigned number: each assignment is a fill, and recorded as one.

The tape raises at a refusal. `stepgraph check` notes it and goes on: `HostReadGuard` and `OperatorGuard` serve both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from stepgraph.core.ambient import OwnMode
from stepgraph.core.catalogue import Entry, entry
from stepgraph.core.errors import CaptureRefused
from stepgraph.core.frames import caller_is_autograd, caller_is_torch, user_location
from stepgraph.engine.backends.threads import replaced

_SYNCHRONIZING = (
    *("_linalg_check_errors", "is_nonzero", "bincount", "equal", "_ctc_loss", "unique_dim", "unique_consecutive"),
    *("_pack_padded_sequence", "_pad_packed_sequence"),  # the lengths, in host memory, are the shape of the result
)
_LIBRARY_CALLS = frozenset({"aten::_linalg_svd", "aten::_linalg_eigh", "aten::linalg_lstsq", "aten::linalg_eig"})
_READS = ("tolist", "numpy", "__array__", "__repr__", "__format__", "__dlpack__", "__reduce_ex__")
HOST_READS: Mapping[str, str] = MappingProxyType({**{name: name for name in _READS}, "cpu": "cpu()"})
"""Methods of tensors that read them on the host, and how messages spell them."""
_LIFTS = ("aten::lift_fresh", "aten::lift_fresh_copy")
_CHECKS = frozenset(("aten::aminmax", "aten::min", "aten::max", "aten::_local_scalar_dense"))
"""Operators that `F.one_hot` runs on the CPU to check its values. The tape answers them with 0."""
_NAN_FIX = "switch anomaly mode on around the call of the step, not inside: such calls run eagerly."


def refusal(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], is_host_scalar: Callable[[Any], bool]
) -> tuple[Entry, str] | None:
    """The rule that an operator breaks and the operator's name, or None where CUDA would record it."""
    name = func._schema.name
    if name == "aten::index":
        return (entry("host-read"), "indexing with a mask") if _has_mask(args[1]) else None
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        broken = _has_mask(args[1]) and not is_host_scalar(args[2])
        return (entry("host-read"), "assigning a tensor through a mask") if broken else None
    if name == "aten::copy_" and is_host_scalar(args[1]):
        return entry("host-data"), "assigning a number to one element"
    if name == "aten::repeat_interleave":
        given = kwargs.get("output_size", args[1] if len(args) > 1 and isinstance(args[1], int) else None)
        return None if given is not None else (entry("host-read"), "repeat_interleave without output_size")
    if name == "aten::histc":
        low, high = (*args[2:4], 0, 0)[:2]
        return (entry("host-read"), "histc without min and max") if low == high else None
    if name in _LIBRARY_CALLS:
        return entry("library-call"), name
    if name == "aten::_local_scalar_dense" and _is_flag_of_ddp(args[0]):
        return None
    tags, short = func.tags, name.removeprefix("aten::")
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags or short in _SYNCHRONIZING:
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and caller_is_autograd():
            return dataclasses.replace(entry("host-read"), fix=_NAN_FIX), "detect_anomaly()"
        return entry("host-read"), ".item()" if short == "_local_scalar_dense" else short
    return None


def _is_flag_of_ddp(value: torch.Tensor) -> bool:
    """Whether this is one of DDP's own notes on which parameters were used: host memory, also with a GPU.

    With `static_graph=True` its reducer reads them in each backward. No other C++ code of a backward reads an int32.
    """
    return value.dtype is torch.int32 and value.dim() == 0 and caller_is_autograd()


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


class HostReadGuard(TorchFunctionMode, OwnMode):
    """Refuses host reads that the dispatcher does not see, and knows when a number is being assigned."""

    def __init__(self, refuse: Callable[[CaptureRefused], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self.running: Counter[str] = Counter()
        """`__setitem__` (`x[...] = value`) and `one_hot` (`F.one_hot(x, n)` checks its values on the CPU only)."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS and args and isinstance(args[0], torch.Tensor):
            self._refuse_read(func, args)
        if func is torch.tensor and args and isinstance(args[0], torch.Tensor):
            return self.copied(args, kwargs or {})
        checks = name == "one_hot" and max([*args[1:2], *(kwargs or {}).values()], default=-1) > 0
        if not checks and name != "__setitem__":
            return func(*args, **(kwargs or {}))
        self.running[name] += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running[name] -= 1

    def _refuse_read(self, func: Any, args: Sequence[Any]) -> None:
        what = f"Tensor.{HOST_READS[func.__name__]}"
        self._refuse(CaptureRefused(entry("host-read"), what, user_location()))

    def copied(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of `torch.tensor(tensor)`, which copies past the dispatcher: here by operators that it sees."""
        return args[0].detach().clone()


class OperatorGuard:
    """Decides about each operator that the dispatcher sees while a `HostReadGuard` is entered."""

    def __init__(self, guard: HostReadGuard) -> None:
        self._guard = guard
        self._host_scalars: set[int] = set()

    def refusal(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CaptureRefused | None:
        """The refusal of an operator at the user's line, or None where CUDA would record it."""
        if not self._guard.running["__setitem__"]:
            self._host_scalars.clear()  # other memory may get their addresses
        if is_lift(func):
            return self._host_data(args[0])
        broken = refusal(func, args, kwargs, self._is_host_scalar)
        return CaptureRefused(*broken, user_location()) if broken is not None else None

    def is_check(self, func: Any) -> bool:
        """Whether the operator is part of a check that `F.one_hot` makes on the CPU only."""
        return bool(self._guard.running["one_hot"]) and func._schema.name in _CHECKS

    def _host_data(self, value: torch.Tensor) -> CaptureRefused | None:
        """A tensor made from Python values: refused, except a number that is being assigned, and no values."""
        if self._guard.running["__setitem__"] and value.dim() == 0:
            self._host_scalars.add(value.untyped_storage()._cdata)
            return None
        return host_data_refusal() if value.numel() else None  # without elements nothing moves

    def _is_host_scalar(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._host_scalars


def is_lift(func: Any) -> bool:
    """Whether an operator makes a tensor of Python values."""
    return func._schema.name in _LIFTS


@contextlib.contextmanager
def unseen_by_modules(guard: HostReadGuard) -> Iterator[None]:
    """Let torch's modules choose their path as if the guard were not there.

    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take their fused path only where nothing overrides torch's
    functions, and any function mode counts as an override (`torch.overrides.has_torch_function`).
    """

    def has_torch_function(asked: Callable[..., bool], relevant_args: Iterable[Any]) -> bool:
        modes = _get_current_function_mode_stack()
        if len(modes) != 1 or modes[0] is not guard:
            return asked(relevant_args)
        with _pop_mode_temporarily():
            return asked(relevant_args)

    with replaced(torch.overrides, "has_torch_function", has_torch_function):
        yield


def host_data_refusal() -> CaptureRefused | None:
    """The refusal of a tensor made from Python values, unless torch's own code made it (an optimizer's constant 1)."""
    if caller_is_torch():
        return None
    return CaptureRefused(entry("host-data"), "a tensor made from Python values", user_location())
