"""The variants of `modules.py` and how each is measured, inside a worker process."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from host_cost import median_us
from modules_report import PAIR, WORKLOADS, is_ours, merged_engine
from torch import Tensor, nn
from whole_step_report import MICROBATCHES, Record, State, compare
from whole_step_variants import (
    Clock,
    Step,
    accumulate,
    copied,
    fused_adamw,
    on_batches,
    plain_step,
    time_steps,
    trained_state,
)

import stepgraph
from stepgraph.models import GPT, GPTConfig, MoEConfig, MoEGPT

WARM_STEPS = 6
"""Steps before the timed ones: modules are captured in the first, a whole step in the fourth."""
HOST_CALLS = 5
BATCHES = 8
AUX_WEIGHT = 0.01
"""Weight of the experts' balance in the loss."""
PAIR_ROUNDS = 5

SCOPES = {
    "ours-layers": [],
    "ours-attn": ["attn"],
    "ours-attn+mlp": ["attn", "mlp"],
    "ours-partial": ["attn", "moe_router", "moe_preprocess"],
}
"""What `stepgraph.graph_modules` is given as its scope."""


@dataclass(frozen=True)
class Setting:
    """One workload on one device."""

    workload: str
    device: torch.device
    layers: int
    megatron: Path | None = None
    """Where megatron-core is, for its own model."""

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sequence(self) -> int:
        """Tokens of a sequence; on the CPU, where only the program is tried, a hundredth of them."""
        sequence = WORKLOADS[self.workload].sequence
        return sequence if self.is_on_gpu else sequence // 128


@dataclass
class Training:
    """A model, its optimizer and the step that trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    engine: Any = None
    """What of stepgraph's has a report and can be closed."""
    capture_times: list[float] = field(default_factory=list)
    """Seconds of captures that are not stepgraph's."""

    def report(self) -> Record:
        """What stepgraph says of itself; nothing for other variants."""
        return {} if self.engine is None else merged_engine(dict(self.engine.report().to_dict()))

    def capture_seconds(self) -> float | None:
        """Seconds spent on capturing."""
        if self.engine is not None:
            return float(self.engine.report().capture_seconds)
        return sum(self.capture_times) if self.capture_times else None

    def close(self) -> None:
        """End the graphs."""
        if self.engine is not None:
            self.engine.close()


# ---------------------------------------------------------------------------------------------------------------------
# Models and steps


def model_config(setting: Setting, variant: str) -> GPTConfig:
    """Return the shape of a workload's model, with experts as the variant runs them."""
    if setting.workload in ("gpt2-small", "megatron-gpt2-small"):
        return replace(GPTConfig.gpt2_small() if setting.is_on_gpu else GPTConfig.tiny(), num_layers=setting.layers)
    config = MoEConfig.qwen3_30b_a3b() if setting.is_on_gpu else MoEConfig.tiny()
    experts = WORKLOADS[setting.workload].bases[variant].removeprefix("eager-")
    return replace(config, num_layers=setting.layers, experts=experts)


def build_model(setting: Setting, variant: str) -> nn.Module:
    """Return a workload's model in bf16, always with the same weights."""
    config = model_config(setting, variant)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = MoEGPT(config) if isinstance(config, MoEConfig) else GPT(config)
    return model.to(torch.bfloat16)


