"""Measuring code of `stepgraph.tools.measure`, without a GPU: intervals, quantiles and traces."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.tools.measure import time_steps
from stepgraph.tools.timeline import Kernel, StepTimes, Timeline, quantile, read_trace, union_length

INTERVALS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), max_size=12)


@given(INTERVALS)
def test_union_length_counts_each_moment_once(pairs: list[tuple[int, int]]) -> None:
    covered = {moment for start, length in pairs for moment in range(start, start + length)}
    assert union_length((start, start + length) for start, length in pairs) == len(covered)


@given(INTERVALS)
def test_timeline_span_is_busy_time_and_gaps(pairs: list[tuple[int, int]]) -> None:
    kernels = sorted((Kernel("k", start, length) for start, length in pairs), key=lambda kernel: kernel.start_us)
    timeline = Timeline(tuple(kernels))
    assert timeline.busy_ms * 1e3 + sum(timeline.gaps_us()) == pytest.approx(timeline.span_ms * 1e3)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_quantile_lies_between_the_extremes(values: list[float], fraction: float) -> None:
    assert min(values) <= quantile(values, fraction) * (1 + 1e-12)
    assert quantile(values, fraction) <= max(values) * (1 + 1e-12)


def test_step_times_report_median_and_spread() -> None:
    times = StepTimes(tuple(float(n) for n in range(11)))
    assert (times.p10, times.median, times.p90) == (1.0, 5.0, 9.0)


def test_trace_reader_takes_kernels_and_launches() -> None:
    events = [
        {"cat": "kernel", "name": "late", "ts": 100.0, "dur": 60.0},
        {"cat": "kernel", "name": "gemm", "ts": 10.0, "dur": 20.0},
        {"cat": "gpu_memset", "name": "fill", "ts": 20.0, "dur": 15.0},
        {"cat": "gpu_user_annotation", "name": "step", "ts": 0.0, "dur": 500.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 1.0},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 2.0, "dur": 1.0},
        {"name": "no duration", "ts": 3.0},
    ]
    timeline = read_trace({"traceEvents": events})
    assert [kernel.name for kernel in timeline.kernels] == ["gemm", "fill", "late"]
    assert (timeline.launches, timeline.graph_launches, timeline.small) == (1, 1, 2)
    assert timeline.busy_ms == pytest.approx(0.085)
    assert timeline.gaps_us() == [65.0]


def test_steps_on_the_cpu_are_timed_one_by_one() -> None:
    calls: list[int] = []
    times = time_steps(lambda: calls.append(1), 3, torch.device("cpu"))
    assert len(calls) == len(times.each) == 3
    assert all(each >= 0 for each in times.each)
