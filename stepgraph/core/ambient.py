"""The flags of the process and the thread around a call choose its kernels, beside the arguments.

A graph has baked in what they were at its capture, so they are read at every call, in little more than a microsecond.
A C++ guard of torch's compiler compares many of them at once; the others are polled. Modes around a call count as well:
they see, and may change, all that eager code does, and a replay shows them nothing. So do hooks for the tensors that
autograd saves, which may compress them; those of torch's own checkpoint and of `save_on_cpu` give back what they were
given, and count for whole steps only. Not read are
`torch.backends.cuda.preferred_blas_library` and the like for linear algebra: they are slow to read, and set once.

A recording that is made later than its call runs under the call's grad mode, inference mode and autocast again
(`as_called`); for the other flags see `changed_flags`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch._C import (
    _get_cudnn_benchmark,
    _get_cudnn_deterministic,
    _get_cudnn_enabled,
    _get_cudnn_sdp_enabled,
    _get_flash_sdp_enabled,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class OwnMode:
    """A mode of ours: it is around a recording, and not around the call."""


class _Same:
    """An object around a call, compared by identity, and held so that no other takes its id."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._given is other._given

    def __hash__(self) -> int:
        return id(self._given)

    def __repr__(self) -> str:
        return str(getattr(self._given, "__qualname__", type(self._given).__qualname__))


def _modes(stack: Iterable[Any]) -> Hashable:
    """The modes of others. One of the function modes sets the default device."""
    modes = [mode for mode in stack if not isinstance(mode, OwnMode)]
    return tuple(f"device {m.device}" if isinstance(m, DeviceContext) else _Same(m) for m in modes) or None


def _autocast(device: str) -> Hashable:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _default_dtype(device: str, dtype: Any) -> Hashable:
    """The dtype of autocast where the step switches it on without one, if it is not the usual one."""
    return None if torch.is_autocast_enabled(device) or dtype is _USUAL_DTYPES[device] else dtype


def _precision(device: str, op: str) -> Callable[[], Hashable]:
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is not None:
        return functools.partial(getter, device, op)
    legacy = torch._C._get_cublas_allow_tf32 if op == "matmul" else torch._C._get_cudnn_allow_tf32
    return legacy


AMBIENT_NAMES = (
    # what the guard of torch's compiler compares
    *("grad mode", "autocast on cuda", "autocast on cpu", "autocast cache", "default dtype"),
    *("deterministic algorithms", "deterministic warn-only", "bf16 reduction", "fp16 reduction"),
    "float32 precision of matmul",
    # what is polled
    *("inference mode", "float32 precision of conv"),
    *("cudnn deterministic", "cudnn benchmark", "cudnn enabled"),
    *("flash attention", "memory-efficient attention", "math attention", "cudnn attention"),
    *("reduction in math attention", "fp16 accumulation", "fill of new memory", "fast path of attention modules"),
    *("anomaly mode", "a transform of torch.func", "forward-mode differentiation"),
    *("default dtype of autocast on cuda", "default dtype of autocast on cpu"),
    *("torch-function modes", "dispatch modes", "saved-tensor hooks"),
)
_RESTORED = ("grad mode", "inference mode", "autocast on cuda", "autocast on cpu", "autocast cache")
"""The flags that `as_called` sets for a recording."""
_HOOKS = AMBIENT_NAMES.index("saved-tensor hooks")
_EAGER = AMBIENT_NAMES.index("anomaly mode")
"""The first of three flags that ask for eager code; the other two are of transforms."""
_NOWHERE = functools.partial(tuple)  # the getter of a flag that this torch does not have
_matmul_precision, _conv_precision = _precision("cuda", "matmul"), _precision("cuda", "conv")
_fp16_accumulation = getattr(torch._C, "_get_cublas_allow_fp16_accumulation", _NOWHERE)
_math_reduction = getattr(torch._C, "_get_math_sdp_allow_fp16_bf16_reduction", _NOWHERE)
_fill = getattr(torch._C, "_get_deterministic_fill_uninitialized_memory", _NOWHERE)
_fast_path = functools.partial(getattr, torch.backends.mha, "_is_fastpath_enabled", None)
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)

compiler_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
"""The C++ guards of torch's compiler; what they have differs from version to version."""
_make_guard: Callable[[], Any] = getattr(compiler_guards, "GlobalStateGuard", lambda: None)
_guard_knows_tf32 = '"allow_tf32"' in str(getattr(_make_guard(), "__getstate__", str)())
_matmul_unless_guarded = _NOWHERE if _guard_knows_tf32 else _matmul_precision
_is_inference = torch.is_inference_mode_enabled
_is_anomaly = torch.is_anomaly_enabled
_is_transforming = torch._C._are_functorch_transforms_active
_forward_mode = functools.partial(getattr, forward_ad, "_current_level")
_autocast_dtype = torch.get_autocast_dtype
_USUAL_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}


