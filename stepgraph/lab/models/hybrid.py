"""A hybrid language model in plain torch: Mamba-2, attention and MLP layers in any order.

Mamba-2 layers carry a state of fixed size along the sequence, and a few attention layers among them look things up that
the state has lost. A pattern names the layers one by one: `M` is a Mamba-2 layer, `*` an attention layer, `-` an MLP.
Each has one branch, normed before and added to the residual stream. The Mamba-2 layers know the order of positions, so
the attention layers need no positions of their own (Nemotron-H has none).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor, nn

from stepgraph.lab.models.attention import make_attention, make_rotary
from stepgraph.lab.models.gpt import MLP, GPTConfig, check_length, embed, make_places
from stepgraph.lab.models.language_model import LanguageModel, ModelConfig, make_norm
from stepgraph.lab.models.mamba import MambaBlock, MambaConfig
from stepgraph.lab.models.recompute import recomputed

_LAYERS = "M*-"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(GPTConfig):
    """The shape of a hybrid model; start from `tiny()` and change it with `dataclasses.replace`.

    Example:
        `replace(HybridConfig.tiny(), pattern="M-M*", num_layers=4)`
    """

    pattern: str
    """The layers, one letter each: `M` for Mamba-2, `*` for attention, `-` for an MLP."""
    state_size: int
    """Number of rows of a Mamba-2 head's state."""
    mamba_num_heads: int
    """Number of heads of a Mamba-2 layer."""
    mamba_head_size: int
    """Width of a Mamba-2 head."""
    mamba_num_groups: int
    """Number of groups of Mamba-2 heads that share their keys and queries."""
    chunk_size: int
    """Positions in a chunk of the Mamba-2 scan."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [letter for letter in self.pattern if letter not in _LAYERS]
        self._require(not unknown, f"`pattern` has {unknown[:1]}; it knows M (Mamba-2), * (attention) and - (MLP)")
        self._require(
            len(self.pattern) == self.num_layers,
            f"`pattern` has {len(self.pattern)} letters and `num_layers` is {self.num_layers}; they must be equal",
        )
        self.mamba  # noqa: B018  # its own checks

    @property
    def mamba(self) -> MambaConfig:
        """The shape of the Mamba-2 layers."""
        shared = {field.name: getattr(self, field.name) for field in fields(ModelConfig)}
        return MambaConfig(
            **shared,
            state_size=self.state_size,
            head_size=self.mamba_head_size,
            mamba_num_heads=self.mamba_num_heads,
            num_groups=self.mamba_num_groups,
            chunk_size=self.chunk_size,
            norm_by_group=True,
        )

    @classmethod
    def tiny(cls) -> HybridConfig:
        """A model of 0.2 million parameters for tests: trains in milliseconds a step on a CPU."""
        dense = {f.name: getattr(GPTConfig.tiny(), f.name) for f in fields(GPTConfig)}
        own = {"num_layers": 5, "positions": "none", "activation": "relu2", "pattern": "M-M*-", "state_size": 16}
        mamba = {"mamba_num_heads": 8, "mamba_head_size": 16, "mamba_num_groups": 2, "chunk_size": 8}
        return cls(**{**dense, **own, **mamba})


class HybridMambaBlock(MambaBlock):
    """A Mamba-2 layer among others: it needs no positions."""

    def forward(self, x: Tensor, rotary: nn.Module | None = None) -> Tensor:
        """Add this layer's branch to the residual stream `x`."""
        return super().forward(x)


class AttentionBlock(nn.Module):
    """A layer of attention alone."""

    def __init__(self, config: HybridConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.norm = make_norm(config)
        self.attn = make_attention(config, layer)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        """Add this layer's branch to the residual stream `x`."""
        out: Tensor = x + self.dropout(self.attn(recomputed(self.config, "layernorm", self.norm, x), rotary))
        return out


class MLPBlock(nn.Module):
    """A layer of one MLP alone."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = make_norm(config)
        self.mlp = MLP(config, config.ffn_size, config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: nn.Module | None = None) -> Tensor:
        """Add this layer's branch to the residual stream `x`."""
        hidden = recomputed(self.config, "layernorm", self.norm, x)
        out: Tensor = x + self.dropout(recomputed(self.config, "mlp", self.mlp, hidden))
        return out


class Hybrid(LanguageModel):
    """A hybrid model whose weights follow from torch's global seed.

    Example:
        `Hybrid(HybridConfig.tiny())(tokens)` gives logits, with `targets` beside the tokens the mean loss.
    """

    config: HybridConfig

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config, (_make_block(config, layer) for layer in range(config.num_layers)))
        self.rotary = make_rotary(config)
        self.places = make_places(config)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits for `tokens` [batch, sequence], or with `targets` the mean cross-entropy in float32.

        A target of -100 is left out of the mean.
        """
        check_length(self, tokens, self.config)
        x, _ = self.run_blocks(self.embed(tokens), self.rotary)
        return self.read_out(x, targets)

    def embed(self, tokens: Tensor) -> Tensor:
        """Turn `tokens` [batch, sequence] into the residual stream."""
        return embed(self, tokens, self.places)


def _make_block(config: HybridConfig, layer: int) -> nn.Module:
    letter = config.pattern[layer]
    if letter == "M":
        return HybridMambaBlock(config.mamba)
    return AttentionBlock(config, layer) if letter == "*" else MLPBlock(config)
