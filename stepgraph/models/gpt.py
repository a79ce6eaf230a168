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

__all__ = ["GPT", "GPTConfig"]

_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT; start from a named one and change it with `dataclasses.replace`.

    Example:
        `replace(GPTConfig.tiny(), dropout=0.1)`
    """

    vocab_size: int
    """Number of tokens the embedding and the head know."""

    num_layers: int
    """Number of blocks, each one attention and one MLP."""

    hidden_size: int
    """Width of the residual stream."""

    num_heads: int
    """Number of query heads; each is `hidden_size // num_heads` wide."""

    num_kv_heads: int
    """Number of key and value heads; each serves `num_heads // num_kv_heads` query heads."""

    ffn_size: int
    """Width inside the MLP; SwiGLU has three matrices of it, so 8/3 of `hidden_size` equals the classic factor 4."""

    max_seq_len: int
    """Longest sequence the rotary tables cover."""

    dropout: float = 0.0
    """Probability of dropping an embedding, an attention weight or a residual branch's element in training."""

    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""

    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "max_seq_len")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig: `{name}` is {getattr(self, name)}; it must be at least 1")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"GPTConfig: `hidden_size` {self.hidden_size} is not a multiple of 2 * `num_heads` "
                f"{self.num_heads}; heads share the width, and rotary positions need an even one"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"GPTConfig: `num_heads` {self.num_heads} is not a multiple of `num_kv_heads` {self.num_kv_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig: `dropout` is {self.dropout}; it must be in [0, 1)")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

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


class RMSNorm(nn.Module):
    """Scales each vector to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


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
        kv_size = config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: RotaryPositions) -> Tensor:
        """Attend from each position of `x` to itself and to those before it."""
        q, k = rotary(self._split_heads(self.q_proj(x))), rotary(self._split_heads(self.k_proj(x)))
        v = self._split_heads(self.v_proj(x))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.is_grouped)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: a gate of SiLU times a linear branch, projected back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

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
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: RotaryPositions) -> Tensor:
        """Add this layer's two branches to the residual stream `x`."""
        x = x + self.dropout(self.attn(self.attn_norm(x), rotary))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """A dense GPT whose weights follow from torch's global seed.

    Example:
        `GPT(GPTConfig.tiny())(tokens)` gives logits, `GPT(GPTConfig.tiny())(tokens, targets)` the mean loss.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = RotaryPositions(config.head_size, config.max_seq_len, config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._init_weights()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits for `tokens` [batch, sequence], or with `targets` the mean cross-entropy in float32.

        A target of -100 is left out of the mean.
        """
        if tokens.shape[-1] > self.config.max_seq_len:
            raise ValueError(
                f"GPT.forward, argument `tokens`: sequence of {tokens.shape[-1]} is longer than "
                f"`max_seq_len` {self.config.max_seq_len}; raise `max_seq_len` or cut the sequence"
            )
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, self.rotary)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    @torch.no_grad()
    def _init_weights(self) -> None:
        # Each block adds two branches to the residual stream; scaling them keeps its variance from growing with depth.
        branch_std = _INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_branch_end = name.endswith(("out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=branch_std if is_branch_end else _INIT_STD)