def build_batches(setting: Setting, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` batches of (tokens, targets), each [microbatch, 1, position], always the same."""
    variant = next(iter(WORKLOADS[setting.workload].bases))
    vocab_size = model_config(setting, variant).vocab_size
    generator = torch.Generator(setting.device).manual_seed(7)
    shape = (MICROBATCHES, 1, setting.sequence + 1)
    drawn = (torch.randint(vocab_size, shape, device=setting.device, generator=generator) for _ in range(count))
    return [(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()) for tokens in drawn]


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function from tokens and targets to the loss."""
    if not isinstance(model, MoEGPT):
        return model

    def balanced(tokens: Tensor, targets: Tensor) -> Tensor:
        found = model(tokens, targets)
        return found.out + AUX_WEIGHT * found.aux_loss

    return balanced


class LayerOfTensors(nn.Module):
    """A layer of the GPT whose one argument is a tensor, as torch's graphed callables want it."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary
        self.run = block.forward  # bound now: the block's own forward is about to lead here

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        return self.run(x, self.rotary)


def graph_with_torch(model: GPT, sequence: int) -> float:
    """Put torch.cuda.make_graphed_callables around every layer; return the seconds that took, warm-up included."""
    weight = model.embedding.weight
    shape = (1, sequence, model.config.hidden_size)
    layers = tuple(LayerOfTensors(block, model.rotary) for block in model.blocks)
    samples = tuple((torch.randn(shape, device=weight.device, dtype=weight.dtype, requires_grad=True),) for _ in layers)
    torch.cuda.synchronize()
    start = time.perf_counter()
    graphed = torch.cuda.make_graphed_callables(layers, samples)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    for block, layer in zip(model.blocks, graphed, strict=True):
        block.forward = lambda x, rotary, layer=layer: layer(x)
    return seconds


def in_place_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step whose gradients are there beforehand and zeroed in place.

    torch's graphed callables are wrong without: where `.grad` is None, their static gradient becomes it, and the next
    microbatch's replay overwrites what it should be added to.
    """
    loss = loss_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        total = accumulate(loss, tokens, targets)
        optimizer.step()
        return total

    return train_step


def build_training(setting: Setting, variant: str) -> Training:
    """Return a variant, ready to train. Peaks of memory count from when its model is built."""
    if setting.workload == "megatron-gpt2-small":
        from modules_megatron import build_megatron  # needs megatron-core, which most machines have not

        return build_megatron(setting, variant)
    model = build_model(setting, variant)
    reset_peaks(setting)
    optimizer = fused_adamw(model)
    if variant == "torch-layers":
        seconds = graph_with_torch(model, setting.sequence)
        return Training(model, optimizer, in_place_step(model, optimizer), capture_times=[seconds])
    step = plain_step(loss_of(model), optimizer)
    if variant == "ours-step":
        captured = stepgraph.capture(step)
        return Training(model, optimizer, captured, engine=captured)
    if is_ours(variant):
        return Training(model, optimizer, step, engine=stepgraph.graph_modules(model, scope=SCOPES[variant]))
    return Training(model, optimizer, step)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def reset_peaks(setting: Setting) -> None:
    """Let the allocator forget what building a model took."""
    if setting.is_on_gpu:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def cpu_block(call: Callable[[], Tensor], steps: int) -> tuple[list[float], Tensor]:
    """Return the milliseconds of each step, and the last loss."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = call()
        times.append((time.perf_counter() - start) * 1e3)
    return times, loss


def cpu_wall(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the seconds of one call; on the CPU it is over when it returns."""
    milliseconds, _ = cpu_block(call, 1)
    return milliseconds[0] / 1e3, milliseconds[0] / 1e3


def cpu_intervals(call: Callable[[], Tensor]) -> list[tuple[float, float]]:
    """Return nothing: no GPU works."""
    call()
    return []


def measure(setting: Setting, variant: str, steps: int) -> Record:
    """Run one timed variant from the model's construction to its report."""
    clock = Clock() if setting.is_on_gpu else Clock(cpu_block, cpu_wall, cpu_intervals)
    batches = build_batches(setting, BATCHES)
    training = build_training(setting, variant)
    figures = time_steps(on_batches(training.step, batches), steps, WARM_STEPS, HOST_CALLS, clock)
    seconds = training.capture_seconds()
    found = figures | {
        "capture_s": seconds,
        "capture_s_per_layer": None if seconds is None else seconds / setting.layers,
        "reserved_bytes": torch.cuda.max_memory_reserved() if setting.is_on_gpu else None,
        "allocated_bytes": torch.cuda.max_memory_allocated() if setting.is_on_gpu else None,
        "engine": training.report(),
    }
    training.close()
    return found


@contextlib.contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """Use deterministic algorithms for the length of a block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def train(setting: Setting, variant: str, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Training, State]:
    """Train a variant from the seed; return it with all that can be compared, as it is."""
    reset_peaks(setting)  # what the run before has left is freed
    training = build_training(setting, variant)
    losses = {f"step {i}": training.step(*batch).clone() for i, batch in enumerate(batches)}
    return training, trained_state(training.model, training.optimizer, losses)


def compare_with(
    reference: State, setting: Setting, variant: str, batches: Sequence[tuple[Tensor, Tensor]]
) -> tuple[dict[str, Record], int | None]:
    """Train a variant; return how it differs from the reference, and how often it replayed."""
    training, state = train(setting, variant, batches)
    found = compare(reference, state)
    replays = training.report().get("replays")
    training.close()
    return found, replays


def measure_equality(setting: Setting, steps: int) -> Record:
    """Train every variant and its base from one seed; compare them bit by bit.

    Where one differs its base is trained again, to show how far that differs from itself.
    """
    bases = WORKLOADS[setting.workload].bases
    pairs: dict[str, dict[str, Record]] = {}
    replays: dict[str, int | None] = {}
    base_losses: dict[str, list[float]] = {}
    with deterministic(warn_only=setting.workload == "megatron-gpt2-small"):
        batches = build_batches(setting, steps)
        for base in dict.fromkeys(bases.values()):
            training, state = train(setting, base, batches)
            reference = copied(state)
            base_losses[base] = [loss.item() for loss in reference["losses"].values()]
            del training, state
            for variant in compared_variants(setting, bases, base):
                pair = f"{base} vs {variant}"
                pairs[pair], replays[pair] = compare_with(reference, setting, variant, batches)
                again = f"{base} vs {base}"
                if again not in pairs and any(group["differing"] for group in pairs[pair].values()):
                    pairs[again], replays[again] = compare_with(reference, setting, base, batches)
            del reference
    return {
        "steps": steps,
        "pairs": pairs,
        "replays": replays,
        "finite": all(math.isfinite(loss) for losses in base_losses.values() for loss in losses),
        "base_losses": base_losses,
    }


def compared_variants(setting: Setting, bases: Mapping[str, str], base: str) -> list[str]:
    """Return the variants to compare with a base: those that can live in one process with others, and run here."""
    apart = {"megatron-layers"} | (set() if setting.is_on_gpu else {"torch-layers"})
    return [v for v, of in bases.items() if of == base and v != base and v not in apart]


def small_module(device: torch.device) -> nn.Module:
    """Return four layers too small to hide the host's work: with the input, nine tensors."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(device)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def measure_pair(setting: Setting, calls: int) -> Record:
    """Time a forward+backward pair of a small module on the host, every way in turn."""
    device = setting.device
    x = torch.randn(setting.sequence or 4, 8, device=device, requires_grad=True)
    ways: dict[str, nn.Module] = {"identity": nn.Identity(), "eager": small_module(device)}
    if setting.is_on_gpu:
        ways["torch"] = torch.cuda.make_graphed_callables(small_module(device), (x.detach().clone().requires_grad_(),))
    handles = {}
    for way, outputs in (("ours", "guarded"), ("ours, outputs='static'", "static")):
        holder = nn.ModuleDict({"layers": small_module(device)})
        handles[way] = stepgraph.graph_modules(holder, scope=["layers"], outputs=outputs)
        ways[way] = holder["layers"]

    def pair(module: nn.Module) -> Callable[[], None]:
        return lambda: module(x).sum().backward()

    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(PAIR_ROUNDS):  # in turn, so that all see the machine in the same mood
        for way, module in ways.items():
            found[way].append(median_us(pair(module), calls, drained=setting.is_on_gpu))
    medians = {way: statistics.median(rounds) for way, rounds in found.items()}
    reports = {way: merged_engine(dict(handle.report().to_dict())) for way, handle in handles.items()}
    for handle in handles.values():
        handle.close()
    if idle := [way for way, report in reports.items() if report["eager_calls"] > report["replays"]]:
        raise RuntimeError(f"{', '.join(idle)}: mostly eager, {reports[idle[0]]['eager_reasons']}")
    return {
        "calls": calls * PAIR_ROUNDS,
        "median_us": medians,
        "rounds_us": found,
        "added_us": {way: us - medians["identity"] for way, us in medians.items() if way != "identity"},
        "engine": reports["ours"],
    }


def measure_job(setting: Setting, variant: str, steps: int, equality_steps: int) -> Record:
    """Measure one variant of one workload."""
    if variant == PAIR:
        return measure_pair(setting, calls=200 if setting.is_on_gpu else 10)
    if variant == "equality":
        return measure_equality(setting, equality_steps)
    return measure(setting, variant, steps)
