"""LoRA: train two small matrices beside each frozen linear layer (Hu et al., 2021, arXiv:2106.09685).

A linear layer computes `x W^T`. With LoRA it computes `x W^T + (x A^T) B^T * alpha / dim`, where A and B have `dim`
rows and columns. W is frozen: no gradient is computed for it, no optimizer sees it, its bits do not change. B begins at
zero, so that the first outputs are those of the base model.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepgraph.core.errors import InvalidArgument

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "down_proj")


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained update of low rank; `base` is the layer itself."""

    def __init__(self, base: nn.Linear, dim: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        self.lora_a = nn.Parameter(torch.empty(dim, base.in_features, device=weight.device, dtype=weight.dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, dim, device=weight.device, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scale = alpha / dim
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add the update to what the frozen layer computes."""
        update = nn.functional.linear(nn.functional.linear(self.dropout(x), self.lora_a), self.lora_b)
        out: Tensor = self.base(x) + update * self.scale
        return out


def add_lora(
    model: nn.Module, targets: Sequence[str] = DEFAULT_TARGETS, *, dim: int = 8, alpha: float = 16, dropout: float = 0.0
) -> list[str]:
    """Freeze a model and put LoRA beside its linear layers of these names (or globs). Return the layers' paths."""
    model.requires_grad_(False)
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(_matches(path, target) for target in targets)
    ]
    if not found:
        linear = sorted({path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise InvalidArgument(
            f"peft.target_modules {', '.join(targets)} names no linear layer of {type(model).__name__}",
            rule="lora",
            why="without a layer to adapt nothing would be trained.",
            fix=f"name some of its linear layers: {', '.join(linear) or 'it has none'}.",
        )
    for path, module in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoRALinear(module, dim, alpha, dropout))
    return [path for path, _ in found]


def _matches(path: str, target: str) -> bool:
    return path.rpartition(".")[2] == target or fnmatch.fnmatchcase(path, target)
