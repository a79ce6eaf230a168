"""A dense GPT in plain torch.

The decoder of today's dense language models and nothing more: token embedding, blocks of pre-normed causal attention
(rotary positions, grouped key/value heads) and a SwiGLU MLP, a final RMSNorm, a linear head. Settings make it GPT-2,
with learned positions, LayerNorm, biases and a plain GELU. It is the workload that the demo, the benchmarks and the
tests share, so it is written the way anyone would write it for eager torch.

What makes it fit for a CUDA graph is only what makes it a good eager model: the forward pass reads nothing back to
the host and builds no tensor from host data, and everything that depends on positions is a buffer made once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.lab.models.activations import GATED, PLAIN, Activation, is_gated
from stepgraph.lab.models.attention import AttentionConfig, make_attention, make_rotary
from stepgraph.lab.models.language_model import Config, LanguageModel, make_norm
from stepgraph.lab.models.packing import positions_in, segments_of
from stepgraph.lab.models.recompute import recomputed


@dataclass(frozen=True, kw_only=True)
class GPTConfig(AttentionConfig):
    """The shape of a GPT; start from a named one and change it with `dataclasses.replace`.

    Example:
        `replace(GPTConfig.tiny(), dropout=0.1)`
    """

    ffn_size: int
    """Width inside the MLP; SwiGLU has three matrices of it, so 8/3 of `hidden_size` equals the classic factor 4."""
    activation: Activation = "swiglu"
    """The function inside the MLP; `"clamped_swiglu"` is that of GPT-OSS, `"relu2"` the square of ReLU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("ffn_size")
        self._require_one_of("activation", (*GATED, *PLAIN))

    @classmethod
    def tiny(cls) -> GPTConfig:
        """A model of 0.1 million parameters for tests: trains in milliseconds a step on a CPU."""
        return cls(
            vocab_size=256, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=128, max_seq_len=64
        )

    @classmethod
    def gpt_162m(cls) -> GPTConfig:
        """A model of GPT-2 small's width and depth with today's parts: rotary positions, SwiGLU, an untied head.

        162 million parameters; the vocabulary is padded to a multiple of 128. The benchmarks' figures are of this one.
        """
        return cls(
            vocab_size=50304,
            num_layers=12,
            hidden_size=768,
            num_heads=12,
            num_kv_heads=12,
            ffn_size=2048,
            max_seq_len=1024,
        )

    @classmethod
    def gpt2_small(cls) -> GPTConfig:
        """GPT-2 small as published: 124 million parameters, learned positions, LayerNorm, biases, a tied head."""
        return cls(
            vocab_size=50257,
            num_layers=12,
            hidden_size=768,
            num_heads=12,
            num_kv_heads=12,
            ffn_size=3072,
            max_seq_len=1024,
            positions="learned",
            norm="layer",
            activation="gelu",
            add_bias_linear=True,
            tie_embeddings=True,
        )


class MLP(nn.Module):
    """Two matrices with a function between them; a gated one, such as SwiGLU, has a third beside the first."""

    def __init__(self, config: Config, ffn_size: int, activation: Activation = "swiglu") -> None:
        super().__init__()
        self.gate_proj = config.linear(config.hidden_size, ffn_size) if is_gated(activation) else None
        self.up_proj = config.linear(config.hidden_size, ffn_size)
        self.down_proj = config.linear(ffn_size, config.hidden_size)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of `x` by itself."""
        if self.gate_proj is None:
            inner = PLAIN[self.activation](self.up_proj(x))
        else:
            inner = GATED[self.activation](self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(inner)
        return out


class Block(nn.Module):
    """One layer: attention, then the MLP, each normed before and added to the residual stream."""

    def __init__(self, config: GPTConfig, layer: int = 0, ffn_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.attn_norm = make_norm(config)
        self.attn = make_attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config, config.ffn_size if ffn_size is None else ffn_size, config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: nn.Module, segments: Tensor | None = None) -> Tensor:
        """Add this layer's two branches to the residual stream `x`."""
        config = self.config
        x = x + self.dropout(self.attn(recomputed(config, "layernorm", self.attn_norm, x), rotary, segments))
        hidden = recomputed(config, "layernorm", self.mlp_norm, x)
        out: Tensor = x + self.dropout(recomputed(config, "mlp", self.mlp, hidden))
        return out


class GPT(LanguageModel):
    """A dense GPT whose weights follow from torch's global seed.

    Example:
        `GPT(GPTConfig.tiny())(tokens)` gives logits, `GPT(GPTConfig.tiny())(tokens, targets)` the mean loss.
    """

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, (Block(config, layer) for layer in range(config.num_layers)))
        self.rotary = make_rotary(config)
        self.places = make_places(config)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the logits for `tokens` [batch, sequence], or with `targets` the mean cross-entropy in float32.

        A target of -100 is left out of the mean. `cu_seqlens` [batch, n] says where packed examples begin.
        """
        check_length(self, tokens, self.config)
        x, _ = self.run_blocks(self.embed(tokens, cu_seqlens), self.rotary, *packed(tokens, cu_seqlens))
        return self.read_out(x, targets)

    def embed(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Turn `tokens` [batch, sequence] into the residual stream."""
        return embed(self, tokens, self.places, cu_seqlens)


def make_places(config: AttentionConfig) -> nn.Parameter | None:
    """Make the vectors of learned positions, for a model that has them."""
    if config.positions != "learned":
        return None
    return nn.Parameter(torch.empty(config.max_seq_len, config.hidden_size).normal_(std=config.init_std))


def embed(model: LanguageModel, tokens: Tensor, places: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Turn `tokens` [batch, sequence] into the residual stream, with the vectors of their places if there are any."""
    x = model.embedding(tokens)
    if places is not None:
        length = tokens.shape[-1]
        x = x + (places[:length] if cu_seqlens is None else F.embedding(positions_in(cu_seqlens, length), places))
    out: Tensor = model.dropout(x)
    return out


def packed(tokens: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """Return what blocks are given besides rotary positions: the segments, if examples are packed."""
    return () if cu_seqlens is None else (segments_of(cu_seqlens, tokens.shape[-1]),)


def check_length(model: nn.Module, tokens: Tensor, config: AttentionConfig) -> None:
    """Refuse a sequence that the tables of positions do not cover."""
    if tokens.shape[-1] > config.max_seq_len:
        raise ValueError(
            f"{type(model).__name__}.forward, argument `tokens`: sequence of {tokens.shape[-1]} is longer than "
            f"`max_seq_len` {config.max_seq_len}; raise `max_seq_len` or cut the sequence"
        )
