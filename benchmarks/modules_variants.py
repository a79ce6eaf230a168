"""The variants of `modules.py`: models, and the ways their steps are run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from modules_report import WORKLOADS, is_ours, merged_engine
from torch import Tensor, nn
from whole_step_report import MICROBATCHES, Record
from whole_step_variants import Step, accumulate, fused_adamw, plain_step

import stepgraph
from stepgraph.lab.bench.mechanisms import graph_layers
from stepgraph.lab.models import GPT, GPTConfig, MoEConfig, MoEGPT
from stepgraph.tools.measure import reset_peaks

AUX_WEIGHT = 0.01
"""Weight of the experts' balance in the loss."""

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

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sequence(self) -> int:
        """Tokens of a sequence; on the CPU, where only the program is tried, a small part of them."""
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
        return replace(GPTConfig.gpt_162m() if setting.is_on_gpu else GPTConfig.tiny(), num_layers=setting.layers)
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


def graph_with_torch(model: GPT, sequence: int) -> float:
    """Put torch.cuda.make_graphed_callables around every layer; return the seconds that took, warm-up included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph_layers(model.blocks, model.rotary, (1, sequence, model.config.hidden_size), torch.cuda.make_graphed_callables)
    torch.cuda.synchronize()
    return time.perf_counter() - start


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
    reset_peaks(setting.device)
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
