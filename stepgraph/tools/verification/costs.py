"""What a step costs: launches, the share of time in which the GPU is busy, time and memory.

On a GPU torch's profiler counts the launches of one step, kernel by kernel and graph by graph, and the union of the
kernels' times is set against the time of the step. On the tape a step's operations are counted, and the replays of its
graphs; there is no GPU to be busy, and times say nothing about one.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.engine.backends import Backend
from stepgraph.engine.backends.tape.graph import TapeGraph
from stepgraph.tools.verification.trace import fresh

__all__ = ["Cost", "Counts", "cost_of", "counted", "timed"]

_TIMED = 3
"""Steps that are timed, of which the fastest counts: an audit makes some of them slow."""
_COUNTED = 2
"""Steps whose launches are counted, of which the fewest count. Two audits do not follow each other."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step costs."""

    side: str
    """eager or graphed."""
    launches: int | None
    """Kernels that the host launches one by one; on the tape, operations, or None where graphs are replayed."""
    replays: int | None
    """Graphs that the host launches."""
    busy: float | None
    """Share of the step's time in which a kernel runs; None without a GPU."""
    step_ms: float | None
    peak_bytes: int | None


def cost_of(
    side: str, call: Callable[..., Any], batch: tuple[Any, ...], backend: Backend, peak_bytes: int | None
) -> Cost:
    """Time and count further steps of a run; `peak_bytes` is its peak memory."""
    step_ms = min(timed(call, fresh(batch), {}, backend)[1] for _ in range(_TIMED))
    found = [counted(call, fresh(batch), {}, backend)[1] for _ in range(_COUNTED)]
    launches, replays, busy = min(found, key=lambda counts: counts[0] or 0)  # an audit launches a recording besides
    if not replays and launches is None:
        _, (launches, _, _) = counted(call, fresh(batch), {}, backend, operations=True)
    return Cost(side, launches, replays, busy, step_ms, peak_bytes)


def timed(call: Callable[..., Any], args: Any, kwargs: Any, backend: Backend) -> tuple[Any, float]:
    """Make a call; return its result and its time in milliseconds."""
    backend.synchronize()
    begun = time.perf_counter()
    result = call(*args, **kwargs)
    backend.synchronize()
    return result, 1e3 * (time.perf_counter() - begun)


Counts = tuple[int | None, int, float | None]
"""Launches or operations, replays, and the busy share."""


def counted(
    call: Callable[..., Any], args: Any, kwargs: Any, backend: Backend, *, operations: bool = False
) -> tuple[Any, Counts]:
    """Make a call; return its result and what was launched in it. On the tape either operations or replays count."""
    if backend.device.type == "cuda":
        return _on_cuda(call, args, kwargs)
    if operations:
        with _Counting() as counting:
            result = call(*args, **kwargs)
        return result, (counting.count, 0, None)
    return _replays_on_tape(call, args, kwargs)


class _Counting(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _replays_on_tape(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Counts]:
    replays = 0
    code = TapeGraph.replay.__code__

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal replays
        replays += event == "call" and frame.f_code is code

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = call(*args, **kwargs)
    finally:
        sys.setprofile(before)
    return result, (None, replays, None)


def _on_cuda(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Counts]:
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        result = call(*args, **kwargs)
        torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events() if seen.profiler is not None else []
    on_gpu = [e for e in events if e.device_type() == DeviceType.CUDA]
    names = [e.name() for e in events if e.device_type() != DeviceType.CUDA]
    launches = sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
    replays = sum(name.startswith(("cudaGraphLaunch", "cuGraphLaunch")) for name in names)
    return result, (launches, replays, _busy([(e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu]))


def _busy(spans: Sequence[tuple[int, int]]) -> float | None:
    """The share of the time from the first kernel to the end of the last in which at least one runs."""
    ordered = sorted(spans)
    if not ordered:
        return None
    busy, reached = 0, ordered[0][0]
    for start, end in ordered:
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - ordered[0][0]
    return busy / whole if whole else None
