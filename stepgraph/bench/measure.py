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
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

SMALL_US = 50.0
"""A kernel shorter than this takes about as long to launch as to run."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_GRAPH_LAUNCH = "cudaGraphLaunch"
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ran on the GPU, and when: a kernel, a copy or a fill."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class Timeline:
    """The work of the GPU in one step, in the order of its beginning."""

    kernels: tuple[Kernel, ...] = ()
    launches: int = 0
    """Kernels that the host launched one by one."""
    graph_launches: int = 0
    waits: int = 0
    """Times that the host waited for a stream, an event or a copy."""

    @property
    def busy_ms(self) -> float:
        """The time in which at least one kernel ran."""
        return union_length((kernel.start_us, kernel.end_us) for kernel in self.kernels) / 1e3

    @property
    def span_ms(self) -> float:
        """The time from the first kernel's beginning to the last one's end."""
        if not self.kernels:
            return 0.0
        return (max(kernel.end_us for kernel in self.kernels) - self.kernels[0].start_us) / 1e3

    @property
    def small(self) -> int:
        """The number of kernels shorter than 50 us."""
        return sum(kernel.duration_us < SMALL_US for kernel in self.kernels)

    def gaps_us(self) -> list[float]:
        """The times in which the GPU waited, in order."""
        found, reached = [], None
        for kernel in self.kernels:
            if reached is not None and kernel.start_us > reached:
                found.append(kernel.start_us - reached)
            reached = kernel.end_us if reached is None else max(reached, kernel.end_us)
        return found


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of steady steps, in milliseconds."""

    each: tuple[float, ...]
    audited: frozenset[int] = frozenset()
    """The places of steps in which calls were recorded again and compared with their graphs."""

    @property
    def steady(self) -> tuple[float, ...]:
        """The times of the steps without an audit; of all, if each had one."""
        return tuple(time for place, time in enumerate(self.each) if place not in self.audited) or self.each

    @property
    def audit_ms(self) -> float:
        """The time that audits added: what their steps took beyond the median of the others."""
        usual = statistics.median(self.steady)
        return sum(max(0.0, self.each[place] - usual) for place in self.audited)

    @property
    def median(self) -> float:
        return statistics.median(self.each)

    @property
    def p10(self) -> float:
        return quantile(self.each, 0.1)

    @property
    def p90(self) -> float:
        return quantile(self.each, 0.9)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation.

    Example:
        >>> quantile([1.0, 2.0, 3.0], 0.5)
        2.0
    """
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length covered by the intervals, overlaps counted once.

    Example:
        >>> union_length([(0, 2), (1, 3), (5, 6)])
        4.0
    """
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


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


def read_trace(trace: Mapping[str, Any]) -> Timeline:
    """Read what ran on the GPU from a Chrome trace.

    Annotations on the GPU's timeline span idle time too, so events are chosen by their category.
    """
    events = [event for event in trace["traceEvents"] if "dur" in event]
    found = [Kernel(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") in _ON_GPU]
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    return Timeline(
        tuple(sorted(found, key=lambda kernel: kernel.start_us)),
        launches=sum(name in _LAUNCHES for name in calls),
        graph_launches=sum(name.startswith(_GRAPH_LAUNCH) for name in calls),
        waits=sum(name in _WAITS for name in calls),
    )
