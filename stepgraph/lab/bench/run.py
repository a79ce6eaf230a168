"""One measured training run of a configuration: `benchmark(cfg)`.

The run is the training loop itself (`train.pretrain`), with a clock that listens to its events. First come
the iterations of warm-up and capture, and a few more in which caches settle; none of them is timed. Then come the
steady steps, timed between two events of the device; then one under torch's profiler, which shows the kernels; and one
more, so that the profiled one ends at the beginning of another.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from stepgraph.tools.measure import elapsed_ms, mark, peaks_of, profiled, reset_peaks
from stepgraph.tools.timeline import StepTimes, Timeline, quantile

if TYPE_CHECKING:
    from stepgraph.config.container import ConfigContainer
    from stepgraph.lab.bench.hardware import Gpu
    from stepgraph.lab.train.implementations import Implementation, Work
    from stepgraph.lab.train.run_report import RunReport
    from stepgraph.lab.train.setup import ModelProvider

SETTLE = 3
"""Iterations after the capture that are not timed."""
_DDP_WARMUP = 11


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device; None where they are not counted."""

    allocated: int | None = None
    reserved: int | None = None
    before_capture: int | None = None
    after_capture: int | None = None
    eager_reserved: int | None = None
    """Reserved at the peak of the eager iterations before the capture; None if there was none."""

    @property
    def over_eager(self) -> float | None:
        """Reserved memory with graphs, as a multiple of that of the eager iterations before them."""
        return self.reserved / self.eager_reserved if self.reserved and self.eager_reserved else None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The figures of one run."""

    times: StepTimes
    timeline: Timeline
    memory: Memory
    report: RunReport
    flops: int
    """Operations of one step, on all devices."""
    tokens: int
    """Tokens of one step, on all devices."""
    num_devices: int = 1
    gpu: Gpu | None = None

    @property
    def tflops(self) -> float:
        """TFLOP/s of each device."""
        return self.flops / self.num_devices / (self.times.median * 1e9)

    @property
    def mfu(self) -> float | None:
        """The fraction of the GPU's peak that the model's own operations reach."""
        return self.tflops / self.gpu.peak_tflops if self.gpu is not None else None

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.times.median

    @property
    def busy_fraction(self) -> float | None:
        """The fraction of a step in which the GPU works; None without a GPU."""
        return min(1.0, self.timeline.busy_ms / self.times.median) if self.timeline.kernels else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        report = self.report
        return {
            "step_ms": self.times.median,
            "step_ms_p10": self.times.p10,
            "step_ms_p90": self.times.p90,
            "step_ms_p90_steady": quantile(self.times.steady, 0.9),
            "steps": len(self.times.each),
            "step_ms_each": list(self.times.each),
            "audits": {
                "steps": sorted(self.times.audited),
                "seconds": self.times.audit_ms / 1e3,
                "in_all": report.graphs.audits if report.graphs is not None else 0,
            },
            "tflops_per_gpu": self.tflops,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "busy_ms": self.timeline.busy_ms if self.timeline.kernels else None,
            "busy_fraction": self.busy_fraction,
            "kernels": len(self.timeline.kernels) or None,
            "kernels_under_50us": self.timeline.small if self.timeline.kernels else None,
            "launches": self.timeline.launches,
            "graph_launches": self.timeline.graph_launches,
            "graphable_layers": report.graphed,
            "capture_seconds": report.capture_seconds,
            "memory": asdict(self.memory) | {"over_eager": self.memory.over_eager},
            "replays": report.replays,
            "eager_reasons": dict(report.eager_reasons),
            "implementation": report.implementation,
            "losses": {str(step): loss for step, loss in report.losses.items()},
            "loss": report.final_loss,
            "verdict": report.verdict,
        }


class Clock:
    """Listens to the events of a training run: marks the beginnings of steps, and profiles one.

    `first` is the number of iterations done when the first timed step begins. `audits` is asked at each beginning for
    the number of audits so far.
    """

    def __init__(self, device: torch.device, first: int, steps: int) -> None:
        self._device, self._first, self._steps = device, first, steps
        self._marks: list[Any] = []
        self._audits: list[int] = []
        self.audits: Callable[[], int] = lambda: 0
        self._profile = contextlib.ExitStack()
        self._timeline: list[Timeline] = []
        self.eager_reserved: int | None = None
        """The peak of the memory before the capture, if there was an iteration."""

    def __call__(self, name: str, step: int) -> None:
        if name == "capture" and step > 0:
            self.eager_reserved = peaks_of(self._device).reserved
        if name not in ("warmup", "replay") or step < self._first:
            return
        place = step - self._first
        if place <= self._steps:
            self._marks.append(mark(self._device))
            self._audits.append(self.audits())
        if place == self._steps + 1:
            self._timeline = self._profile.enter_context(profiled(self._device))
        if place == self._steps + 2:
            self._profile.close()

    def watch(self, implementation: Implementation) -> Implementation:
        """Ask this implementation for its audits; return it."""
        self.audits = lambda: implementation.audits
        return implementation

    def result(self) -> tuple[StepTimes, Timeline]:
        """Return what was measured, after the run."""
        self._profile.close()
        each = elapsed_ms(self._marks, self._device)
        counts = enumerate(pairwise(self._audits))
        audited = frozenset(place for place, (before, after) in counts if after > before)
        return StepTimes(each, audited), self._timeline[0] if self._timeline else Timeline()


class Regions:
    """A range of NVTX around each region of a run: `warmup 0`, `capture 3`, `replay 4`, ... For Nsight Systems."""

    def __init__(self, open_range: Callable[[str], contextlib.AbstractContextManager[Any]]) -> None:
        self._open_range = open_range
        self._open = contextlib.ExitStack()

    @classmethod
    def on(cls, device: torch.device) -> Regions:
        """Ranges on a GPU; none on a CPU, whose torch may have no NVTX."""
        return cls(torch.cuda.nvtx.range if device.type == "cuda" else contextlib.nullcontext)

    def __call__(self, name: str, step: int) -> None:
        """A region begins, and ends the one before."""
        self._open.close()
        self._open.enter_context(self._open_range(f"{name} {step}"))

    def close(self) -> None:
        self._open.close()


def benchmark(
    cfg: ConfigContainer,
    *,
    device: torch.device | str = "cpu",
    steps: int = 20,
    gpu: Gpu | None = None,
    implementation: Callable[[Work, ConfigContainer], Implementation] | None = None,
    model_provider: ModelProvider | None = None,
    quiet: bool = True,
) -> BenchResult:
    """Train a configuration for some steady steps, and return what they took.

    `steps` are those after warm-up and capture. `gpu` gives the peak for MFU; `implementation`, if it is
    not the configured one, what runs the iterations; `model_provider(cfg)` builds another model of the same sizes. The
    configuration's own number of iterations, checkpoints and evaluations are left out.

    Example:
        >>> found = benchmark(for_cpu(recipes.gpt2_small()), steps=5)
        >>> found.times.median, found.report.replays
    """
    from stepgraph.lab.bench.flops import flops_per_step  # the models import the compiler, which takes seconds
    from stepgraph.lab.train import pretrain
    from stepgraph.lab.train.implementations import choose

    where, made = torch.device(device), implementation or choose
    first = max(cfg.model.cuda_graph_warmup_steps, _DDP_WARMUP if _is_distributed() else 1) + 1 + SETTLE
    timed = _timed(cfg, first + steps + 3)
    clock, regions = Clock(where, first, steps), Regions.on(where)
    reset_peaks(where)
    with tempfile.TemporaryDirectory() as folder:
        timed.logger.log_dir = folder

        def on_event(name: str, step: int) -> None:
            clock(name, step)
            regions(name, step)

        def watched(work: Work, config: ConfigContainer) -> Implementation:
            return clock.watch(made(work, config))

        with contextlib.closing(regions):
            report = pretrain(
                timed,
                model_provider=model_provider,
                device=where,
                on_event=on_event,
                quiet=quiet,
                prints_report=False,  # its figures are in the result
                implementation=watched,
            )
    times, timeline = clock.result()
    return BenchResult(
        times=times,
        timeline=timeline,
        memory=_memory(where, report, clock.eager_reserved),
        report=report,
        flops=flops_per_step(timed),
        tokens=timed.train.global_batch_size * timed.model.seq_length,
        num_devices=_world_size(),
        gpu=gpu,
    )


def _timed(cfg: ConfigContainer, iterations: int) -> ConfigContainer:
    found = cfg.copy()
    found.train.train_iters, found.train.eval_iters = iterations, 0
    found.checkpoint.save = found.checkpoint.load = None
    found.scheduler.lr_decay_iters = found.scheduler.lr_decay_iters or iterations
    return found


def _memory(device: torch.device, report: RunReport, eager_reserved: int | None) -> Memory:
    peaks = peaks_of(device)
    return Memory(peaks.allocated, peaks.reserved, report.memory_before, report.memory_after, eager_reserved)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_distributed() -> bool:
    return _world_size() > 1
