"""Trains one small GPT twice from one seed, eager and graphed, and compares the two runs bit for bit.

Both runs execute the same `train_step` on the same batches. The model has dropout, the gradients are clipped and the
optimizer is a plain AdamW. So the comparison covers what is easy to get wrong: the random sequence, in-place gradient
work, and an optimizer that stays eager between two segments of the graph. The first steps of both runs, in which
stepgraph warms up and captures, are compared but not timed.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import stepgraph
from stepgraph.core.wording import counted
from stepgraph.lab.models import GPT, GPTConfig
from stepgraph.tools.verification.bits import same_bits

__all__ = ["SETTLING_STEPS", "DemoResult", "DemoRun", "run_demo"]

Batch = dict[str, Tensor]
OnStep = Callable[[str], None]

SETTLING_STEPS = 5
"""Steps left out of the times: three of warm-up, the capture, and one more."""

_BATCH_SIZE = 8
_SEQ_LEN = 64
_CONFIG = replace(GPTConfig.tiny(), num_layers=4, hidden_size=128, ffn_size=344, max_seq_len=_SEQ_LEN, dropout=0.1)


@dataclass(frozen=True)
class DemoRun:
    """The measurements of one training run."""

    losses: tuple[float, ...]
    """The loss of each step."""

    times_ms: tuple[float, ...]
    """The time of each step, warm-up and capture included."""

    peak_bytes: int | None
    """Peak memory; None if the backend does not measure it."""

    @property
    def step_ms(self) -> float:
        """Median time of a step once the run has settled."""
        return statistics.median(self.times_ms[SETTLING_STEPS:])


@dataclass(frozen=True)
class DemoResult:
    """The measurements of the two runs, and their comparison."""

    device: str
    """The device's name."""

    backend: str
    """The backend that replayed: "cuda", or "tape" on the CPU."""

    torch_version: str
    """The torch that ran both."""

    seed: int
    """The seed both runs start from."""

    eager: DemoRun
    graphed: DemoRun

    differing_parameters: tuple[str, ...]
    """Names of the parameters that are not equal bit for bit after the last step."""

    report: dict[str, Any]
    """The report of the captured step, by `Report.to_dict`."""

    @property
    def total_steps(self) -> int:
        """Training steps in each run, warm-up and capture included."""
        return len(self.eager.losses)

    @property
    def steps(self) -> int:
        """Steady steps in each run: those after warm-up and capture."""
        return self.total_steps - SETTLING_STEPS

    @property
    def replays(self) -> int:
        """Steps that were replayed."""
        return int(self.report["replays"])

    @property
    def speedup(self) -> float | None:
        """Eager over graphed; None on the tape, whose time says nothing about a GPU's."""
        return self.eager.step_ms / self.graphed.step_ms if self.backend == "cuda" else None

    @property
    def loss_difference(self) -> float:
        """Largest difference between the runs' losses over all steps."""
        return max(abs(a - b) for a, b in zip(self.eager.losses, self.graphed.losses, strict=True))

    @property
    def parameters_equal(self) -> bool:
        """True if every parameter has the same bits in both runs."""
        return not self.differing_parameters

    @property
    def equal(self) -> bool:
        """True if the runs are equal, and the graphed one replayed at least once."""
        return self.parameters_equal and self.loss_difference == 0.0 and self.replays > 0

    @property
    def equality(self) -> str:
        """A sentence about what was compared, and the outcome."""
        compared = f"stepgraph demo: {counted(self.total_steps, 'losses')} and all parameters"
        if self.equal:
            return f"{compared} equal eager's, the parameters bit for bit"
        return f"{compared} do not equal eager's" if self.replays else f"{compared}: nothing was replayed"

    def to_dict(self) -> dict[str, Any]:
        """Return the results and the verdicts as plain values."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("device", "backend", "torch_version", "steps", "total_steps", "seed", "speedup")
        }
        for phase, run in (("eager", self.eager), ("graphed", self.graphed)):
            found |= {f"{phase}_step_ms": run.step_ms, f"{phase}_loss": run.losses[-1]}
            found |= {f"{phase}_peak_bytes": run.peak_bytes}
            found |= {f"{phase}_losses": list(run.losses), f"{phase}_times_ms": list(run.times_ms)}
        found |= {name: self.report[name] for name in ("graphs", "segments", "nodes", "replays", "capture_seconds")}
        found |= {"loss_difference": self.loss_difference, "differing_parameters": list(self.differing_parameters)}
        return found | {"parameters_equal": self.parameters_equal, "equal": self.equal, "equality": self.equality}


def run_demo(steps: int, seed: int, device: torch.device, on_step: OnStep = lambda phase: None) -> DemoResult:
    """Train until there were `steps` steady steps, eager, then graphed, and return the comparison.

    `on_step` is called after every step with "eager" or "graphed", for a progress bar.
    """
    if steps < 1:
        raise ValueError(f"run_demo, argument `steps`: {steps} leaves no step to time; use at least 1")
    with _reproducible(device):
        batches = _make_batches(steps + SETTLING_STEPS, seed, device)
        eager, parameters, _ = _train(batches, seed, device, "eager", on_step)
        graphed, graphed_parameters, report = _train(batches, seed, device, "graphed", on_step)
    return DemoResult(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, 1 thread",
        backend=stepgraph.backend_for(device).name,
        torch_version=torch.__version__,
        seed=seed,
        eager=eager,
        graphed=graphed,
        differing_parameters=tuple(
            name for name, value in parameters.items() if not same_bits(value, graphed_parameters[name])
        ),
        report=report,
    )


def _train(
    batches: list[Batch], seed: int, device: torch.device, phase: str, on_step: OnStep
) -> tuple[DemoRun, dict[str, Tensor], dict[str, Any]]:
    """Train a fresh model over `batches`; phase "graphed" does so through `stepgraph.capture`.

    Return the measurements, the final parameters, and the report of the captured step.
    """
    backend = stepgraph.backend_for(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cached blocks of the earlier run must not count for this run's peak
    backend.reset_peak_memory()

    torch.manual_seed(seed)
    model = GPT(_CONFIG).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(batch: Batch) -> Tensor:
        loss: Tensor = model(batch["tokens"], batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses: list[Tensor] = []
    seconds: list[float] = []

    def train_all(step: Callable[[Batch], Tensor]) -> None:
        for batch in batches:
            backend.synchronize()
            start = time.perf_counter()
            loss = step(batch)
            backend.synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(loss)
            on_step(phase)

    report: dict[str, Any] = {}
    if phase == "graphed":
        with stepgraph.capture(train_step) as step:
            train_all(step)
            report = step.report().to_dict()
    else:
        train_all(train_step)
    run = DemoRun(
        losses=tuple(loss.item() for loss in losses),
        times_ms=tuple(1e3 * taken for taken in seconds),
        peak_bytes=backend.peak_memory_bytes(),
    )
    return run, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}, report


def _make_batches(steps: int, seed: int, device: torch.device) -> list[Batch]:
    """Make sequences that count up, each with its own stride: a small model learns them in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(_SEQ_LEN + 1)
    batches = []
    for _ in range(steps):
        first = torch.randint(_CONFIG.vocab_size, (_BATCH_SIZE, 1), generator=generator)
        stride = torch.randint(1, 4, (_BATCH_SIZE, 1), generator=generator)
        rows = ((first + stride * positions) % _CONFIG.vocab_size).to(device)
        batches.append({"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()})
    return batches


@contextmanager
def _reproducible(device: torch.device) -> Iterator[None]:
    """Make two eager runs equal, since otherwise equality with eager means nothing. Restore every setting afterwards.

    The CPU needs one thread, since reductions split over threads may add in another order. CUDA needs torch's
    deterministic algorithms, with a fixed cuBLAS workspace that must be set before cuBLAS starts.
    """
    num_threads = torch.get_num_threads()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        if device.type == "cuda":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace or ":4096:8"
            torch.use_deterministic_algorithms(True)
            # The mode also fills every new tensor with NaN, by kernels that the user's program does not have.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        else:
            torch.set_num_threads(1)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
