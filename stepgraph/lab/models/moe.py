"""A GPT whose MLPs are mixtures of experts, in plain torch.

Attention is the dense GPT's. In place of one MLP a layer has many, the experts, and a router that chooses a few of
them for each token. The layer is written as the four parts that it is made of, each a method with tensors in and
tensors out: `route` (norm, router, shared expert), `preprocess` (which token goes where), `run_experts` (copy the
tokens there and compute), `combine` (bring them back, weighted).

How the experts run is a choice with a price:

- `"grouped"` computes exactly the chosen rows. How many each expert has stays on the device. Where torch has no such
  kernel (see `Experts.can_group`), each expert gets room for all tokens: as static and as exact, but it computes
  `num_experts / top_k` times as much.
- `"capacity"` gives each expert the same number of slots and drops choices that find none left.
- `"drop"` drops the same choices and has no empty slots: it runs as `"grouped"` does, and what was dropped counts zero.
- `"loop"` computes exactly the chosen rows too, expert by expert, and reads on the host how many there are.

The router has two means against crowding. The auxiliary loss pulls the scores themselves away from crowded experts.
The bias is added to the scores for choosing only, so weights and gradients do not see it; `update_bias` moves it by a
fixed step toward even load, by the sign of the error alone, so it needs nothing from the host. A forward changes
nothing: the auxiliary loss, and how many choices each expert got, are returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from stepgraph.lab.models.activations import is_gated, of_stacked
from stepgraph.lab.models.attention import make_attention, make_rotary
from stepgraph.lab.models.experts import (
    Experts,
    Placement,
    collect,
    dispatch,
    place_dropped,
    place_padded,
    place_sorted,
)
from stepgraph.lab.models.gpt import MLP, Block, GPTConfig, check_length, embed, make_places, packed
from stepgraph.lab.models.language_model import LanguageModel, make_norm
from stepgraph.lab.models.recompute import recomputed


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    """The shape of a GPT with experts; `ffn_size` is the width inside one expert.

    Example:
        `replace(MoEConfig.tiny(), experts="capacity", capacity_factor=1.0)`
    """

    num_experts: int
    """Number of experts in each layer."""
    top_k: int
    """Number of experts that each token chooses."""
    experts: Literal["grouped", "capacity", "drop", "loop"] = "grouped"
    """How experts run: without drops or host reads, with a fixed capacity, padded to it or not, or in a loop that
    reads on the host."""
    capacity_factor: float = 1.25
    """For `"capacity"` and `"drop"`: choices that an expert takes, as a multiple of its even share of all choices."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores."""
    normalize_weights: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    weight_scale: float = 1.0
    """Factor on the weights of the experts."""
    bias_rate: float = 0.0
    """Step of the bias that steers choices toward idle experts; 0 for no such bias."""
    shared_ffn_size: int = 0
    """Width inside the expert that every token passes; 0 for none."""
    shared_gate: bool = False
    """Whether each token scales the shared expert's output by a sigmoid gate."""
    dense_layers: tuple[int, ...] = ()
    """The numbers of the layers that have one MLP in place of experts."""
    dense_ffn_size: int = 0
    """Width inside the MLP of those layers."""
    num_expert_groups: int = 1
    """Number of equal groups of experts; with several, a token chooses among the experts of its best groups only."""
    top_groups: int = 1
    """Number of groups that a token chooses from; a group is as good as its two best experts."""
    router_bias: bool = False
    """Whether the router's logits have a learned bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("num_experts", "top_k")
        self._require(
            self.top_k <= self.num_experts,
            f"`top_k` {self.top_k} is more than `num_experts` {self.num_experts}; a token chooses an expert once",
        )
        self._require_one_of("experts", ("grouped", "capacity", "drop", "loop"))
        self._require_one_of("scores", ("softmax", "sigmoid"))
        self._require_multiple("num_experts", "num_expert_groups")
        self._require(
            1 <= self.top_groups <= self.num_expert_groups
            and self.top_k <= self.top_groups * (self.num_experts // self.num_expert_groups),
            f"`top_groups` is {self.top_groups}; it must leave `top_k` {self.top_k} experts to choose from, and be at "
            f"most `num_expert_groups` {self.num_expert_groups}",
        )
        dense = {layer for layer in self.dense_layers if 0 <= layer < self.num_layers}
        self._require(
            len(dense) == len(self.dense_layers) < self.num_layers and (self.dense_ffn_size > 0 or not dense),
            f"`dense_layers` is {self.dense_layers}; it must name layers below `num_layers` {self.num_layers}, not all "
            "of them, and needs a `dense_ffn_size`",
        )
        self._require(self.capacity_factor > 0, f"`capacity_factor` is {self.capacity_factor}; it must be positive")
        for name in ("bias_rate", "shared_ffn_size"):
            self._require(getattr(self, name) >= 0, f"`{name}` is {getattr(self, name)}; it must not be negative")
        self._require(
            self.shared_ffn_size > 0 or not self.shared_gate, "`shared_gate` needs a `shared_ffn_size` above 0"
        )

    @classmethod
    def tiny(cls) -> MoEConfig:
        """A model of 0.3 million parameters for tests: trains in milliseconds a step on a CPU."""
        dense = {f.name: getattr(GPTConfig.tiny(), f.name) for f in fields(GPTConfig)}
        return cls(**{**dense, "ffn_size": 64, "num_experts": 8, "top_k": 2})

    @classmethod
    def qwen3_30b_a3b(cls, num_layers: int = 48) -> MoEConfig:
        """The shape of Qwen3-30B-A3B; `num_layers=4` is the cut that the benchmarks run on one GPU."""
        return cls(
            vocab_size=151936,
            num_layers=num_layers,
            hidden_size=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            qk_norm=True,
            ffn_size=768,
            max_seq_len=4096,
            rope_base=1_000_000.0,
            norm_eps=1e-6,
            num_experts=128,
            top_k=8,
        )


class Router(nn.Module):
    """Scores every expert for every token and chooses the best `top_k`."""

    expert_ids: Tensor
    bias_steps: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = config.linear(config.hidden_size, config.num_experts, bias=config.router_bias)
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
        choices = self._within_groups(wanted).topk(config.top_k).indices
        is_chosen = choices.unsqueeze(-1) == self.expert_ids
        # The scores of the choices by a sum in which all others are zero: a gather's gradient would be a scatter.
        weights = (scores.unsqueeze(1) * is_chosen).sum(-1)
        if config.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        load = is_chosen.sum((0, 1))
        shares = scores if config.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
        aux_loss = (load * shares.mean(0)).sum() * (config.num_experts / choices.numel())
        return weights * config.weight_scale, choices, load, aux_loss

    def _within_groups(self, wanted: Tensor) -> Tensor:
        """Leave each token the experts of its best groups."""
        groups = self.config.num_expert_groups
        if groups == 1:
            return wanted
        by_group: Tensor = wanted.unflatten(-1, (groups, -1))
        worth = by_group.topk(min(2, by_group.shape[-1])).values.sum(-1)
        best = worth.topk(self.config.top_groups).indices
        is_best = (best.unsqueeze(-1) == self.expert_ids[:groups]).any(1)
        return by_group.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1)

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """Move the bias one step: up for experts chosen less often than on average, down for others."""
        if self.bias_steps is None:
            raise ValueError("Router.update_bias: `bias_rate` is 0, so choices have no bias; set it in the config")
        self.bias_steps += torch.sign(load.sum() - load * self.config.num_experts)


class Routing(NamedTuple):
    """What `MoE.route` finds out about a batch of tokens."""

    hidden: Tensor
    """[tokens, width] the tokens, normed: what the experts get."""
    weights: Tensor
    """[tokens, top_k] the factor on each chosen expert's output."""
    choices: Tensor
    """[tokens, top_k] the chosen experts, the highest score first."""
    load: Tensor
    """[experts] how often each expert was chosen."""
    aux_loss: Tensor
    """The load-balancing loss: 1 where tokens and scores are spread evenly, up to `num_experts / top_k`."""
    shared: Tensor | None
    """[tokens, width] the shared expert's output, if there is one."""


