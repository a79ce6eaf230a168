"""The variants of `whole_step.py` and how each is measured, inside a worker process."""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from whole_step_report import (
    EQUALITY,
    MICROBATCHES,
    TIMED,
    WORKLOADS,
    Record,
    State,
    compare,
)

from stepgraph.tools import measure

DEVICE = "cuda"
WARMUP = 3
"""Eager calls before a capture, for the hand-written graphs as for `stepgraph.capture`'s default."""
WARM_STEPS = 8
HOST_CALLS = 10

Step = Callable[[Tensor, Tensor], Tensor]


def build_model(layers: int) -> torch.nn.Module:
    """Return the model in bf16 on the GPU, always with the same weights."""
    from stepgraph.lab.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = GPT(replace(GPTConfig.gpt_162m(), num_layers=layers))
    return model.to(torch.bfloat16)


def build_batches(workload: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` batches of (tokens, targets), each [microbatch, sequence, position], always the same."""
    from stepgraph.lab.models.gpt import GPTConfig

    config = GPTConfig.gpt_162m()
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


def time_block(call: Callable[[], Tensor], steps: int, device: torch.device) -> tuple[list[float], Tensor]:
    """Return the milliseconds of each step, and the last loss."""
    last: list[Tensor] = []

    def kept() -> None:
        last[:] = [call()]

    return list(measure.time_steps(kept, steps, device).each), last[0]


def time_steps(
    call: Callable[[], Tensor], steps: int, warm_steps: int, host_calls: int, device: torch.device
) -> Record:
    """Call a step often enough for every figure of its time, and return them with the loss after the timed blocks."""
    warm = [measure.wall_ms(call, device) / 1e3 for _ in range(warm_steps)]
    first, _ = time_block(call, steps, device)
    second, loss = time_block(call, steps, device)
    final_loss = loss.item()
    host = [measure.host_ms(call, device) for _ in range(host_calls)]
    timeline = measure.timeline_of(call, device)
    return {
        "step_ms": statistics.median(first),
        "again_ms": statistics.median(second),
        "fastest_ms": min(first + second),
        "slowest_ms": max(first + second),
        "busy_ms": timeline.busy_ms if timeline.kernels else None,
        "gpu_intervals": len(timeline.kernels),
        "host_ms": statistics.median(host),
        "warm_calls_s": warm,
        "loss": final_loss,
        "trained_steps": warm_steps + 2 * steps,
    }


def peak_bytes(device: torch.device) -> Record:
    """Return the peaks of torch's allocator."""
    peaks = measure.peaks_of(device)
    return {"reserved_bytes": peaks.reserved, "allocated_bytes": peaks.allocated}


def on_batches(step: Step, batches: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
    """Return a call without arguments that trains on the batches, again and again."""
    endless = itertools.cycle(batches)
    return lambda: step(*next(endless))


def measure_variant(workload: str, variant: str, steps: int, layers: int) -> Record:
    """Run one timed variant from the model's construction to its report."""
    torch.cuda.reset_peak_memory_stats()
    batches = build_batches(workload, 8)
    step = build_step(variant, build_model(layers))
    device = torch.device(DEVICE)
    figures = time_steps(on_batches(step, batches), steps, WARM_STEPS, HOST_CALLS, device)
    # The call that captures stands out among those after the warm-up, whichever of them it is.
    capture_s = max(figures["warm_calls_s"][WARMUP:]) if "hand" in variant or "ours" in variant else None
    return figures | {
        "capture_s": capture_s,
        "capture_s_per_layer": None if capture_s is None else capture_s / layers,
        **peak_bytes(device),
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
    state = copied(trained_state(model, optimizer, losses))
    return state, engine_report(step)


def trained_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: dict[str, Tensor]) -> State:
    """Return all that can be compared after a training, as it is."""
    names = [name for name, _ in model.named_parameters()]
    slots = optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "parameters": dict(model.named_parameters()),
        "optimizer": {f"{names[i]}.{key}": value for i, slot in slots.items() for key, value in slot.items()},
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


def copied(state: State) -> State:
    """Return a copy that no later step changes."""
    return {group: {name: t.detach().clone() for name, t in tensors.items()} for group, tensors in state.items()}


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


def measure_job(workload: str, variant: str, args: argparse.Namespace) -> Record:
    """Measure one variant of one workload."""
    if variant == "equality":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with a fixed workspace
    if variant in EQUALITY:
        deterministic = variant == "equality"
        found = measure_equality(workload, args.equality_steps, args.layers, deterministic=deterministic)
    else:
        found = measure_variant(workload, variant, args.steps, args.layers)
    return found | {"gpu": torch.cuda.get_device_name()}
