"""megatron-core's own GPTModel for `modules.py`: trained by its own schedule, with its own graphs or with stepgraph's.

Its model, schedule and graphs are those of `stepgraph.lab.bench.megatron_core`.
"""

from __future__ import annotations

import importlib
from typing import Literal

import torch
import torch.nn.functional as F
from modules_variants import Setting, Training, model_config
from torch import Tensor, nn
from whole_step_report import MICROBATCHES
from whole_step_variants import WARMUP, fused_adamw

import stepgraph
from stepgraph.lab.bench.megatron_core import ScheduledSteps, Shape, build_gpt
from stepgraph.lab.models import GPTConfig
from stepgraph.tools.measure import reset_peaks


def shape_of(config: GPTConfig) -> Shape:
    """Return Megatron's spelling of the reference GPT's shape."""
    settings = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.head_size,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }
    return Shape(settings, vocab_size=config.vocab_size, seq_length=config.max_seq_len)


class ScheduledTraining:
    """A training step run by Megatron's schedule."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sequence: int, graphs: Literal["none", "layers"]
    ) -> None:
        sizes = {"num_microbatches": MICROBATCHES, "micro_batch_size": 1, "seq_length": sequence}
        self._steps, self._optimizer = ScheduledSteps(model, graphs, **sizes), optimizer
        self.capture_times = self._steps.capture_times

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(tokens, targets, strict=True)
        loss = self._steps([{"tokens": one, "targets": other} for one, other in pairs])
        self._optimizer.step()
        return loss


def build_megatron(setting: Setting, variant: str) -> Training:
    """Return a variant of Megatron's model, ready to train."""
    graphs: Literal["none", "layers"] = "layers" if variant == "megatron-layers" else "none"
    shape = shape_of(model_config(setting, variant))
    model = build_gpt(shape, graphs, device=setting.device, warmup_steps=WARMUP)
    reset_peaks(setting.device)
    optimizer = fused_adamw(model)
    step = ScheduledTraining(model, optimizer, setting.sequence, graphs)
    if variant != "ours-layers":
        return Training(model, optimizer, step, capture_times=step.capture_times)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    handle = stepgraph.graph_modules(
        model,
        scope=["decoder.layers.*"],
        ignore=["self.current_microbatch"],  # the schedule numbers microbatches on each layer, which does not read it
        generators=list(random.get_all_rng_states().values()),
    )
    return Training(model, optimizer, step, engine=handle)