class SharedExpert(nn.Module):
    """An MLP that every token passes, scaled by a gate of its own if the config asks for one."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.mlp = MLP(config, config.shared_ffn_size, config.activation)
        self.gate = config.linear(config.hidden_size, 1, bias=False) if config.shared_gate else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each token of `hidden` by itself."""
        out: Tensor = self.mlp(hidden)
        return out if self.gate is None else out * self.gate(hidden).sigmoid()


class MoE(nn.Module):
    """The feed-forward branch of a layer: its norm, router, experts and shared expert."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = make_norm(config)
        self.router = Router(config)
        self.shared = SharedExpert(config) if config.shared_ffn_size else None
        self.experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.ffn_size,
            partial(recomputed, config, "moe_act", of_stacked(config.activation)),
            inner_size=(2 if is_gated(config.activation) else 1) * config.ffn_size,
            bias=config.add_bias_linear,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the branch's output for the residual stream `x`, the auxiliary loss and the load."""
        routing = self.route(x)
        placement = self.preprocess(routing.choices)
        expert_out = self.run_experts(routing.hidden, placement)
        out = self.combine(expert_out, routing.weights, placement, routing.shared)
        return out.view_as(x), routing.aux_loss, routing.load

    def route(self, x: Tensor) -> Routing:
        """Norm the tokens of `x`, choose their experts, and run the shared one."""
        # Flat first: what comes back from the norm is added up before it meets the residual stream's gradient, so the
        # sum is the same, bit for bit, where this part is differentiated apart from the rest.
        hidden = recomputed(self.config, "layernorm", self.norm, x.flatten(0, -2))
        weights, choices, load, aux_loss = self.router(hidden)
        shared = None if self.shared is None else recomputed(self.config, "shared_experts", self.shared, hidden)
        return Routing(hidden, weights, choices, load, aux_loss, shared)

    def preprocess(self, choices: Tensor) -> Placement:
        """Find a slot for every choice."""
        config, ids = self.config, self.router.expert_ids
        capacity = choices.shape[0]  # no expert can be chosen by more, so nothing is dropped
        if drops := config.experts in ("capacity", "drop"):
            even_share = choices.numel() / config.num_experts
            capacity = min(math.ceil(even_share * config.capacity_factor), capacity)
        if self._is_padded():
            return place_padded(choices, ids, capacity)
        return place_dropped(choices, ids, capacity) if drops else place_sorted(choices, ids)

    def run_experts(self, hidden: Tensor, placement: Placement) -> Tensor:
        """Copy tokens into their slots and run each expert on its own."""
        slots = dispatch(hidden, placement)
        if self._is_padded():
            return self.experts.padded(slots)
        if self.config.experts == "loop":
            return self.experts.loop(slots, placement.ends)
        return self.experts.grouped(slots, placement.ends)

    def _is_padded(self) -> bool:
        """Whether each expert has the same number of slots."""
        way = self.config.experts
        return way == "capacity" or (way != "loop" and not self.experts.can_group())

    def combine(self, expert_out: Tensor, weights: Tensor, placement: Placement, shared: Tensor | None) -> Tensor:
        """Add up each token's experts by weight, and the shared one."""
        rows = collect(expert_out, placement).view(*weights.shape, -1)
        out = torch.bmm(weights.to(rows.dtype).unsqueeze(1), rows).squeeze(1)
        return out if shared is None else out + shared


