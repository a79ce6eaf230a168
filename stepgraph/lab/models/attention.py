"""Causal attention in its usual kinds: grouped heads, sliding windows, sinks, and latent keys and values.

The *core* is what stands between the projections: scores, softmax, weighted sum. It is torch's fused function wherever
that can express it. An attention sink cannot be expressed there: it is a learned number for each head that takes part
in the softmax as if it were one more key, with a value of zero, so that a head can attend to nothing. The core with
sinks is written out, and stores the scores: sequence by sequence for each head (`recompute_modules=("core_attn",)`
stores none).

Multi-head latent attention (DeepSeek) projects queries down to a narrow vector and up again, and keys and values
together to another one. Rotary positions would not survive the way through the narrow vector, so a few elements of each
head carry the position alone: queries have their own, the keys of all heads share theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.lab.models.language_model import ModelConfig, RMSNorm
from stepgraph.lab.models.packing import same_segment
from stepgraph.lab.models.recompute import recomputed

_TURNS_OF_FAST_AND_SLOW = (32.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The widths of multi-head latent attention."""

    q_rank: int | None
    """Width of the vector that queries pass through; None for none."""
    kv_rank: int
    """Width of the vector that keys and values pass through."""
    nope_size: int
    """Elements of a head's query and key that carry no position."""
    rope_size: int
    """Elements of a head's query and key that carry the position."""
    value_size: int
    """Width of a head's value."""

    @property
    def head_size(self) -> int:
        """Width of a head's query and key."""
        return self.nope_size + self.rope_size


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ModelConfig):
    """The part of a model's shape that its attention depends on."""

    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; each serves `num_heads // num_kv_heads` query heads."""
    max_seq_len: int
    """Longest sequence: the length of the tables of positions."""
    head_dim: int | None = None
    """Width of one head; None shares `hidden_size` among the query heads."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm of their own in each head."""
    positions: Literal["rope", "learned", "none"] = "rope"
    """Rotary positions, a learned vector for each position, or none."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: float | None = None
    """YaRN: the context as a multiple of `rope_original_length`; None leaves the frequencies as they are."""
    rope_original_length: int = 4096
    """YaRN: the context that the frequencies were made for."""
    attention_dropout: float | None = None
    """Probability of dropping an attention weight in training; None takes that of `dropout`."""
    add_qkv_bias: bool = False
    """Whether the projections to queries, keys and values have a bias, whatever `add_bias_linear` says."""
    sliding_window: int | None = None
    """Positions that a layer with a window sees: its own and those before it; None sees all."""
    full_attention_interval: int | None = None
    """With a window: of every so many layers the last sees all positions; None has a window in all layers."""
    attention_sinks: bool = False
    """Whether each head has a learned sink in its softmax."""
    latent: LatentShape | None = None
    """The widths of multi-head latent attention; None for the ordinary one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("num_heads", "num_kv_heads", "max_seq_len")
        self._require_one_of("positions", ("rope", "learned", "none"))
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
        drop, window = self.attention_dropout, self.sliding_window
        self._require(drop is None or 0.0 <= drop < 1.0, f"`attention_dropout` is {drop}; it must be in [0, 1)")
        self._require(window is None or window >= 1, f"`sliding_window` is {window}; it must be at least 1, or None")
        self._require(
            self.latent is None or self.latent.rope_size % 2 == 0, "`latent.rope_size` must be even, as all rotary ones"
        )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotary positions turn."""
        return self.head_size if self.latent is None else self.latent.rope_size

    @property
    def core_dropout(self) -> float:
        """Probability of dropping an attention weight in training."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    def window_of(self, layer: int) -> int | None:
        """How many positions the layer of this number sees, or None for all."""
        interval = self.full_attention_interval
        return None if interval and (layer + 1) % interval == 0 else self.sliding_window


class RotaryPositions(nn.Module):
    """Rotates pairs of a head's elements by angles that grow with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, head_size: int, max_seq_len: int, base: float, scaling: float | None = None, original: int = 4096
    ) -> None:
        super().__init__()
        frequencies = base ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        length = 1.0
        if scaling is not None:
            frequencies = _stretched(frequencies, base, scaling, original)
            length = 0.1 * math.log(scaling) + 1.0
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos() * length, persistent=False)
        self.register_buffer("sin", angles.sin() * length, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `x`, of shape [batch, heads, sequence, head_size]; element i pairs with i + head_size / 2."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def _stretched(frequencies: Tensor, base: float, scaling: float, original: int) -> Tensor:
    """YaRN: slow frequencies are divided by `scaling`, fast ones stay, and those between are mixed.

    Slow is what turns less than once in the `original` context, fast what turns more than 32 times.
    """
    half = len(frequencies)
    last_fast, first_slow = (
        half * math.log(original / (turns * 2 * math.pi)) / math.log(base) for turns in _TURNS_OF_FAST_AND_SLOW
    )
    places = torch.arange(half, dtype=torch.float32)
    slowness = ((places - last_fast) / max(first_slow - last_fast, 1e-3)).clamp(0, 1)
    return frequencies / scaling * slowness + frequencies * (1 - slowness)


def make_rotary(config: AttentionConfig) -> nn.Module:
    """Make the tables that a model's attention layers share; without rotary positions, one that changes nothing."""
    if config.positions != "rope":
        return nn.Identity()
    scaling, original = config.rope_scaling, config.rope_original_length
    return RotaryPositions(config.rotary_size, config.max_seq_len, config.rope_base, scaling, original)


