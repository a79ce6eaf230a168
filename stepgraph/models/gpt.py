"""A dense GPT in plain torch.

The decoder of today's dense language models and nothing more: token embedding, blocks of pre-normed causal attention
(rotary positions, grouped key/value heads) and a SwiGLU MLP, a final RMSNorm, a linear head. It is the workload that
the demo, the benchmarks and the tests share, so it is written the way anyone would write it for eager torch.

What makes it fit for a CUDA graph is only what makes it a good eager model: the forward pass reads nothing back to
the host and builds no tensor from host data, and everything that depends on positions is a buffer made once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.models.language_model import LanguageModel, ModelConfig, RMSNorm


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """The shape of a GPT; start from a named one and change it with `dataclasses.replace`.

    Example:
        `replace(GPTConfig.tiny(), dropout=0.1)`
    """

    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; each serves `num_heads // num_kv_heads` query heads."""
    ffn_size: int
    """Width inside the MLP; SwiGLU has three matrices of it, so 8/3 of `hidden_size` equals the classic factor 4."""
    max_seq_len: int
    """Longest sequence the rotary tables cover."""
    head_dim: int | None = None
    """Width of one head; None shares `hidden_size` among the query heads."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm of their own in each head."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("num_heads", "num_kv_heads", "ffn_size", "max_seq_len")
        if self.head_dim is None:
            self._require(
                self.hidden_size % (2 * self.num_heads) == 0,
                f"`hidden_size` {self.hidden_size} is not a multiple of 2 * `num_heads` {self.num_heads}; heads share "
                "the width, and rotary positions need an even one",
            )
        else:
            self._require(
                self.head_dim >= 2 and self.head_dim % 2 == 0,
                f"`head_dim` is {self.head_dim}; rotary positions need an even width",
            )
        self._require_multiple("num_heads", "num_kv_heads")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @classmethod
    def tiny(cls) -> GPTConfig:
        """A model of 0.1 million parameters for tests: trains in milliseconds a step on a CPU."""
        return cls(
            vocab_size=256, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=128, max_seq_len=64
        )

    @classmethod
    def gpt2_small(cls) -> GPTConfig:
        """The shape of GPT-2 small: 12 layers of width 768, the vocabulary padded to a multiple of 128."""
        return cls(
            vocab_size=50304,
            num_layers=12,
            hidden_size=768,
            num_heads=12,
            num_kv_heads=12,
            ffn_size=2048,
            max_seq_len=1024,
        )


class RotaryPositions(nn.Module):
    """Rotates pairs of a head's elements by angles that grow with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, max_seq_len: int, base: float) -> None:
        super().__init__()
        frequencies = base ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `x`, of shape [batch, heads, sequence, head_size]; element i pairs with i + head_size / 2."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.is_grouped = config.num_kv_heads != config.num_heads
        self.dropout = config.dropout
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.out_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: RotaryPositions) -> Tensor:
        """Attend from each position of `x` to itself and to those before it."""
        q = rotary(self.q_norm(self._split_heads(self.q_proj(x))))
        k = rotary(self.k_norm(self._split_heads(self.k_proj(x))))
        v = self._split_heads(self.v_proj(x))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.is_grouped)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: a gate of SiLU times a linear branch, projected back."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of `x` by itself."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention, then the MLP, each normed before and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.ffn_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: RotaryPositions) -> Tensor:
        """Add this layer's two branches to the residual stream `x`."""
        x = x + self.dropout(self.attn(self.attn_norm(x), rotary))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(LanguageModel):
    """A dense GPT whose weights follow from torch's global seed.

    Example:
        `GPT(GPTConfig.tiny())(tokens)` gives logits, `GPT(GPTConfig.tiny())(tokens, targets)` the mean loss.
    """

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, (Block(config) for _ in range(config.num_layers)))
        self.rotary = RotaryPositions(config.head_size, config.max_seq_len, config.rope_base)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits for `tokens` [batch, sequence], or with `targets` the mean cross-entropy in float32.

        A target of -100 is left out of the mean.
        """
        check_length(self, tokens, self.config)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.read_out(x, targets)


def check_length(model: nn.Module, tokens: Tensor, config: GPTConfig) -> None:
    """Refuse a sequence that the rotary tables do not cover."""
    if tokens.shape[-1] > config.max_seq_len:
        raise ValueError(
            f"{type(model).__name__}.forward, argument `tokens`: sequence of {tokens.shape[-1]} is longer than "
            f"`max_seq_len` {config.max_seq_len}; raise `max_seq_len` or cut the sequence"
        )