class MoEBlock(nn.Module):
    """One layer: attention, then the experts, each normed before and added to the residual stream."""

    def __init__(self, config: MoEConfig, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.attn_norm = make_norm(config)
        self.attn = make_attention(config, layer)
        self.moe = MoE(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: nn.Module, segments: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Add this layer's two branches to the residual stream `x`; return it, the auxiliary loss and the load."""
        x = x + self.dropout(self.attn(recomputed(self.config, "layernorm", self.attn_norm, x), rotary, segments))
        out, aux_loss, load = recomputed(self.config, "moe", self.moe, x)
        return x + self.dropout(out), aux_loss, load


def make_moe_block(config: MoEConfig, layer: int) -> nn.Module:
    """Make the layer of this number: one with experts, or a dense one at the start."""
    if layer in config.dense_layers:
        return Block(config, layer, config.dense_ffn_size)
    return MoEBlock(config, layer)


class MoEOutput(NamedTuple):
    """What `MoEGPT` returns."""

    out: Tensor
    """The logits, or the mean cross-entropy where targets were given."""
    aux_loss: Tensor
    """The load-balancing loss, mean of the layers: add it to the loss with a small weight."""
    load: Tensor
    """[layers with experts, experts] how often each expert was chosen; what `MoEGPT.update_bias` wants."""


class MoEGPT(LanguageModel):
    """A GPT with experts whose weights follow from torch's global seed.

    Example:
        `out, aux_loss, load = MoEGPT(MoEConfig.tiny())(tokens, targets); (out + 0.01 * aux_loss).backward()`
    """

    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, (make_moe_block(config, layer) for layer in range(config.num_layers)))
        self.rotary = make_rotary(config)
        self.places = make_places(config)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cu_seqlens: Tensor | None = None) -> MoEOutput:
        """Return the logits for `tokens` [batch, sequence], or with `targets` the loss, and the state of balance.

        `cu_seqlens` [batch, n] says where packed examples begin.
        """
        check_length(self, tokens, self.config)
        return self.read_experts(self.embed(tokens, cu_seqlens), targets, *packed(tokens, cu_seqlens))

    def read_experts(self, x: Tensor, targets: Tensor | None, *segments: Tensor) -> MoEOutput:
        """Run the blocks on the residual stream `x` and return what the model does."""
        x, balance = self.run_blocks(x, self.rotary, *segments)
        aux_losses, loads = zip(*balance, strict=True)
        return MoEOutput(self.read_out(x, targets), torch.stack(aux_losses).mean(), torch.stack(loads))

    def embed(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Turn `tokens` [batch, sequence] into the residual stream."""
        return embed(self, tokens, self.places, cu_seqlens)

    def update_bias(self, load: Tensor) -> None:
        """Move every router's bias one step toward even `load` [layers, experts]: once a step, after all microbatches.

        Works on the device, without a read on the host, so it may be part of a captured step.
        """
        routers = [module for module in self.modules() if isinstance(module, Router)]
        for router, of_layer in zip(routers, load.unbind(), strict=True):
            router.update_bias(of_layer)
