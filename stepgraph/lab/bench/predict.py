"""What a run would need and could reach on a machine that is not here: `stepgraph bench --dry-run`.

Memory is the estimate of `recipes.memory`, divided as the parallel sizes divide the model. It is the memory of
stepgraph's own models, with the whole state of the optimizer on each data-parallel rank. Time has a lower bound only:
the operations of the model at the GPU's peak. How far above it a real step lies is measured, not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.config.container import ConfigContainer
from stepgraph.config.environment import Environment
from stepgraph.config.rules import broken_rules, finalised
from stepgraph.core.errors import ConfigError, Violation
from stepgraph.lab.bench.flops import flops_per_step
from stepgraph.lab.bench.hardware import Gpu
from stepgraph.lab.models.experts import Experts
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.recipes.memory import MemoryEstimate, estimate_memory


@dataclass(frozen=True, slots=True)
class MachinePrediction:
    """A configuration on some GPUs."""

    gpu: Gpu
    num_gpus: int
    memory: MemoryEstimate
    """Of the whole model, on one device."""
    bytes_per_gpu: int
    flops: int
    """Operations of an iteration, on all GPUs."""
    not_run_here: tuple[Violation, ...]
    """Rules of a run that this configuration breaks: it is valid, and stepgraph does not run it."""

    @property
    def fastest_ms(self) -> float:
        """The time of an iteration in which every GPU works at its peak."""
        return self.flops / self.num_gpus / (self.gpu.peak_tflops * 1e9)

    @property
    def memory_fraction(self) -> float:
        """The part of a GPU's memory that a step takes."""
        return self.bytes_per_gpu / self.gpu.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "gpu": self.gpu.name,
            "num_gpus": self.num_gpus,
            "parameters": self.memory.parameters,
            "bytes_per_gpu": self.bytes_per_gpu,
            "memory_fraction": self.memory_fraction,
            "flops": self.flops,
            "fastest_ms": self.fastest_ms,
            "not_run_here": [violation.rule for violation in self.not_run_here],
        }


def predict(cfg: ConfigContainer, gpu: Gpu, num_gpus: int, environment: Environment | None = None) -> MachinePrediction:
    """Validate a configuration for these GPUs, and predict memory and the shortest time of an iteration.

    A broken rule of the configuration raises a `ConfigError`. Rules of a run are listed in the result.

    Example:
        >>> predict(recipes.llama3_8b(), find_gpu("h100"), num_gpus=8).fastest_ms
    """
    known = environment or Environment(compute_capability=gpu.compute_capability, world_size=num_gpus, device="cuda")
    found = finalised(cfg, known)
    violations = broken_rules(found, known)
    if violations:
        raise ConfigError(violations)
    memory = estimate_memory(cfg)
    model = cfg.model
    stages = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    experts = model.expert_model_parallel_size if model.num_moe_experts else 1
    state = memory.weights
    if cfg.peft.scheme is None:  # the gradients and the state of adapters are small
        state += memory.gradients + memory.optimizer
    held = _experts_share(cfg)
    per_gpu = state * ((1 - held) / stages + held / (stages * experts)) + (
        memory.activations / (model.tensor_model_parallel_size * model.context_parallel_size)
    )
    return MachinePrediction(
        gpu, num_gpus, memory, int(per_gpu), flops_per_step(cfg), tuple(broken_rules(found, known, ("run",)))
    )


def _experts_share(cfg: ConfigContainer) -> float:
    """The part of the parameters that belongs to experts."""
    if cfg.model.num_moe_experts is None:
        return 0.0
    with torch.device("meta"):
        model = build_model(cfg.model)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    held = sum(parameter.numel() for module in experts for parameter in module.parameters())
    return held / sum(parameter.numel() for parameter in model.parameters())
