"""What was measured of a training step, as plain values: the times of steps, and what the GPU did in one of them.

Nothing is measured here, and torch is not imported: the commands that only read measurements start without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALL_US = 50.0
"""A kernel shorter than this takes about as long to launch as to run."""
WORTHWHILE = 0.05
"""The smallest saving, as a fraction of the step, for which a program should be changed, predicted or measured."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_GRAPH_LAUNCH = "cudaGraphLaunch"
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")


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
