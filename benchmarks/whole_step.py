"""A whole training step, from eager to captured: time, memory and equality, in one command.

    python benchmarks/whole_step.py

The step is four microbatches of forward and backward, then fused AdamW, on a bf16 GPT of GPT-2-small's shape, with one
sequence a microbatch (the host cannot launch fast enough) and with eight (the GPU is the limit). Every variant trains
the same model from the same seed on the same batches. Each runs in a process of its own, so that no variant inherits
another's allocator, compile cache in memory or CUDA context. The processes import torch side by side at the start and
then wait their turn: at any time one of them is measured and the others sleep, having touched no GPU.

What the columns mean:

- step: median time of 20 steps after 8 warm ones, from CUDA events between steps, with no synchronisation inside the
  block. `again` is a second block of 20 in the same process: the difference is the run's own spread.
- busy: union of the GPU's kernel, copy and fill intervals in one profiled step. A step that runs the same kernels
  cannot be shorter, save by running some side by side.
- host: median time until the call returns, the queue drained before it.
- capture: wall clock of the call that captured, its first replay included; the same definition for every variant.
- reserved, allocated: peaks of torch's allocator from before the model is built to the end.
- loss: after 48 steps (8 + 20 + 20). Graphs should change it no more than eager's own noise; compiled kernels may.

Equality is a claim under deterministic algorithms: two eager runs and one captured run of 100 steps each, from one
seed, compared bit by bit. The same without deterministic algorithms shows the noise that eager has against itself.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"
MICROBATCHES = 4
WARMUP = 3
"""Eager calls before a capture, for the hand-written graphs as for `stepgraph.capture`'s default."""
WARM_STEPS = 8
HOST_CALLS = 10
GIB = 2**30

WORKLOADS = {"gpt2-small": 1, "gpt2-small-mb8": 8}
"""Name of each workload and its sequences a microbatch."""

TIMED = (
    "eager",
    "compile",
    "reduce-overhead",
    "hand-full",
    "hand-full+opt",
    "compile+hand-full+opt",
    "ours",
    "ours+compile",
)
EQUALITY = ("equality", "equality-nondeterministic")

Record = dict[str, Any]
Step = Callable[[Tensor, Tensor], Tensor]
State = dict[str, dict[str, Tensor]]


