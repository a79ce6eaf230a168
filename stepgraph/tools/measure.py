"""Measures a training step: its time, the kernels that it runs, and the time in which the GPU waits.

Step time comes from CUDA events between steps, so that nothing waits inside the timed block. What the GPU does comes
from one profiled step: the intervals of its kernels, copies and fills. Their union is the *busy* time, the shortest
time that a step with these kernels can take, unless some of them run side by side. On a CPU a step is over when its
call returns, and there are no kernels to see.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from stepgraph.tools.timeline import StepTimes, Timeline, read_trace

Call = Callable[[], Any]


def time_steps(call: Call, steps: int, device: torch.device) -> StepTimes:
    """Time steps one after the other, without waiting in between."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    marks = [mark(device)]
    for _ in range(steps):
        call()
        marks.append(mark(device))
    return StepTimes(elapsed_ms(marks, device))


def mark(device: torch.device) -> Any:
    """Return a moment of the device: an event on a GPU, else the time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(marks: Sequence[Any], device: torch.device) -> tuple[float, ...]:
    """Return the times between marks of a device, in milliseconds."""
    if device.type != "cuda":
        return tuple(1e3 * (after - before) for before, after in pairwise(marks))
    torch.cuda.synchronize(device)
    return tuple(before.elapsed_time(after) for before, after in pairwise(marks))


def host_ms(call: Call, device: torch.device) -> float:
    """Return the milliseconds until a call returns, the queue of the device drained before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begun)


def wall_ms(call: Call, device: torch.device) -> float:
    """Return the milliseconds until the device has done a call, its queue drained before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most bytes that torch's allocator held; None where they are not counted."""

    allocated: int | None = None
    reserved: int | None = None


def peaks_of(device: torch.device) -> Peaks:
    """Return the peaks since they were reset."""
    if device.type != "cuda":
        return Peaks()
    return Peaks(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def reset_peaks(device: torch.device) -> None:
    """Let the allocator free what it does not need, and forget its peaks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def timeline_of(call: Call, device: torch.device) -> Timeline:
    """Run one step under torch's profiler; return what the GPU did. Without a GPU, nothing was seen."""
    with profiled(device) as found:
        call()
    return found[0]


@contextlib.contextmanager
def profiled(device: torch.device) -> Iterator[list[Timeline]]:
    """Profile a block; afterwards the list that it was given has one timeline."""
    found: list[Timeline] = []
    if device.type != "cuda":
        yield found
        found.append(Timeline())
        return
    with traced(device, host=False) as traces:
        yield found
    found.append(read_trace(traces[0]))


@contextlib.contextmanager
def traced(device: torch.device, *, host: bool = True) -> Iterator[list[Mapping[str, Any]]]:
    """Profile a block; afterwards the list that it was given has one Chrome trace.

    Without `host` it has what the GPU ran and the calls of CUDA, which is a small part of the trace.
    """
    found: list[Mapping[str, Any]] = []
    activities = [torch.profiler.ProfilerActivity.CPU] if host else []
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        yield found
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found.append(json.loads(path.read_text(encoding="utf-8"), strict=False))
