"""From the model section of a configuration to a model: the one place that knows both their words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stepgraph.config.model import ModelSection
from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted
from stepgraph.lab.models import (
    GPT,
    GPTConfig,
    Hybrid,
    HybridConfig,
    LatentShape,
    Mamba,
    MambaConfig,
    MoEConfig,
    MoEGPT,
    VisionConfig,
    VisionLanguageConfig,
    VisionLanguageModel,
    VisionMoE,
    VisionMoEConfig,
)
from stepgraph.lab.models.language_model import Config

_POSITIONS = {"rope": "rope", "yarn": "rope", "learned_absolute": "learned", "none": "none"}
_GATED = {"silu": "swiglu", "clamped_swiglu": "clamped_swiglu"}
_PLAIN = {"gelu": "gelu", "squared_relu": "relu2"}


def build_model(model: ModelSection) -> nn.Module:
    """Make the model that a configuration's model section describes, with weights from torch's global seed.

    Example:
        >>> model = build_model(recipes.gpt2_small().model)
    """
    config = model_config(model)
    makers: dict[type[Config], Callable[[Any], nn.Module]] = {
        GPTConfig: GPT,
        MoEConfig: MoEGPT,
        MambaConfig: Mamba,
        HybridConfig: Hybrid,
        VisionLanguageConfig: VisionLanguageModel,
        VisionMoEConfig: VisionMoE,
    }
    return makers[type(config)](config)


def model_config(model: ModelSection) -> Config:
    """Read the shape of a model from the model section of a configuration."""
    try:
        if model.kind == "mamba":
            return MambaConfig(**_shared(model), **_state_space(model), mamba_num_heads=model.mamba_num_heads)
        if model.kind == "hybrid":
            return _hybrid(model)
        language = {**_shared(model), **_attention(model)}
        if model.kind == "vision_language":
            token = model.vocab_size - 1 if model.image_token_id is None else model.image_token_id
            seen: dict[str, Any] = {"vision": _vision(model), "image_token": token}
            if model.num_moe_experts is None:
                return VisionLanguageConfig(**language, **_dense(model), **seen)
            return VisionMoEConfig(**language, **_experts(model), **seen)
        if model.kind == "moe" or model.num_moe_experts is not None:
            return MoEConfig(**language, **_experts(model))
        return GPTConfig(**language, **_dense(model))
    except ValueError as error:
        raise InvalidArgument(
            f"the model section describes no model: {error}",
            rule="model-shape",
            why="the sizes of a model's parts depend on each other.",
            fix="change the setting that is named; `stepgraph recipes` lists shapes that work.",
        ) from error


def _shared(model: ModelSection) -> dict[str, Any]:
    """What all kinds of models have."""
    unit = model.make_vocab_size_divisible_by
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": -(-model.vocab_size // unit) * unit,
        "tie_embeddings": model.share_embeddings_and_output_weights,
        "dropout": model.hidden_dropout,
        "norm": "rms" if model.normalization == "RMSNorm" else "layer",
        "norm_eps": model.layernorm_epsilon,
        "add_bias_linear": model.add_bias_linear,
        "init_std": model.init_method_std,
        "recompute_granularity": model.recompute_granularity,
        "recompute_method": model.recompute_method or "block",
        "recompute_num_layers": model.recompute_num_layers,
        "recompute_modules": tuple(model.recompute_modules) or ("core_attn",),
        "delay_wgrad_compute": model.delay_wgrad_compute,
        "gradient_accumulation_fusion": model.gradient_accumulation_fusion,
    }


def _attention(model: ModelSection) -> dict[str, Any]:
    if model.rotary_percent != 1.0:
        raise ValueError(f"`rotary_percent` is {model.rotary_percent}; the models here rotate whole heads")
    if model.softmax_type == "off-by-one":
        raise ValueError("`softmax_type` is 'off-by-one'; the models here have 'vanilla' and 'learnable'")
    is_yarn = model.position_embedding_type == "yarn"
    if is_yarn and model.rotary_scaling_factor is None:
        raise ValueError("`position_embedding_type` is 'yarn', which needs a `rotary_scaling_factor`")
    latent = None
    if model.multi_latent_attention:
        latent = LatentShape(
            q_rank=model.q_lora_rank,
            kv_rank=model.kv_lora_rank,
            nope_size=model.qk_head_dim,
            rope_size=model.qk_pos_emb_head_dim,
            value_size=model.v_head_dim,
        )
    return {
        "num_heads": model.num_attention_heads,
        "num_kv_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": model.kv_channels if latent is None else latent.head_size,
        "max_seq_len": model.seq_length,
        "qk_norm": model.qk_layernorm,
        "positions": _POSITIONS[model.position_embedding_type],
        "rope_base": model.rotary_base,
        "rope_scaling": model.rotary_scaling_factor if is_yarn else None,
        "rope_original_length": model.original_max_position_embeddings or 4096,
        "attention_dropout": model.attention_dropout,
        "add_qkv_bias": model.add_qkv_bias,
        "sliding_window": model.window_size,
        "full_attention_interval": model.window_attn_skip_freq,
        "attention_sinks": model.softmax_type == "learnable",
        "latent": latent,
    }


def _dense(model: ModelSection) -> dict[str, Any]:
    return {"ffn_size": _ffn_size(model), "activation": _activation(model)}


def _ffn_size(model: ModelSection) -> int:
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def _activation(model: ModelSection) -> str:
    known = _GATED if model.gated_linear_unit else _PLAIN
    if model.activation_func not in known:
        raise ValueError(
            f"`activation_func` is {model.activation_func!r} and `gated_linear_unit` is {model.gated_linear_unit}; "
            f"gated there are {', '.join(_GATED)}, not gated {', '.join(_PLAIN)}"
        )
    return known[model.activation_func]


def _experts(model: ModelSection) -> dict[str, Any]:
    if model.num_moe_experts is None:
        raise ValueError("`kind` is 'moe', which needs `num_moe_experts`")
    freq = model.moe_layer_freq
    has_experts = [layer % freq == 0 for layer in range(model.num_layers)] if isinstance(freq, int) else list(freq)
    if len(has_experts) != model.num_layers:
        raise ValueError(
            f"`moe_layer_freq` has {counted(len(has_experts), 'entries')} for {counted(model.num_layers, 'layers')}"
        )
    factor = model.moe_expert_capacity_factor
    capacity = {} if factor is None else {"capacity_factor": factor}
    if factor is None:
        way = "grouped" if model.moe_grouped_gemm else "loop"
    else:
        way = "capacity" if model.moe_pad_expert_input_to_capacity else "drop"
    return {
        "ffn_size": _ffn_size(model) if model.moe_ffn_hidden_size is None else model.moe_ffn_hidden_size,
        "activation": _activation(model),
        "num_experts": model.num_moe_experts,
        "top_k": model.moe_router_topk,
        "experts": way,
        **capacity,
        "scores": model.moe_router_score_function,
        # A softmax after the choice is a softmax before it with the chosen weights divided by their sum.
        "normalize_weights": model.moe_router_score_function == "sigmoid" or not model.moe_router_pre_softmax,
        "weight_scale": model.moe_router_topk_scaling_factor or 1.0,
        "bias_rate": model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else 0.0,
        "shared_ffn_size": model.moe_shared_expert_intermediate_size or 0,
        "shared_gate": model.moe_shared_expert_gate,
        "dense_layers": tuple(layer for layer, has in enumerate(has_experts) if not has),
        "dense_ffn_size": _ffn_size(model),
        "num_expert_groups": model.moe_router_num_groups or 1,
        "top_groups": model.moe_router_group_topk or 1,
        "router_bias": model.moe_router_bias,
    }


def _state_space(model: ModelSection) -> dict[str, Any]:
    return {
        "state_size": model.mamba_state_dim,
        "head_size": model.mamba_head_dim,
        "num_groups": model.mamba_num_groups,
        "chunk_size": model.mamba_chunk_size,
    }


def _hybrid(model: ModelSection) -> HybridConfig:
    if model.hybrid_override_pattern is None:
        raise ValueError("`kind` is 'hybrid', which needs a `hybrid_override_pattern`")
    heads = model.mamba_num_heads
    return HybridConfig(
        **_shared(model),
        **_attention(model),
        **_dense(model),
        pattern=model.hybrid_override_pattern,
        state_size=model.mamba_state_dim,
        mamba_num_heads=2 * model.hidden_size // model.mamba_head_dim if heads is None else heads,
        mamba_head_size=model.mamba_head_dim,
        mamba_num_groups=model.mamba_num_groups,
        chunk_size=model.mamba_chunk_size,
    )


def _vision(model: ModelSection) -> VisionConfig:
    """A vision transformer as usual: LayerNorm, biases, GELU."""
    ffn = model.vision_ffn_hidden_size
    return VisionConfig(
        num_layers=model.vision_num_layers,
        hidden_size=model.vision_hidden_size,
        num_heads=model.vision_num_attention_heads,
        ffn_size=4 * model.vision_hidden_size if ffn is None else ffn,
        patch_size=model.vision_patch_size,
        num_position_embeddings=(model.vision_image_size // model.vision_patch_size) ** 2,
        spatial_merge_size=model.vision_spatial_merge_size,
        max_vision_cuda_graph_seq_length=model.max_vision_cuda_graph_seq_length,
        norm="layer",
        activation="gelu",
        add_bias_linear=True,
    )