def _polled() -> tuple[Any, ...]:
    """The flags that the guard does not compare, written out: a loop over them takes 1.5 times as long.

    The order in which attention kernels are tried is not among them: torch changes it by itself at the first call.
    """
    return (
        _matmul_unless_guarded(),
        _is_inference(),
        _conv_precision(),
        _get_cudnn_deterministic(),
        _get_cudnn_benchmark(),
        _get_cudnn_enabled(),
        _get_flash_sdp_enabled(),
        _get_mem_efficient_sdp_enabled(),
        _get_math_sdp_enabled(),
        _get_cudnn_sdp_enabled(),
        _math_reduction(),
        _fp16_accumulation(),
        _fill(),
        _fast_path(),
        _is_anomaly(),
        _is_transforming(),
        _forward_mode() >= 0,
        _autocast_dtype("cuda"),
        _autocast_dtype("cpu"),
        _len_torch_function_stack(),
    )


def reason_for_eager(ambient: tuple[Hashable, ...]) -> str | None:
    """The flag around a call that asks for eager code: in anomaly mode autograd checks each result of a backward.

    A transform (vmap, grad, jvp) computes something else of the same code, which no graph has.
    """
    if not any(ambient[_EAGER : _EAGER + 3]):
        return None
    return next(AMBIENT_NAMES[i] for i in range(_EAGER, _EAGER + 3) if ambient[i])


def transform_around(ambient: tuple[Hashable, ...]) -> str | None:
    """The transform around a call, if there is one: what the call returns must stay a part of it."""
    return reason_for_eager(ambient) if ambient[_EAGER + 1] or ambient[_EAGER + 2] else None


def saved_tensor_hooks(ambient: tuple[Hashable, ...]) -> str | None:
    """Why a call of a graphed part under these flags is eager: hooks see, and may change, what autograd saves."""
    found: Any = ambient[_HOOKS]
    return None if found is None else f"saved-tensor hooks, `{found[0]}`, are around the call   [saved-tensor-hooks]"


class AmbientReader:
    """Reads the flags again and again, with a guard of torch's compiler that compares many of them in one call.

    `observers`: dispatch modes, and saved-tensor hooks of torch's own, which only look on, count as well. They do for a
    step. Around a graphed module they are common, where activations are checkpointed.
    """

    def __init__(self, *, observers: bool = False) -> None:
        self._guard: Any = None
        self._rest: tuple[Any, ...] = ()
        self._key: tuple[Hashable, ...] = ()
        self._observers = observers

    def read(self) -> tuple[Hashable, ...]:
        """`ambient_key()`, in half the time where nothing changed; the same object as long as nothing does."""
        rest = _polled()
        known = self._guard is not None and rest == self._rest and self._guard.check()
        if known and not (self._observers and _len_torch_dispatch_stack()):
            hooks = _saved_tensor_hooks(True)
            if hooks is None or not (self._observers or _may_change(hooks)):
                return self._key
        key = ambient_key(observers=self._observers)
        if key != self._key:
            self._key = key
        # modes and hooks cannot be compared fast: with any around, each reading is a full one
        self._rest, self._guard = rest, _make_guard() if key[-3:] == (None, None, None) else None
        return self._key


def ambient_key(*, observers: bool = False) -> tuple[Hashable, ...]:
    """The flags of the process and thread that choose kernels, and the modes around a call."""
    _, *flags, on_cuda, on_cpu, has_modes = _polled()
    return (
        *(torch.is_grad_enabled(), _autocast("cuda"), _autocast("cpu"), torch.is_autocast_cache_enabled()),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _matmul_precision(),
        *(*flags, _default_dtype("cuda", on_cuda), _default_dtype("cpu", on_cpu)),
        _modes(_get_current_function_mode_stack()) if has_modes else None,
        _modes(_get_current_dispatch_mode_stack()) if observers else None,
        _modes(hooks) if (hooks := _saved_tensor_hooks(True)) and (observers or _may_change(hooks)) else None,
    )


def _may_change(hooks: Sequence[Any]) -> bool:
    """Whether saved-tensor hooks may give back another tensor than they were given. Of a stack the innermost count."""
    code = getattr(hooks[0], "__code__", None)
    file, name = getattr(code, "co_filename", ""), getattr(hooks[0], "__qualname__", "")
    is_offload = file == torch.autograd.graph.__file__ and name.startswith("save_on_cpu.")
    return not (is_offload or file == torch.utils.checkpoint.__file__)


def changed_flags(ambient: Sequence[Hashable]) -> list[str]:
    """The flags that have changed since a call, except those that `as_called` puts back."""
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
    return _autocast("cuda"), _autocast("cpu")


@contextlib.contextmanager
def under_autocast(*dtypes: Any, cache: bool = False) -> Iterator[None]:
    """Autocast on CUDA and on the CPU with these dtypes, or off; without the cache, whose casts would be baked in.

    `cache`: with an empty cache that is emptied again; an outer autocast region then casts its weights again.
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

    Such hooks are set where a caller checkpoints a graphed module from outside. Under any others it runs eagerly.
    """
    calls = torch._C._autograd
    taken: list[Any] = []
    while (hooks := _saved_tensor_hooks(True)) is not None:
        taken.append(hooks)
        calls._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            calls._push_saved_tensors_default_hooks(*hooks)
