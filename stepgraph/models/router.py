"""The router of a mixture of experts: scores for every expert, the best few chosen, and two means against crowding.

The auxiliary loss pulls the scores themselves away from crowded experts; it is returned, for the training step to add.
The bias is added to the scores for choosing only, so weights and gradients do not see it. It moves by a fixed step
toward even load when `update_bias` is called, and by the sign of the error alone, so it needs nothing from the host.

Both rest on the load, a count of choices. It comes from comparing each choice with every expert's number, as do the
weights: reductions only, in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepgraph.models.moe_config import MoEConfig

__all__ = ["Router"]


class Router(nn.Module):
    """Scores every expert for every token and chooses the best `top_k`."""

    expert_ids: Tensor
    bias_steps: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.register_buffer("expert_ids", torch.arange(config.num_experts), persistent=False)
        # The bias in whole steps of bias_rate: a count survives `.to(torch.bfloat16)`, where 0.5 + 0.001 is 0.5.
        bias_steps = torch.zeros(config.num_experts, dtype=torch.int64) if config.bias_rate else None
        self.register_buffer("bias_steps", bias_steps)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights, choices, load and auxiliary loss for `hidden` [tokens, width]."""
        config, logits = self.config, self.gate(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        wanted = scores.detach()
        if self.bias_steps is not None:
            wanted = wanted + self.bias_steps * config.bias_rate
        choices = wanted.topk(config.top_k).indices
        is_chosen = choices.unsqueeze(-1) == self.expert_ids
        # The scores of the choices by a sum in which all others are zero: a gather's gradient would be a scatter.
        weights = (scores.unsqueeze(1) * is_chosen).sum(-1)
        if config.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        load = is_chosen.sum((0, 1))
        shares = scores if config.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
        aux_loss = (load * shares.mean(0)).sum() * (config.num_experts / choices.numel())
        return weights * config.weight_scale, choices, load, aux_loss

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """Move the bias one step: up for experts chosen less often than on average, down for others."""
        if self.bias_steps is None:
            raise ValueError("Router.update_bias: `bias_rate` is 0, so choices have no bias; set it in the config")
        self.bias_steps += torch.sign(load.sum() - load * self.config.num_experts)
