"""The shape of a GPT with experts: how many, how they are chosen, how they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepgraph.models.gpt import GPTConfig

__all__ = ["MoEConfig"]


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

    experts: Literal["grouped", "capacity", "loop"] = "grouped"
    """How experts run: without drops or host reads, with a fixed capacity, or in a loop that reads on the host."""

    capacity_factor: float = 1.25
    """For `"capacity"`: slots of an expert, as a multiple of its even share of all choices."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("num_experts", "top_k")
        self._require(
            self.top_k <= self.num_experts,
            f"`top_k` {self.top_k} is more than `num_experts` {self.num_experts}; a token chooses an expert once",
        )
        for name, known in (("experts", ("grouped", "capacity", "loop")), ("scores", ("softmax", "sigmoid"))):
            value = getattr(self, name)
            self._require(value in known, f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, known))}")
        self._require(self.capacity_factor > 0, f"`capacity_factor` is {self.capacity_factor}; it must be positive")
        for name in ("bias_rate", "shared_ffn_size"):
            self._require(getattr(self, name) >= 0, f"`{name}` is {getattr(self, name)}; it must not be negative")
        self._require(
            self.shared_ffn_size > 0 or not self.shared_gate, "`shared_gate` needs a `shared_ffn_size` above 0"
        )

    @classmethod
    def tiny(cls) -> MoEConfig:
        """A model of 0.3 million parameters for tests: trains in milliseconds a step on a CPU."""
        return cls(
            vocab_size=256,
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            ffn_size=64,
            max_seq_len=64,
            num_experts=8,
            top_k=2,
        )

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
