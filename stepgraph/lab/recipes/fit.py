"""Cuts a configuration until a training step fits the memory of a machine.

Layers go first, because a model with fewer of them is captured, replayed and measured as the whole one is. If one layer
of each kind is still too much, experts go, by halves. A CPU is slow, too: there the widths, the vocabulary, the
sequence, the depth and the number of microbatches are brought down to what trains in a fraction of a second, whatever
the memory. It computes in float32: most CPUs take ten times as long for a product in bfloat16.

60% of what is free is planned with. The rest is for what no estimate knows: the allocator's fragments, workspaces of
libraries, and the static buffers of graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepgraph.config.container import ConfigContainer
from stepgraph.config.sections import MixedPrecisionSection
from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted
from stepgraph.lab.recipes.layers import fewest_layers, with_layers
from stepgraph.lab.recipes.memory import MemoryEstimate, estimate_memory, state_memory

SHARE = 0.6
"""The part of the free memory that is planned with."""
_CPU_WIDTH = 256
_CPU_HEAD = 32
_CPU_MOST: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "all": {"vocab_size": 8192, "seq_length": 128},
        "num_moe_experts": {"num_moe_experts": 8},
        "window_size": {"window_size": 32},
        "multi_latent_attention": {"qk_head_dim": _CPU_HEAD, "qk_pos_emb_head_dim": _CPU_HEAD, "v_head_dim": _CPU_HEAD},
        "mamba": {"mamba_state_dim": 32, "mamba_head_dim": 32, "mamba_num_groups": 2, "mamba_chunk_size": 32},
        "vision_language": {"vision_image_size": 64, "vision_num_layers": 2},
    }
)
"""The largest values on a CPU, of all models, and of those of a kind or with a setting."""
_CPU_LAYERS, _CPU_MICROBATCHES = 4, 2
_PRECISION, _BATCH = "mixed_precision", "global_batch_size"


@dataclass(frozen=True, slots=True)
class Cut:
    """A setting that was changed to fit."""

    setting: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.setting}: {_short(self.before)} -> {_short(self.after)}"


@dataclass(frozen=True, slots=True)
class Fit:
    """A configuration that fits, and what was cut for it."""

    config: ConfigContainer
    cuts: tuple[Cut, ...]
    estimate: MemoryEstimate
    budget_bytes: int

    def __str__(self) -> str:
        need = f"{_gib(self.estimate.total)} of {_gib(self.budget_bytes)} ({SHARE:.0%} of what is free)"
        if not self.cuts:
            return f"fits whole: {need}"
        lines = [f"  {cut}" for cut in self.cuts]
        return "\n".join([f"cut to {self.estimate.parameters:,} parameters, {need}:", *lines])


def fit(
    cfg: ConfigContainer, free_bytes: int, device: str = "cuda", *, kept: Collection[str] = (), num_ranks: int = 1
) -> Fit:
    """Return a copy of a configuration that trains within 60% of `free_bytes` on a device, and what was cut.

    `kept` names settings that stay as they are: those of the model, such as `num_layers`, `mixed_precision` and
    `global_batch_size`. `num_ranks` processes train together.

    Example:
        >>> found = fit(recipes.llama3_8b(), torch.cuda.mem_get_info()[0])
        >>> print(found)
    """
    budget, is_cpu = int(SHARE * free_bytes), device.partition(":")[0] == "cpu"
    fitted = for_cpu(cfg, frozenset(kept) - {_PRECISION, _BATCH}) if is_cpu else cfg.copy()
    if is_cpu and _PRECISION not in kept:
        fitted.mixed_precision = MixedPrecisionSection.named("fp32")
    if is_cpu and _BATCH not in kept:
        few = _CPU_MICROBATCHES * fitted.train.micro_batch_size * num_ranks
        fitted.train.global_batch_size = min(fitted.train.global_batch_size, few)
    fitted, estimate = _fewer_layers(fitted, budget, kept)
    while estimate.total > budget:
        fewer = None if "num_moe_experts" in kept else _fewer_experts(fitted)
        if fewer is None:
            raise _too_large(fitted, estimate, budget)
        fitted, estimate = fewer, estimate_memory(fewer)
    return Fit(fitted, _cuts(cfg, fitted), estimate, budget)


def refuse_too_large(cfg: ConfigContainer, free_bytes: int) -> MemoryEstimate:
    """Refuse a configuration whose weights, gradients and optimizer state alone are more than the free memory.

    Of adapters only the frozen weights count. Each stage of a pipeline has its part.
    """
    state = state_memory(cfg)
    parts = {"weights": state.weights}
    if cfg.peft.scheme is None:
        parts |= {"gradients": state.gradients, "optimizer": state.optimizer}
    needed = sum(parts.values()) // max(1, cfg.model.pipeline_model_parallel_size)
    if needed > free_bytes:
        raise InvalidArgument(
            f"the model of {state.parameters:,} parameters does not fit this machine",
            rule="fit",
            details=[
                f"needed     {_gib(needed)}: {', '.join(parts)}; activations come on top",
                f"available  {_gib(free_bytes)}",
            ],
            why="the process would run out of memory, or be killed, before the first step.",
            fix="add --fit, which cuts the model to this machine, or choose a smaller recipe.",
        )
    return state


def _fewer_layers(cfg: ConfigContainer, budget: int, kept: Collection[str]) -> tuple[ConfigContainer, MemoryEstimate]:
    """The most layers that fit, or the fewest that there may be."""
    most = cfg.model.num_layers
    least = most if "num_layers" in kept else fewest_layers(cfg)
    runs: dict[str, int] = {}
    whole = estimate_memory(cfg, runs)
    if whole.total <= budget or least == most:
        return cfg, whole
    found = with_layers(cfg, least)
    estimate = estimate_memory(found, runs)
    while estimate.total <= budget and most - least > 1:  # `most` is known not to fit
        middle = (least + most) // 2
        tried = with_layers(cfg, middle)
        needed = estimate_memory(tried, runs)
        if needed.total <= budget:
            least, found, estimate = middle, tried, needed
        else:
            most = middle
    return found, estimate


def _fewer_experts(cfg: ConfigContainer) -> ConfigContainer | None:
    """Half as many experts, or None if tokens would have no choice."""
    model = cfg.model
    if model.num_moe_experts is None or model.num_moe_experts // 2 <= model.moe_router_topk:
        return None
    found = cfg.copy()
    _set_experts(found, model.num_moe_experts // 2)
    return found


def _set_experts(cfg: ConfigContainer, number: int) -> None:
    """Set the number of experts; groups stay at least two experts large, and leave as many to choose from."""
    model = cfg.model
    model.num_moe_experts = number
    model.moe_router_topk = min(model.moe_router_topk, max(1, number // 2))
    if model.moe_router_num_groups:
        groups = max(1, min(model.moe_router_num_groups, number // 2))
        model.moe_router_num_groups = groups
        enough = -(-model.moe_router_topk * groups // number)
        model.moe_router_group_topk = max(enough, min(model.moe_router_group_topk or 1, groups))


def for_cpu(cfg: ConfigContainer, kept: Collection[str] = ()) -> ConfigContainer:
    """A copy that a CPU can train: narrow, shallow, with few tokens, and of the same parts, but for what is kept."""
    layers = cfg.model.num_layers
    cfg = cfg.copy() if "num_layers" in kept else with_layers(cfg, min(layers, max(_CPU_LAYERS, fewest_layers(cfg))))
    model, held = cfg.model, {name: getattr(cfg.model, name) for name in kept}
    _bring_down(cfg, "hidden_size" in kept)
    for name, value in held.items():
        setattr(model, name, value)
    needs_width = model.kv_channels is None and not model.multi_latent_attention
    if needs_width and "kv_channels" not in kept and model.hidden_size % model.num_attention_heads:
        model.kv_channels = _CPU_HEAD
    return cfg


def _bring_down(cfg: ConfigContainer, keeps_width: bool) -> None:
    """Bring everything down to what a CPU trains in a fraction of a second."""
    model = cfg.model
    kinds = {"all", "mamba" if model.kind == "hybrid" else model.kind}
    for kind, settings in _CPU_MOST.items():
        if kind in kinds or getattr(model, kind, None):
            for name, most in settings.items():
                setattr(model, name, min(getattr(model, name), most))
    if model.num_moe_experts is not None:
        _set_experts(cfg, model.num_moe_experts)
    if model.image_token_id is not None:
        model.image_token_id = min(model.image_token_id, model.vocab_size - 1)
    if model.hidden_size > _CPU_WIDTH and not keeps_width:
        _narrow(cfg, _CPU_WIDTH / model.hidden_size)
    if model.kind == "vision_language" and model.vision_hidden_size > _CPU_WIDTH // 2:
        _scale(model, "vision_ffn_hidden_size", _CPU_WIDTH / 2 / model.vision_hidden_size)
        model.vision_hidden_size, model.vision_num_attention_heads = _CPU_WIDTH // 2, 4


def _narrow(cfg: ConfigContainer, factor: float) -> None:
    """Bring the widths down to that of a CPU, each by the same factor as far as heads allow."""
    model = cfg.model
    model.hidden_size = _CPU_WIDTH
    for name in ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        _scale(model, name, factor)
    if model.multi_latent_attention:
        _scale(model, "q_lora_rank", factor)
        _scale(model, "kv_lora_rank", factor)
    groups = model.num_query_groups or model.num_attention_heads
    shared = model.num_attention_heads // groups
    groups = max(1, int(groups * factor))
    if model.num_query_groups is not None:
        model.num_query_groups = groups
    model.num_attention_heads = groups * min(shared, 8)
    if model.kv_channels is not None or _CPU_WIDTH % (2 * model.num_attention_heads):
        model.kv_channels = _CPU_HEAD
    if model.mamba_num_heads is not None:
        model.mamba_num_heads = 2 * _CPU_WIDTH // model.mamba_head_dim


def _scale(model: Any, name: str, factor: float) -> None:
    value = getattr(model, name)
    if value is not None:
        setattr(model, name, max(8, round(value * factor / 8) * 8))


def _cuts(before: ConfigContainer, after: ConfigContainer) -> tuple[Cut, ...]:
    old, new = before.to_dict(), after.to_dict()
    return tuple(
        Cut(f"{section}.{name}", value, new[section][name])
        for section in ("model", "train", _PRECISION)
        for name, value in old[section].items()
        if value != new[section][name]
    )


def _too_large(cfg: ConfigContainer, estimate: MemoryEstimate, budget: int) -> InvalidArgument:
    return InvalidArgument(
        f"the smallest cut, {counted(cfg.model.num_layers, 'layers')}, does not fit",
        rule="fit",
        details=[f"needed     {_gib(estimate.total)}", f"available  {_gib(budget)} ({SHARE:.0%} of what is free)"],
        why="layers and experts are cut, widths and the sequence are not.",
        fix="set a shorter model.seq_length, recompute_granularity='full', or choose a smaller recipe.",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:18]} ... {text[-18:]}"
