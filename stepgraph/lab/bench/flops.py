"""The floating-point operations of a training step, from the shape of the model.

A matrix product with a weight costs two operations for each of its elements and each token in the forward, and twice
that in the backward. Attention adds the products of queries with keys, and of their weights with values; half of them
are masked out in causal attention and are not counted. A token passes the experts that it chooses, not all. Recomputed
operations are not counted: they are a price of the run, not its work. This is how MFU is defined. Weights that LoRA
freezes get no gradient, so their backward is as large as the forward; the adapters are small and left out.

The scan of Mamba layers, norms, activations and the softmax are left out; they are small beside the products.
"""

from __future__ import annotations

from typing import Any

import torch

from stepgraph.config.container import ConfigContainer
from stepgraph.lab.models.attention import CoreAttention
from stepgraph.lab.models.experts import Experts
from stepgraph.lab.recipes.build import build_model

_TRAINING, _FROZEN = 3, 2
"""The forward with its backward, as multiples of the forward: of trained weights, and of frozen ones."""


def flops_per_step(cfg: ConfigContainer) -> int:
    """Return the operations of an iteration: all microbatches on all ranks.

    Example:
        >>> flops_per_step(recipes.llama3_8b()) / 1e15
    """
    tokens = cfg.train.global_batch_size * cfg.model.seq_length
    weights, attention = forward_flops_per_token(cfg)
    return int(tokens * ((_TRAINING if cfg.peft.scheme is None else _FROZEN) * weights + _TRAINING * attention))


def forward_flops_per_token(cfg: ConfigContainer) -> tuple[float, float]:
    """Return the operations of one token's forward: products with weights, and those inside attention."""
    with torch.device("meta"):
        model = build_model(cfg.model)
    share = cfg.model.moe_router_topk / cfg.model.num_moe_experts if cfg.model.num_moe_experts else 1.0
    weights = sum(2 * _weights(module, share) for module in model.modules())
    inner = [module for module in model.modules() if isinstance(module, CoreAttention)]
    return weights, sum(_attention(cfg.model, module.window) for module in inner)


def _weights(module: torch.nn.Module, share: float) -> float:
    """The weights of one module that a token is multiplied with; embeddings are looked up."""
    if isinstance(module, Experts):
        return share * float(module.gate_up_proj.numel() + module.down_proj.numel())
    return float(module.weight.numel()) if isinstance(module, torch.nn.Linear) else 0


def _attention(model: Any, window: int | None) -> float:
    """The products of one layer's queries, keys and values, for one token."""
    if model.multi_latent_attention:
        widths = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    else:
        widths = 2 * (model.kv_channels or model.hidden_size // model.num_attention_heads)
    return float(2 * model.num_attention_heads * widths * positions_seen(model.seq_length, window))


def positions_seen(length: int, window: int | None = None) -> float:
    """Return how many positions a token of a sequence sees on average, itself included.

    Example:
        >>> positions_seen(4), positions_seen(4, window=1)
        (2.5, 1.0)
    """
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / (2 * length)
