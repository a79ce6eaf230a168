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

from stepgraph.backends import Backend
from stepgraph.backends.tape.graph import TapeGraph
from stepgraph.proof.trace import fresh

__all__ = ["Cost", "cost_of"]

_TIMED = 3
"""Steps that are timed, of which the fastest counts: an audit makes some of them slow."""


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
    step_ms = min(_timed(call, batch, backend) for _ in range(_TIMED))
    launches, replays, busy = _on_cuda(call, batch) if backend.device.type == "cuda" else _on_tape(call, batch)
    return Cost(side, launches, replays, busy, step_ms, peak_bytes)


def _timed(call: Callable[..., Any], batch: tuple[Any, ...], backend: Backend) -> float:
    given = fresh(batch)
    backend.synchronize()
    begun = time.perf_counter()
    call(*given)
    backend.synchronize()
    return 1e3 * (time.perf_counter() - begun)


class _Counting(TorchDispatchMode):
    count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _on_tape(call: Callable[..., Any], batch: tuple[Any, ...]) -> tuple[int | None, int, None]:
    replays = 0
    code = TapeGraph.replay.__code__

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal replays
        replays += event == "call" and frame.f_code is code

    given, before = fresh(batch), sys.getprofile()
    sys.setprofile(note)
    try:
        call(*given)
    finally:
        sys.setprofile(before)
    if replays:
        return None, replays, None
    given = fresh(batch)
    with _Counting() as counting:
        call(*given)
    return counting.count, 0, None


def _on_cuda(call: Callable[..., Any], batch: tuple[Any, ...]) -> tuple[int, int, float | None]:
    from torch.profiler import ProfilerActivity, profile

    given = fresh(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call(*given)
        torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events() if seen.profiler is not None else []
    on_gpu = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    names = [e.name() for e in events if e.device_type() != torch.autograd.DeviceType.CUDA]
    launches = sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
    replays = sum(name.startswith(("cudaGraphLaunch", "cuGraphLaunch")) for name in names)
    return launches, replays, _busy([(e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu])


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
