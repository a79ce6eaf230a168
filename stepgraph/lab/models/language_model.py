"""The parts that the models share: config checks, norm, first weights, and the two ends of a language model.

A language model turns tokens into vectors, blocks add to them one after the other, and a norm and a linear head turn
them into logits. The models differ in their blocks only: each makes its blocks and runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.lab.models.linear import Linear, backward_dw
from stepgraph.lab.models.recompute import RecomputeConfig, run_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    """The part of a model's shape that all models have."""

    num_layers: int
    """Number of blocks."""
    hidden_size: int
    """Width of the residual stream."""
    dropout: float = 0.0
    """Probability of dropping an embedding, an attention weight or a residual branch's element in training."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with a bias."""
    norm_eps: float = 1e-5
    """Added to the mean square, or to the variance, in a norm."""
    add_bias_linear: bool = False
    """Whether linear layers have a bias; the head has none."""
    init_std: float = 0.02
    """Standard deviation of the first weights of matrices."""

    def __post_init__(self) -> None:
        self._require_positive("num_layers", "hidden_size")
        self._require(0.0 <= self.dropout < 1.0, f"`dropout` is {self.dropout}; it must be in [0, 1)")
        self._require_one_of("norm", ("rms", "layer"))

    def linear(self, in_features: int, out_features: int, *, bias: bool | None = None) -> Linear:
        """Make a linear layer; without a word it has a bias if `add_bias_linear` says so."""
        return Linear(in_features, out_features, self.add_bias_linear if bias is None else bias)

    def _require_positive(self, *names: str) -> None:
        for name in names:
            self._require(getattr(self, name) >= 1, f"`{name}` is {getattr(self, name)}; it must be at least 1")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {otherwise}")

    def _require_one_of(self, name: str, known: Iterable[str]) -> None:
        value = getattr(self, name)
        self._require(value in known, f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, known))}")

    def _require_multiple(self, name: str, of: str) -> None:
        size, unit = getattr(self, name), getattr(self, of)
        self._require(size % unit == 0, f"`{name}` {size} is not a multiple of `{of}` {unit}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(RecomputeConfig, Config):
    """The part of a language model's shape that does not depend on its kind of block."""

    vocab_size: int
    """Number of tokens the embedding and the head know."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    delay_wgrad_compute: bool = False
    """Whether a backward leaves the weight gradients of linear layers to `model.backward_dw()`."""
    gradient_accumulation_fusion: bool = False
    """Whether linear layers add their weight gradients to `weight.main_grad`, where it is, in place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("vocab_size")
        problem = self.recompute_problem()
        self._require(problem is None, problem or "")

    def linear(self, in_features: int, out_features: int, *, bias: bool | None = None) -> Linear:
        """Make a linear layer; without a word it has a bias if `add_bias_linear` says so."""
        made = super().linear(in_features, out_features, bias=bias)
        made.delay_wgrad_compute = self.delay_wgrad_compute
        made.gradient_accumulation_fusion = self.gradient_accumulation_fusion
        return made


class RMSNorm(nn.Module):
    """Scales each vector to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of `x`."""
        # the types differ behind a linear layer under autocast, where torch has no fused kernel for two
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """Scales each vector to mean 0 and variance 1, then by a learned weight and bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of `x`."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def make_norm(config: Config, size: int | None = None) -> nn.Module:
    """Make the norm that a config asks for, of its residual stream or of `size`."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.hidden_size if size is None else size, config.norm_eps)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the type in which autocast has matrix products computed on such a device, or None where it is off."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


class LanguageModel(nn.Module):
    """Embedding, blocks, norm and head; a subclass runs the blocks between `embed` and `read_out`."""

    def __init__(self, config: ModelConfig, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = make_norm(config)
        self.head = config.linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        init_weights(self, config)

    def embed(self, tokens: Tensor) -> Tensor:
        """Turn `tokens` [batch, sequence] into the residual stream."""
        out: Tensor = self.dropout(self.embedding(tokens))
        return out

    def run_blocks(self, x: Tensor, *args: Any) -> tuple[Tensor, list[Any]]:
        """Run the blocks on the residual stream `x`, recomputed as the config says.

        Returns what the last one gives, and what else blocks return, in order.
        """
        return run_layers(self.config, list(self.blocks), x, *args)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest backward left: once after each, with `delay_wgrad_compute`."""
        backward_dw(self)

    def read_out(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Return the logits for the residual stream `x`, or with `targets` the mean cross-entropy in float32.

        A target of -100 is left out of the mean.
        """
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def init_weights(model: nn.Module, config: Config) -> None:
    """Draw the first weights of a model's matrices; biases of linear layers start at zero.

    A block adds one or two branches to the residual stream; scaled, they do not make it grow with depth.
    """
    branch_std = config.init_std / (2 * config.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight")
        is_matrix = parameter.dim() > 1 and not path.endswith(("conv", "bias"))  # a filter of a few taps is none
        if is_matrix:
            nn.init.normal_(parameter, std=branch_std if path.endswith(("out_proj", "down_proj")) else config.init_std)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