class CoreAttention(nn.Module):
    """Scores, softmax and weighted sum, causal, within a window if the layer has one."""

    def __init__(self, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        self.is_grouped = config.num_kv_heads != config.num_heads and config.latent is None
        self.dropout = config.core_dropout
        self.window = config.window_of(layer)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """Attend with `q` [batch, heads, sequence, width] to `k` and `v`, which may have fewer heads.

        With `segments` [batch, sequence], positions see those of their own segment only.
        """
        dropout = self.dropout if self.training else 0.0
        if self.sinks is not None:
            return self._with_sinks(self.sinks, q, k, v, dropout, segments)
        if self.window is None and segments is None:
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.is_grouped
            )
        seen = _seen(q.shape[-2], self.window, q.device, segments)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, enable_gqa=self.is_grouped)

    def _with_sinks(
        self, sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, dropout: float, segments: Tensor | None
    ) -> Tensor:
        groups = k.shape[1]
        q = q.unflatten(1, (groups, -1))  # [batch, groups, heads of the group, sequence, width]
        scores = q @ k.unsqueeze(2).mT * q.shape[-1] ** -0.5
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        seen = _seen(q.shape[-2], self.window, q.device, segments)
        scores = scores.masked_fill(~(seen if segments is None else seen.unsqueeze(1)), -torch.inf)
        sink = sinks.to(scores.dtype).view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        return (F.dropout(weights, dropout).to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)


def _seen(length: int, window: int | None, device: torch.device, segments: Tensor | None) -> Tensor:
    """Which positions each position sees, [sequence, sequence]; with segments, [batch, 1, sequence, sequence]."""
    places = torch.arange(length, device=device)
    distance = places.unsqueeze(-1) - places
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    return seen if segments is None else seen & same_segment(segments)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: AttentionConfig, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.head_size = config.head_size
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        qkv_bias = config.add_qkv_bias or config.add_bias_linear
        self.q_proj = config.linear(config.hidden_size, q_size, bias=qkv_bias)
        self.k_proj = config.linear(config.hidden_size, kv_size, bias=qkv_bias)
        self.v_proj = config.linear(config.hidden_size, kv_size, bias=qkv_bias)
        self.core = CoreAttention(config, layer)
        self.out_proj = config.linear(q_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: nn.Module, segments: Tensor | None = None) -> Tensor:
        """Attend from each position of `x` to itself and to those before it, in its segment if there are any."""
        q = rotary(self.q_norm(self._split_heads(self.q_proj(x))))
        k = rotary(self.k_norm(self._split_heads(self.k_proj(x))))
        v = self._split_heads(self.v_proj(x))
        mixed = recomputed(self.config, "core_attn", self.core, q, k, v, *_given(segments))
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class LatentAttention(nn.Module):
    """Causal self-attention whose queries, keys and values pass through narrow vectors."""

    def __init__(self, config: AttentionConfig, shape: LatentShape, layer: int = 0) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        width, heads = config.hidden_size, config.num_heads
        narrow = width if shape.q_rank is None else shape.q_rank
        self.q_down_proj = nn.Identity() if shape.q_rank is None else config.linear(width, narrow)
        self.q_norm = nn.Identity() if shape.q_rank is None else RMSNorm(narrow, config.norm_eps)
        self.q_up_proj = config.linear(narrow, heads * shape.head_size)
        self.kv_down_proj = config.linear(width, shape.kv_rank + shape.rope_size)
        self.kv_norm = RMSNorm(shape.kv_rank, config.norm_eps)
        self.kv_up_proj = config.linear(shape.kv_rank, heads * (shape.nope_size + shape.value_size))
        self.core = CoreAttention(config, layer)
        self.out_proj = config.linear(heads * shape.value_size, width)

    def forward(self, x: Tensor, rotary: nn.Module, segments: Tensor | None = None) -> Tensor:
        """Attend from each position of `x` to itself and to those before it, in its segment if there are any."""
        latent_q = self.q_norm(self.q_down_proj(x))
        latent_kv, k_rope = self.kv_down_proj(x).split((self.shape.kv_rank, self.shape.rope_size), dim=-1)
        q, k, v = recomputed(
            self.config, "mla_up_proj", self._up, latent_q, self.kv_norm(latent_kv), k_rope.unsqueeze(1), rotary
        )
        mixed = recomputed(self.config, "core_attn", self.core, q, k, v, *_given(segments))
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _up(self, latent_q: Tensor, latent_kv: Tensor, k_rope: Tensor, rotary: nn.Module) -> tuple[Tensor, ...]:
        shape, heads = self.shape, self.config.num_heads
        q = self.q_up_proj(latent_q).unflatten(-1, (heads, -1)).transpose(1, 2)
        kv = self.kv_up_proj(latent_kv).unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((shape.nope_size, shape.rope_size), dim=-1)
        k_nope, v = kv.split((shape.nope_size, shape.value_size), dim=-1)
        shared = rotary(k_rope).expand(-1, heads, -1, -1)
        return torch.cat((q_nope, rotary(q_rope)), dim=-1), torch.cat((k_nope, shared), dim=-1), v


def _given(segments: Tensor | None) -> tuple[Tensor, ...]:
    return () if segments is None else (segments,)


def make_attention(config: AttentionConfig, layer: int) -> nn.Module:
    """Make the attention of the layer of this number."""
    return Attention(config, layer) if config.latent is None else LatentAttention(config, config.latent, layer)
