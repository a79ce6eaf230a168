"""AdamW, its learning rate over the iterations, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of each iteration: a linear warm-up, then a cosine (or another style) down to `min_lr`."""

    lr: float
    min_lr: float = 0.0
    warmup_iters: int = 0
    decay_iters: int = 1
    style: str = "cosine"
    warmup_init: float = 0.0

    def at(self, iteration: int) -> float:
        """Return the learning rate of an iteration, counted from 0.

        Example:
            >>> Schedule(lr=1.0, warmup_iters=4, decay_iters=10).at(1)
            0.5
        """
        if iteration < self.warmup_iters:
            return self.warmup_init + (self.lr - self.warmup_init) * (iteration + 1) / self.warmup_iters
        if self.style == "constant":
            return self.lr
        if self.style == "inverse-square-root":
            begin = max(1, self.warmup_iters)
            return max(self.min_lr, self.lr * math.sqrt(begin / max(begin, iteration + 1)))
        span = max(1, self.decay_iters - self.warmup_iters)
        done = min(1.0, (iteration - self.warmup_iters) / span)
        left = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * left

    def apply(self, optimizer: torch.optim.Optimizer, iteration: int) -> float:
        """Set the learning rate of all groups of an optimizer."""
        lr = self.at(iteration)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr


def make_adamw(
    parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW for the parameters that are trained; vectors (norms, biases) do not decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decaying = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": found, "weight_decay": decay} for found, decay in ((decaying, weight_decay), (others, 0.0)) if found
    ]
    fused = all(parameter.is_cuda for parameter in trained)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused or None)


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    stages: Any = None,
    counted: Sequence[nn.Parameter] | None = None,
) -> Tensor | None:
    """Scale gradients down to a total norm, without reading it on the host. Return the norm before, or None.

    `stages` is the process group of the ranks that hold the other stages of the model. `counted` are the parameters
    that this rank adds to the norm, if not all: a matrix on two ranks counts once.
    """
    gradients = [p.grad for p in (parameters if counted is None else counted) if p.grad is not None]
    if max_norm <= 0 or not gradients:
        return None
    total = torch.nn.utils.get_total_norm(gradients)
    if stages is not None:
        total = total.square()
        dist.all_reduce(total, group=stages)
        total = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
