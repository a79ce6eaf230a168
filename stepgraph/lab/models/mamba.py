"""A Mamba-2 language model in plain torch.

Where attention looks back at every position, a state space layer carries a state along: each head has a matrix that
decays by a factor at every position and takes in an outer product of the position's input and its key,

    state[t] = exp(dt[t] * A) * state[t-1] + dt[t] * B[t] x[t]^T,    y[t] = C[t]^T state[t] + D * x[t].

Run as written, that is a loop over positions. The chunked form cuts the sequence into chunks: inside a chunk the sum
over earlier positions is a masked matrix product like attention's, between chunks only their final states are carried,
and that too is one matrix product with the decays from chunk to chunk. So the number of kernels does not depend on the
length, all shapes are known beforehand, and nothing is read back to the host. The price is a matrix of
chunk_size * chunk_size a chunk and head.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.lab.models.language_model import LanguageModel, ModelConfig, RMSNorm, autocast_dtype, make_norm
from stepgraph.lab.models.recompute import recomputed

_DT_RANGE = (1e-3, 1e-1)
_DECAY_RANGE = (1.0, 16.0)


@dataclass(frozen=True, kw_only=True)
class MambaConfig(ModelConfig):
    """The shape of a Mamba-2 model; start from a named one and change it with `dataclasses.replace`."""

    state_size: int
    """Number of rows of a head's state: the width of `B` and `C`."""
    head_size: int
    """Width of one head."""
    chunk_size: int
    """Positions in a chunk; a sequence that is not a multiple of it is padded inside."""
    expand: int = 2
    """Width inside the layer, as a multiple of `hidden_size`."""
    num_groups: int = 1
    """Number of `B` and `C`; each serves `num_heads // num_groups` heads."""
    conv_size: int = 4
    """Positions that the convolution before the scan sees: its own and those before it."""
    norm_by_group: bool = False
    """Whether the norm behind the scan is taken over each of `num_groups` parts by itself."""
    mamba_num_heads: int | None = None
    """Number of heads; None takes as many as make the width inside `expand` times `hidden_size`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("state_size", "head_size", "chunk_size", "expand", "num_groups", "conv_size")
        self._require(
            self.inner_size % self.head_size == 0,
            f"`expand` * `hidden_size` {self.inner_size} is not a multiple of `head_size` {self.head_size}",
        )
        self._require(
            self.num_heads % self.num_groups == 0,
            f"the number of heads {self.num_heads} is not a multiple of `num_groups` {self.num_groups}",
        )

    @property
    def inner_size(self) -> int:
        """Width inside the layer."""
        if self.mamba_num_heads is not None:
            return self.mamba_num_heads * self.head_size
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        """Number of heads, which share the inner width."""
        return self.inner_size // self.head_size

    @classmethod
    def tiny(cls) -> MambaConfig:
        """A model of 0.1 million parameters for tests: trains in milliseconds a step on a CPU."""
        return cls(vocab_size=256, num_layers=2, hidden_size=64, state_size=16, head_size=16, chunk_size=8)

    @classmethod
    def mamba2_130m(cls) -> MambaConfig:
        """The shape of Mamba-2 130M: 24 layers of width 768."""
        sizes: dict[str, Any] = {"hidden_size": 768, "state_size": 128, "head_size": 64, "chunk_size": 256}
        return cls(vocab_size=50288, num_layers=24, tie_embeddings=True, **sizes)


class CausalConv(nn.Module):
    """A filter for each channel over a position and the few before it.

    Written as a product with a sliding view: its gradient is a plain reduction, where a convolution's may add with
    atomics.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(width, size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Filter `x` [batch, sequence, width] along the sequence; the last tap is the position itself."""
        size = self.weight.shape[-1]
        windows = F.pad(x, (0, 0, size - 1, 0)).unfold(1, size, 1)  # [batch, sequence, width, size]
        return (windows * self.weight).sum(-1) + self.bias


class Mamba2(nn.Module):
    """Projection, causal convolution, scan, gated norm, projection."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        inner, heads = config.inner_size, config.num_heads
        self.widths = (inner, inner + 2 * config.num_groups * config.state_size, heads)
        self.in_proj = config.linear(config.hidden_size, sum(self.widths))
        self.conv = CausalConv(self.widths[1], config.conv_size)
        # dt starts spread over its range evenly by magnitude, and the decay per unit of dt evenly over its own.
        dt = torch.empty(heads).uniform_(*(math.log(bound) for bound in _DT_RANGE)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*_DECAY_RANGE).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(inner, config.norm_eps)
        self.out_proj = config.linear(inner, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position of `x` [batch, sequence, width] with those before it."""
        config = self.config
        gate, mixed, dt = self.in_proj(x).split(self.widths, dim=-1)
        mixed = F.silu(self.conv(mixed))
        state_widths = [config.num_groups * config.state_size] * 2
        values, keys, queries = mixed.split((config.inner_size, *state_widths), dim=-1)
        y = self._scan(
            values.unflatten(-1, (-1, config.head_size)),
            dt,
            keys.unflatten(-1, (-1, config.state_size)),
            queries.unflatten(-1, (-1, config.state_size)),
        )
        out: Tensor = self.out_proj(self._normed(y.flatten(2).type_as(gate) * F.silu(gate)))
        return out

    def _normed(self, y: Tensor) -> Tensor:
        if not self.config.norm_by_group:
            normed: Tensor = self.norm(y)
            return normed
        parts = y.unflatten(-1, (self.config.num_groups, -1))
        weight = self.norm.weight.to(y.dtype)
        return F.rms_norm(parts, parts.shape[-1:], eps=self.norm.eps).flatten(-2) * weight

    def _scan(self, values: Tensor, dt: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        # Decays multiply over hundreds of positions, so all of it is in float32 at least, under autocast too.
        dtype, device_type = torch.promote_types(values.dtype, torch.float32), values.device.type
        with torch.autocast(device_type, enabled=False) if autocast_dtype(device_type) else nullcontext():
            values, keys, queries = values.to(dtype), keys.to(dtype), queries.to(dtype)
            dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype))
            log_decay = -dt * self.A_log.to(dtype).exp()
            y = chunked_scan(values * dt.unsqueeze(-1), log_decay, keys, queries, self.config.chunk_size)
            return y + values * self.D.to(dtype).unsqueeze(-1)


def chunked_scan(values: Tensor, log_decay: Tensor, keys: Tensor, queries: Tensor, chunk_size: int) -> Tensor:
    """Return y[t] = sum over s <= t of (queries[t] . keys[s]) * exp(log_decay[s+1] + ... + log_decay[t]) * values[s].

    Shapes: `values` [batch, sequence, heads, width], `log_decay` [batch, sequence, heads], `keys` and `queries`
    [batch, sequence, groups, state]; consecutive heads share a group.
    """
    length, num_groups = values.shape[1], keys.shape[2]
    chunk_size = min(chunk_size, length)
    # below: b batch, c chunk, g group, h head of the group, t and s positions of the chunk, n state, p width
    v = _cut(values, chunk_size).unflatten(2, (num_groups, -1))  # bcghsp
    decay = _cut(log_decay.unsqueeze(-1), chunk_size).squeeze(-1).unflatten(2, (num_groups, -1))  # bcght
    k, q = _cut(keys, chunk_size).unsqueeze(3), _cut(queries, chunk_size).unsqueeze(3)  # bcg1sn, bcg1tn

    within = (q @ k.mT * _decays(decay)) @ v  # bcghtp

    since_start = decay.cumsum(-1)
    whole = since_start[..., -1]  # bcgh
    to_end = (whole.unsqueeze(-1) - since_start).exp()
    gained = k.mT @ (v * to_end.unsqueeze(-1))  # bcghnp: what each chunk adds to the state
    between = _decays(whole.movedim(1, -1))  # bghcc
    after = (between @ gained.movedim(1, 3).flatten(4)).unflatten(4, gained.shape[-2:]).movedim(3, 1)
    before = F.pad(after[:, :-1], (0, 0) * 4 + (1, 0))  # the state that each chunk finds: none in the first
    carried = (q @ before) * since_start.exp().unsqueeze(-1)  # bcghtp

    y: Tensor = (within + carried).flatten(2, 3).transpose(2, 3).flatten(1, 2)
    return y[:, :length]


def _cut(x: Tensor, chunk_size: int) -> Tensor:
    """Cut [batch, sequence, heads, width] into [batch, chunks, heads, chunk_size, width], padded with zeros."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk_size))
    chunks: Tensor = padded.unflatten(1, (-1, chunk_size))
    return chunks.transpose(2, 3)


def _decays(log_decay: Tensor) -> Tensor:
    """Return the decay from position s to t, exp(log_decay[s+1] + ... + log_decay[t]), [..., t, s]; 0 where s > t."""
    total = log_decay.cumsum(-1)
    size = log_decay.shape[-1]
    is_future = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu(1)
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(is_future, -torch.inf).exp()


class MambaBlock(nn.Module):
    """One layer: the mixer, normed before and added to the residual stream."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = make_norm(config)
        self.mixer = Mamba2(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add this layer's branch to the residual stream `x`."""
        out: Tensor = x + self.dropout(self.mixer(recomputed(self.config, "layernorm", self.norm, x)))
        return out


class Mamba(LanguageModel):
    """A Mamba-2 model whose weights follow from torch's global seed.

    Example:
        `Mamba(MambaConfig.tiny())(tokens)` gives logits, `Mamba(MambaConfig.tiny())(tokens, targets)` the mean loss.
    """

    config: MambaConfig

    def __init__(self, config: MambaConfig) -> None:
        super().__init__(config, (MambaBlock(config) for _ in range(config.num_layers)))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits for `tokens` [batch, sequence], or with `targets` the mean cross-entropy in float32.

        A target of -100 is left out of the mean.
        """
        x, _ = self.run_blocks(self.embed(tokens))
        return self.read_out(x, targets)