# ---------------------------------------------------------------------------------------------------------------------
# Figures from measurements: pure functions


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length covered by the intervals, overlaps counted once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def gpu_intervals(trace: Record) -> list[tuple[float, float]]:
    """Return (start, end) in microseconds of what ran on the GPU, from a Chrome trace.

    Annotations projected on the GPU's timeline span idle time too, hence the choice by category.
    """
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    return [(e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e.get("cat") in on_gpu and "dur" in e]


def error_line(text: str, limit: int = 240) -> str:
    """Return the first non-empty line of an error's text, shortened."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:limit]


def last_json(text: str) -> Record | None:
    """Return the last line that is a JSON object, or None."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                return dict(json.loads(line))
    return None


def find(records: Sequence[Record], workload: str, variant: str) -> Record:
    """Return the record of one worker, empty where it did not run or failed."""
    for record in records:
        if (record["workload"], record["variant"]) == (workload, variant) and "error" not in record:
            return record
    return {}


def ratio(records: Sequence[Record], workload: str, variant: str, base: str, figure: str) -> float | None:
    """Return a figure of one variant over that of another, or None where either is missing."""
    upper, lower = find(records, workload, variant).get(figure), find(records, workload, base).get(figure)
    return upper / lower if upper is not None and lower else None


def bits_of(tensor: Tensor) -> Tensor:
    """View a tensor as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(widths[tensor.element_size()])


def compare(left: State, right: State) -> dict[str, Record]:
    """Compare two states bit by bit; for each group: tensors, how many differ, the first that does, the widest gap."""
    result = {}
    for group in left:
        differing, widest = [], 0.0
        names = sorted(left[group].keys() | right[group].keys())
        for name in names:
            a, b = left[group].get(name), right[group].get(name)
            if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
                differing.append(name)
            elif not torch.equal(bits_of(a), bits_of(b)):
                differing.append(name)
                widest = max(widest, (a.double() - b.double()).abs().max().item())
        first = differing[0] if differing else None
        result[group] = {"tensors": len(names), "differing": len(differing), "first": first, "widest_gap": widest}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Targets


@dataclass(frozen=True)
class Target:
    """One figure to reach, what was measured, and whether that reaches it."""

    workload: str
    name: str
    limit: str
    measured: str
    reached: bool


RATIO_TARGETS = (
    ("ours", "hand-full+opt", "step_ms", "<=", 1.01),
    ("ours+compile", "reduce-overhead", "step_ms", "<", 1.0),
    ("ours", "eager", "reserved_bytes", "<=", 1.10),
)
"""A variant, the one it is held against, the figure, and the limit of their ratio."""


def ratio_target(records: Sequence[Record], workload: str, target: tuple[str, str, str, str, float]) -> Target:
    """Judge one of `RATIO_TARGETS` on one workload."""
    variant, base, figure, sign, limit = target
    value = ratio(records, workload, variant, base, figure)
    reached = value is not None and (value < limit if sign == "<" else value <= limit)
    name = f"{variant} / {base}: {'step time' if figure == 'step_ms' else 'peak reserved memory'}"
    return Target(workload, name, f"{sign} {limit:.2f}", "not measured" if value is None else f"{value:.4f}", reached)


def capture_target(records: Sequence[Record], workload: str) -> Target:
    """Judge the seconds of capture for each layer."""
    value = find(records, workload, "ours").get("capture_s_per_layer")
    measured = "not measured" if value is None else f"{value:.4f} s"
    reached = value is not None and bool(value < 0.05)
    return Target(workload, "ours: capture, for each layer", "< 0.05 s", measured, reached)


def equality_target(record: Record) -> Target:
    """Judge bit-equality after the run; a run that never replayed, or that lost its numbers to NaN, proves nothing."""
    groups = record["pairs"]["eager vs ours"]
    judged = [groups[g] for g in ("losses", "parameters", "optimizer")]
    differing, tensors = sum(g["differing"] for g in judged), sum(g["tensors"] for g in judged)
    replays = record["engine"].get("replays", 0)
    measured = f"{differing} of {tensors} differ, {replays} replays" + ("" if record["finite"] else ", not finite")
    name = f"ours: losses, parameters, optimizer state bit-equal to eager after {record['steps']} steps"
    reached = differing == 0 and tensors > 0 and replays > 0 and record["finite"]
    return Target(record["workload"], name, "0 differ", measured, reached)


def judge(records: Sequence[Record], workloads: Sequence[str], equality_on: str) -> list[Target]:
    """Return every target with what was measured."""
    targets = []
    for workload in workloads:
        targets += [ratio_target(records, workload, target) for target in RATIO_TARGETS]
        targets.append(capture_target(records, workload))
    record = find(records, equality_on, "equality")
    missing = Target(equality_on, "ours: bit-equal to eager", "0 differ", "not measured", reached=False)
    return [*targets, equality_target(record) if record else missing]


# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows of strings, for the terminal and for Markdown alike

Rows = list[list[str]]

# fmt: off
STEP_HEADER = (
    "variant", "step ms", "again ms", "busy ms", "step/busy", "vs eager", "host ms", "capture s", "s/layer",
    "reserved GiB", "allocated GiB", "loss",
)
ENGINE_KEYS = (
    "graphs", "segments", "nodes", "captures", "recaptures", "replays", "eager_calls", "eager_reasons",
    "capture_seconds", "pool_bytes", "static_bytes",
)
# fmt: on


def number(value: float | None, digits: int) -> str:
    """Format a figure, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def step_rows(records: Sequence[Record], workload: str) -> Rows:
    """Return the rows of one workload's table under `STEP_HEADER`; a failed variant's row is its error."""
    rows = [[*STEP_HEADER]]
    for r in records:
        if r["workload"] != workload or r["variant"] in EQUALITY:
            continue
        if "error" in r:
            rows.append([r["variant"], f"failed: {r['error']}", *[""] * (len(STEP_HEADER) - 2)])
            continue
        slower = ratio(records, workload, "eager", r["variant"], "step_ms")
        rows.append(
            [
                r["variant"],
                number(r["step_ms"], 2),
                number(r["again_ms"], 2),
                number(r["busy_ms"], 2),
                number(r["step_ms"] / r["busy_ms"] if r["busy_ms"] else None, 3),
                "" if slower is None else f"{slower:.2f}x",
                number(r["host_ms"], 2),
                number(r["capture_s"], 3),
                number(r["capture_s_per_layer"], 4),
                number(r["reserved_bytes"] / GIB, 3),
                number(r["allocated_bytes"] / GIB, 3),
                number(r["loss"], 6),
            ]
        )
    return rows


def engine_rows(records: Sequence[Record]) -> Rows:
    """Return what stepgraph's own report said in each run that used it."""
    rows = [["workload", "variant", *ENGINE_KEYS]]
    for r in records:
        if r.get("engine"):
            rows.append([r["workload"], r["variant"], *(short(r["engine"].get(key)) for key in ENGINE_KEYS)])
    return rows


def short(value: Any) -> str:
    """Format one value of the engine's report for a table's cell."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {short(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return str(len(value))
    return "" if value is None else str(value)


def equality_rows(records: Sequence[Record]) -> Rows:
    """Return one row for each pair of runs and each group of tensors compared."""
    rows = [["algorithms", "pair", "compared", "tensors", "differing", "widest gap", "first that differs"]]
    for r in records:
        if r["variant"] not in EQUALITY:
            continue
        label = "deterministic" if r["variant"] == "equality" else "default"
        if "error" in r:
            rows.append([label, f"failed: {r['error']}", *[""] * 5])
            continue
        for pair, groups in r["pairs"].items():
            for group, g in groups.items():
                counts = [str(g["tensors"]), str(g["differing"]), f"{g['widest_gap']:.3g}", g["first"] or ""]
                rows.append([label, pair, group, *counts])
    return rows


def memory_rows(records: Sequence[Record], workloads: Sequence[str]) -> Rows:
    """Return ours over eager, peak reserved and peak allocated."""
    rows = [["workload", "reserved, ours / eager", "allocated, ours / eager"]]
    for w in workloads:
        figures = (ratio(records, w, "ours", "eager", f) for f in ("reserved_bytes", "allocated_bytes"))
        rows.append([w, *("not measured" if f is None else f"{f:.4f}" for f in figures)])
    return rows


def target_rows(targets: Sequence[Target]) -> Rows:
    """Return the targets' table."""
    rows = [["workload", "target", "limit", "measured", "reached"]]
    return rows + [[t.workload, t.name, t.limit, t.measured, "yes" if t.reached else "no"] for t in targets]


def markdown_table(rows: Rows) -> str:
    """Render rows, the first being the header, as a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """Return the report's tables in order, each with its title; empty ones are left out."""
    records, workloads = summary["records"], summary["workloads"]
    tables = [(f"{w}: {MICROBATCHES} microbatches of {WORKLOADS[w]}", step_rows(records, w)) for w in workloads]
    tables.append(("Memory", memory_rows(records, workloads)))
    tables.append(("What stepgraph reported", engine_rows(records)))
    tables.append((f"Equality on {summary['equality_on']}, bit by bit", equality_rows(records)))
    tables.append(("Targets", target_rows([Target(**t) for t in summary["targets"]])))
    return [(title, rows) for title, rows in tables if len(rows) > 1]


def markdown(summary: Record) -> str:
    """Render the whole report."""
    facts = [f"- {key}: {value}" for key, value in summary["environment"].items()]
    parts = ["# Whole step", "\n".join(facts), f"`{summary['command']}`"]
    for title, rows in sections(summary):
        parts += [f"## {title}", markdown_table(rows)]
    parts.append("The columns are explained at the head of `benchmarks/whole_step.py`.")
    return "\n\n".join(parts) + "\n"


def summarise(records: list[Record], workloads: list[str], environment: Record, command: str) -> Record:
    """Put records, environment and judged targets together: what is written as JSON and rendered as Markdown."""
    equality_on = workloads[0]
    return {
        "environment": environment,
        "command": command,
        "workloads": workloads,
        "equality_on": equality_on,
        "memory": {w: ratio(records, w, "ours", "eager", "reserved_bytes") for w in workloads},
        "targets": [asdict(t) for t in judge(records, workloads, equality_on)],
        "records": records,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The variants: inside a worker


def build_model(layers: int) -> torch.nn.Module:
    """Return the model in bf16 on the GPU, always with the same weights."""
    from stepgraph.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = GPT(replace(GPTConfig.gpt2_small(), num_layers=layers))
    return model.to(torch.bfloat16)


def build_batches(workload: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` batches of (tokens, targets), each [microbatch, sequence, position], always the same."""
    from stepgraph.models.gpt import GPTConfig

    config = GPTConfig.gpt2_small()
    generator = torch.Generator(DEVICE).manual_seed(7)
    shape = (MICROBATCHES, WORKLOADS[workload], config.max_seq_len + 1)
    drawn = (torch.randint(config.vocab_size, shape, device=DEVICE, generator=generator) for _ in range(count))
    return [(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()) for tokens in drawn]


def fused_adamw(model: torch.nn.Module, *, capturable: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer that every variant uses."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)


def accumulate(model: Callable[..., Tensor], tokens: Tensor, targets: Tensor, *, mark_steps: bool = False) -> Tensor:
    """Run forward and backward of every microbatch; return the mean loss."""
    total = torch.zeros((), device=tokens.device)
    for i in range(MICROBATCHES):
        if mark_steps:
            torch.compiler.cudagraph_mark_step_begin()
        loss = model(tokens[i], targets[i]) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    return total


def plain_step(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """Return the step as a user writes it for eager."""

    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = accumulate(model, tokens, targets)
        optimizer.step()
        return loss

    return train_step


def reduce_overhead_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the step under torch.compile's own graphs.

    They allow accumulation only into gradients that they do not own: allocated beforehand and zeroed in place.
    """
    compiled = torch.compile(model, mode="reduce-overhead")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = accumulate(compiled, tokens, targets, mark_steps=True)
        optimizer.step()
        return loss

    return train_step


class HandGraph:
    """The full iteration captured by hand, as an expert writes it for one shape.

    The first calls train eagerly on the stream that later captures, so that the gradients' accumulators, the cuBLAS
    workspaces and the optimizer's state exist there. Gradients are None when the capture begins: the first microbatch
    then writes them at their fixed addresses and the rest add, so that no replay needs a zeroing. They stay attached,
    which is what an optimizer outside the graph reads. The returned loss is overwritten by the next call.
    """

    def __init__(
        self, model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, *, optimizer_inside: bool
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.optimizer_inside = optimizer_inside
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.loss: Tensor | None = None
        self.calls = 0

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.calls == 0:
            self.inputs = (tokens.clone(), targets.clone())
        self.calls += 1
        for static, given in zip(self.inputs, (tokens, targets), strict=True):
            static.copy_(given)
        if self.calls <= WARMUP:
            self._run_eagerly()
        else:
            if self.graph is None:
                self.graph = self._capture()
            self.graph.replay()
        if not self.optimizer_inside:
            self.optimizer.step()
        return self.loss

    def _run_eagerly(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._iterate()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self) -> torch.cuda.CUDAGraph:
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._iterate()
        return graph

    def _iterate(self) -> None:
        self.loss = accumulate(self.model, *self.inputs)
        if self.optimizer_inside:
            self.optimizer.step()


def build_step(variant: str, model: torch.nn.Module) -> Step:
    """Return the step of a timed variant."""
    run = torch.compile(model) if "compile" in variant else model
    match variant:
        case "eager" | "compile":
            return plain_step(run, fused_adamw(model))
        case "reduce-overhead":
            return reduce_overhead_step(model, fused_adamw(model))
        case "hand-full":
            return HandGraph(run, fused_adamw(model), optimizer_inside=False)
        case "hand-full+opt" | "compile+hand-full+opt":
            return HandGraph(run, fused_adamw(model, capturable=True), optimizer_inside=True)
        case "ours" | "ours+compile":
            import stepgraph

            return stepgraph.capture(plain_step(run, fused_adamw(model)))
    raise ValueError(f"unknown variant {variant!r}; one of {', '.join(TIMED)}")


def engine_report(step: Any) -> Record:
    """Return stepgraph's report of a captured step, and close it; nothing for the other variants."""
    if not hasattr(step, "report"):
        return {}
    report = dict(step.report().to_dict())
    step.close()
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Measuring: inside a worker


def time_block(call: Callable[[], Tensor], steps: int) -> tuple[list[float], Tensor]:
    """Return the milliseconds of each step, from events between steps, and the last loss."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        loss = call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)], loss


def wall_seconds(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Return (until the call returned, until the GPU was done) in seconds, the queue drained before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return returned - start, time.perf_counter() - start


def profile_step(call: Callable[[], Tensor]) -> list[tuple[float, float]]:
    """Return the intervals in microseconds in which the GPU worked during one step."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gpu_intervals(json.loads(path.read_text(), strict=False))


def measure(workload: str, variant: str, steps: int, layers: int) -> Record:
    """Run one timed variant from the model's construction to its report."""
    torch.cuda.reset_peak_memory_stats()
    batches = build_batches(workload, 8)
    step = build_step(variant, build_model(layers))
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return step(*batches[(calls - 1) % len(batches)])

    warm = [wall_seconds(call)[1] for _ in range(WARM_STEPS)]
    first, _ = time_block(call, steps)
    second, loss = time_block(call, steps)
    final_loss, trained = loss.item(), calls
    host = [wall_seconds(call)[0] for _ in range(HOST_CALLS)]
    intervals = profile_step(call)
    # The call that captures stands out among those after the warm-up, whichever of them it is.
    capture_s = max(warm[WARMUP:]) if "hand" in variant or "ours" in variant else None
    return {
        "step_ms": statistics.median(first),
        "again_ms": statistics.median(second),
        "fastest_ms": min(first + second),
        "slowest_ms": max(first + second),
        "busy_ms": union_length(intervals) / 1e3 if intervals else None,
        "gpu_intervals": len(intervals),
        "host_ms": statistics.median(host) * 1e3,
        "warm_calls_s": warm,
        "capture_s": capture_s,
        "capture_s_per_layer": None if capture_s is None else capture_s / layers,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "loss": final_loss,
        "trained_steps": trained,
        "engine": engine_report(step),
    }


def train(batches: Sequence[tuple[Tensor, Tensor]], layers: int, *, captured: bool) -> tuple[State, Record]:
    """Train on the batches from the seed; return copies of all that can be compared, and the engine's report."""
    model = build_model(layers)
    optimizer = fused_adamw(model)
    step = plain_step(model, optimizer)
    if captured:
        import stepgraph

        step = stepgraph.capture(step)
    losses = {f"step {i}": step(*batch) for i, batch in enumerate(batches)}
    names = [name for name, _ in model.named_parameters()]
    slots = optimizer.state_dict()["state"]
    state = {
        "losses": losses,
        "parameters": model.state_dict(),
        "optimizer": {f"{names[i]}.{key}": value for i, slot in slots.items() for key, value in slot.items()},
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }
    copies = {group: {name: t.detach().clone() for name, t in tensors.items()} for group, tensors in state.items()}
    return copies, engine_report(step)


def measure_equality(workload: str, steps: int, layers: int, *, deterministic: bool) -> Record:
    """Train eager, eager again and captured; compare both with the first."""
    torch.use_deterministic_algorithms(deterministic)
    batches = build_batches(workload, steps)
    reference, _ = train(batches, layers, captured=False)
    pairs: dict[str, dict[str, Record]] = {}
    engine: Record = {}
    for pair, captured in (("eager vs eager", False), ("eager vs ours", True)):
        gc.collect()
        state, engine = train(batches, layers, captured=captured)
        pairs[pair] = compare(reference, state)
    losses = [value.item() for value in reference["losses"].values()]
    return {
        "steps": steps,
        "deterministic": deterministic,
        "pairs": pairs,
        "finite": all(map(math.isfinite, losses)),
        "eager_losses": losses,
        "engine": engine,
    }


def worker(args: argparse.Namespace) -> int:
    """Measure one variant and print its record as one line of JSON."""
    workload, variant = args.worker
    record: Record = {"workload": workload, "variant": variant, "layers": args.layers}
    if variant == "equality":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with a fixed workspace
    if args.wait:
        for module in ("torch._dynamo", "torch.profiler", "stepgraph", "stepgraph.models.gpt"):
            with contextlib.suppress(ImportError):  # a missing one is an error of the measurement, reported by it
                importlib.import_module(module)
        print("ready", flush=True)
        if not sys.stdin.readline():
            return 1  # the parent is gone
    start = time.perf_counter()
    try:
        if variant in EQUALITY:
            deterministic = variant == "equality"
            record |= measure_equality(workload, args.equality_steps, args.layers, deterministic=deterministic)
        else:
            record |= measure(workload, variant, args.steps, args.layers)
        record["gpu"] = torch.cuda.get_device_name()
    except Exception as error:  # noqa: BLE001 - whatever fails is the variant's result
        traceback.print_exc()
        record["error"] = f"{type(error).__name__}: {error_line(str(error))}"
    record["worker_s"] = time.perf_counter() - start
    print(json.dumps(record, default=str), flush=True)
    return 1 if "error" in record else 0


# ---------------------------------------------------------------------------------------------------------------------
# The parent: starts the workers, lets them run in turn, collects

Job = tuple[str, str]


@dataclass(frozen=True)
class Worker:
    """A worker's process, started and waiting for its turn."""

    job: Job
    process: subprocess.Popen[str]
    log: IO[str]


def plan(workloads: Sequence[str], variants: Sequence[str]) -> list[list[Job]]:
    """Return the jobs in order, in groups that may run at the same time.

    A timed variant has the machine to itself. The two equality runs measure no time, and so share it. They run on the
    first workload only: on a GPU-bound one they take minutes and show the same.
    """
    untimed = [(workloads[0], v) for v in EQUALITY if v in variants]
    timed = [[(w, v)] for w in workloads for v in TIMED if v in variants]
    return [*timed, untimed] if untimed else timed


def start_worker(job: Job, args: argparse.Namespace) -> Worker:
    """Start a worker, which imports what it needs and waits."""
    figures = ("steps", "equality_steps", "layers")
    options = [text for f in figures for text in (f"--{f.replace('_', '-')}", str(getattr(args, f)))]
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", *job, "--wait", *options]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the worker
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # a compiling worker has children of its own: they end with its group
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    return Worker(job, process, log)


def stop_worker(worker: Worker) -> None:
    """End a worker and its children, if it still runs."""
    if worker.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()


def release(worker: Worker) -> None:
    """Tell a waiting worker that it is its turn."""
    with contextlib.suppress(BrokenPipeError):  # it died while importing: `collect` reports that
        worker.process.stdin.write("go\n")
        worker.process.stdin.flush()


def collect(worker: Worker, timeout_s: float) -> Record:
    """Wait for a worker's record; make one with the error where there is none."""
    fate = ""
    try:
        output, _ = worker.process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        fate = f"no result within {timeout_s:.0f} s"
        stop_worker(worker)
        output, _ = worker.process.communicate()
    record = last_json(output)
    if record is not None:
        return record
    worker.log.seek(0)
    tail = [line.strip() for line in worker.log.read().splitlines() if line.strip()][-1:]
    error = fate or f"exit status {worker.process.returncode}: {' '.join(tail)}"
    return {"workload": worker.job[0], "variant": worker.job[1], "error": error_line(error)}


def run_all(
    groups: list[list[Job]], args: argparse.Namespace, publish: Callable[[list[Record]], Record]
) -> list[Record]:
    """Run every group in turn, saying how it went on stderr and publishing what there is after each."""
    records: list[Record] = []
    total = sum(map(len, groups))
    print(f"{total} workers import torch", file=sys.stderr)
    workers = {job: start_worker(job, args) for group in groups for job in group}
    try:
        for waiting in workers.values():
            waiting.process.stdout.readline()
        for group in groups:
            for job in group:
                release(workers[job])
            for job in group:
                record = collect(workers[job], args.timeout)
                records.append(record)
                print(progress(record, len(records), total), file=sys.stderr, flush=True)
            publish(records)
    finally:
        for each in workers.values():
            stop_worker(each)
            each.log.close()
    return records


def progress(record: Record, index: int, total: int) -> str:
    """Return one line on how a worker went."""
    if "error" in record:
        outcome = f"failed: {record['error']}"
    elif "pairs" in record:
        outcome = ", ".join(
            f"{pair}: {sum(g['differing'] for g in groups.values())} tensors differ"
            for pair, groups in record["pairs"].items()
        )
    else:
        outcome = f"{record['step_ms']:.2f} ms"
    return f"[{index}/{total}] {record['workload']} {record['variant']}: {outcome} ({record.get('worker_s', 0):.0f} s)"


def machine_facts() -> Record:
    """Return what a reader needs to know of the machine and its software; touches no GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = error_line(subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError):
        answer = "unknown, unknown"
    gpu, _, driver = answer.partition(", ")
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "date": datetime.date.today().isoformat(),
        "GPU": gpu,
        "driver": driver,
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
    }


def command_line(options: Sequence[str]) -> str:
    """Return the command as typed, but for the output folder, which only says where this report was put first."""
    words = ["python", "benchmarks/whole_step.py", *options]
    for i, word in enumerate(words):
        if word == "--out" and i + 1 < len(words):
            words[i + 1] = "DIR"
        elif word.startswith("--out="):
            words[i] = "--out=DIR"
    return shlex.join(words)


def default_folder(facts: Record) -> Path:
    """Return the dated folder of this GPU's results."""
    gpu = re.sub(r"[^a-z0-9]+", "-", facts["GPU"].lower().replace("nvidia", "")).strip("-")
    return ROOT / "benchmarks" / "results" / f"{facts['date']}-{gpu}"


def show(summary: Record) -> None:
    """Print the report's tables."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(markdown(summary))
        return
    console = Console(width=None if sys.stdout.isatty() else 170)
    for title, rows in sections(summary):
        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)


def name_list(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argument's type: names from `known`, separated by commas, in the known order."""
    known = list(known)

    def parse(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",") if name.strip()]
        if wrong := sorted(set(given) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not among {', '.join(known)}")
        return [name for name in known if name in given]

    return parse


def count(text: str) -> int:
    """Parse a positive number of things."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    every = [*TIMED, *EQUALITY]
    parser = argparse.ArgumentParser(description="Time, memory and equality of a whole training step, every way.")
    parser.add_argument("--workloads", type=name_list(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--variants", type=name_list(every), default=every, help=", ".join(every))
    parser.add_argument("--steps", type=count, default=20, help="steps a timed block (20)")
    parser.add_argument("--equality-steps", type=count, default=100, help="steps compared (100)")
    parser.add_argument("--layers", type=count, default=12, help="layers of the model (12); fewer for a quick test")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a worker may take (150)")
    parser.add_argument("--out", type=Path, help="folder for the reports (benchmarks/results/DATE-GPU)")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "VARIANT"), help="measure one variant, print JSON")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.workloads or not args.variants:
        parser.error("name at least one workload and one variant")
    if args.worker and (args.worker[0] not in WORKLOADS or args.worker[1] not in every):
        parser.error(f"--worker takes a workload ({', '.join(WORKLOADS)}) and a variant ({', '.join(every)})")
    return args


def main() -> int:
    """Run the benchmark; return 1 if a variant failed."""
    args = parse_arguments()
    if args.worker:
        return worker(args)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch finds none here.", file=sys.stderr)
        return 2
    started, facts, command = time.perf_counter(), machine_facts(), command_line(sys.argv[1:])
    folder = args.out or default_folder(facts)

    def publish(records: list[Record]) -> Record:
        gpu = next((r["gpu"] for r in records if "gpu" in r), facts["GPU"])
        run = {"GPU": gpu, "layers": args.layers, "seconds in all": round(time.perf_counter() - started)}
        summary = summarise(records, args.workloads, facts | run, command)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "whole_step.json").write_text(json.dumps(summary, indent=1) + "\n")
        (folder / "whole_step.md").write_text(markdown(summary))
        return summary

    records = run_all(plan(args.workloads, args.variants), args, publish)
    show(publish(records))
    return 1 if any("error" in r for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())
