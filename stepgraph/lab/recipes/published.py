"""The recipes: configurations of published models, one function each. Imports no torch.

Shapes are those of the models' own configuration files; the number of parameters follows from them and is tested. Each
recipe says which parts of the model are captured, and why these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepgraph.config.container import ConfigContainer
from stepgraph.config.scope import CudaGraphScope
from stepgraph.config.sections import MixedPrecisionSection
from stepgraph.core.errors import InvalidArgument, nearest

TASKS = ("pretrain", "sft", "lora")
_DENSE_REASON = (
    "attention launches many small kernels; the few large ones of the MLP keep the GPU busy, so its graphs would cost "
    "memory and win little"
)
_MOE_REASON = (
    "these parts have static shapes; how many tokens an expert gets changes at every step, so the experts stay eager"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe: its configuration, and what is said about it."""

    name: str
    make: Callable[[], ConfigContainer]
    parameters: int
    """The number of elements in the published weights; authors themselves state rounded totals."""
    source: str
    """The page that the shape is from."""
    reason: str
    """Why these parts of the model are captured."""
    task: str = "pretrain"
    built: int | None = None
    """The number of parameters of the model that is built here; None where it is the published one."""


def gpt2_small() -> ConfigContainer:
    """GPT-2 small: 124 million parameters, learned positions, LayerNorm, biases, one matrix for both ends."""
    cfg = _started("attn")
    model = cfg.model
    model.num_layers, model.hidden_size, model.num_attention_heads = 12, 768, 12
    model.vocab_size, model.seq_length, model.ffn_hidden_size = 50257, 1024, 3072
    model.normalization, model.activation_func, model.gated_linear_unit = "LayerNorm", "gelu", False
    model.add_bias_linear, model.position_embedding_type = True, "learned_absolute"
    model.share_embeddings_and_output_weights = True
    cfg.optimizer.lr, cfg.optimizer.min_lr = 6e-4, 6e-5
    return cfg


def llama3_8b() -> ConfigContainer:
    """Llama 3 8B: dense, 32 layers, four query heads for each key and value head."""
    cfg = _llama3()
    model = cfg.model
    model.num_layers, model.hidden_size, model.ffn_hidden_size = 32, 4096, 14336
    model.num_attention_heads = 32
    return cfg


def llama3_70b() -> ConfigContainer:
    """Llama 3 70B: dense, 80 layers, eight query heads for each key and value head."""
    cfg = _llama3()
    model = cfg.model
    model.num_layers, model.hidden_size, model.ffn_hidden_size = 80, 8192, 28672
    model.num_attention_heads = 64
    cfg.optimizer.lr, cfg.optimizer.min_lr = 1.5e-4, 1.5e-5
    return cfg


def llama3_70b_sft() -> ConfigContainer:
    """Llama 3 70B on pairs of prompt and answer; the MLPs are captured."""
    cfg = for_task(llama3_70b(), "sft")
    cfg.model.cuda_graph_scope = [CudaGraphScope.mlp]
    return cfg


def qwen3_30b_a3b() -> ConfigContainer:
    """Qwen3 30B-A3B: 128 experts, of which a token chooses 8."""
    cfg = _started("attn", "moe_router", "moe_preprocess")
    _qwen3_moe(cfg, rotary_base=1_000_000.0)
    return cfg


def qwen3_vl() -> ConfigContainer:
    """Qwen3-VL 30B-A3B: the language model of Qwen3 30B-A3B with a vision encoder.

    The encoder merges neighbouring patches before its layers, where the published one merges behind them, at four
    depths; all other widths are the published ones.
    """
    cfg = _started("attn", "moe_router", "moe_preprocess")
    _qwen3_moe(cfg, rotary_base=5_000_000.0)
    model = cfg.model
    model.kind, model.image_token_id = "vision_language", 151655
    model.vision_num_layers, model.vision_hidden_size, model.vision_num_attention_heads = 27, 1152, 16
    model.vision_ffn_hidden_size, model.vision_patch_size, model.vision_image_size = 4304, 16, 768
    model.vision_spatial_merge_size = 2
    model.cuda_graph_impl = "none"
    return cfg


def gpt_oss_20b() -> ConfigContainer:
    """GPT-OSS 20B: 24 layers, 32 experts, sinks, windows of 128 in every other layer."""
    return _gpt_oss(num_layers=24, num_experts=32)


def gpt_oss_120b() -> ConfigContainer:
    """GPT-OSS 120B: 36 layers, 128 experts, else as the smaller one."""
    return _gpt_oss(num_layers=36, num_experts=128)


def deepseek_v3() -> ConfigContainer:
    """DeepSeek-V3: multi-head latent attention, three dense layers, then 256 experts and one for all tokens."""
    cfg = _started("attn", "moe_router", "moe_preprocess")
    model = cfg.model
    model.kind = "moe"
    model.num_layers, model.hidden_size, model.vocab_size, model.seq_length = 61, 7168, 129280, 4096
    model.ffn_hidden_size, model.moe_ffn_hidden_size, model.moe_shared_expert_intermediate_size = 18432, 2048, 2048
    model.num_attention_heads, model.layernorm_epsilon = 128, 1e-6
    model.multi_latent_attention, model.q_lora_rank, model.kv_lora_rank = True, 1536, 512
    model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim = 128, 64, 128
    model.num_moe_experts, model.moe_router_topk, model.moe_layer_freq = 256, 8, [0] * 3 + [1] * 58
    model.moe_router_score_function, model.moe_router_topk_scaling_factor = "sigmoid", 2.5
    model.moe_router_enable_expert_bias, model.moe_router_bias_update_rate = True, 1e-3
    model.moe_router_num_groups, model.moe_router_group_topk = 8, 4
    model.moe_aux_loss_coeff = 1e-4
    model.init_method_std = 0.006
    cfg.optimizer.lr, cfg.optimizer.min_lr = 2.2e-4, 2.2e-5
    return cfg


def nemotron_h() -> ConfigContainer:
    """Nemotron-H 8B: 24 Mamba-2 layers, 24 MLPs and 4 attention layers."""
    cfg = _started("mamba", "attn")
    model = cfg.model
    model.kind, model.hybrid_override_pattern = "hybrid", "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
    model.num_layers, model.hidden_size, model.ffn_hidden_size = 52, 4096, 21504
    model.vocab_size, model.seq_length = 131072, 8192
    model.num_attention_heads, model.num_query_groups, model.kv_channels = 32, 8, 128
    model.position_embedding_type, model.activation_func, model.gated_linear_unit = "none", "squared_relu", False
    model.mamba_state_dim, model.mamba_head_dim, model.mamba_num_heads = 128, 64, 128
    model.mamba_num_groups, model.mamba_chunk_size = 8, 128
    return cfg


def _started(*scope: str) -> ConfigContainer:
    """What all recipes have: bfloat16, AdamW, and graphs of some parts, captured ahead of time."""
    cfg = ConfigContainer()
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_scope = [CudaGraphScope(word) for word in scope]
    cfg.mixed_precision = MixedPrecisionSection.named("bf16_mixed")
    cfg.train.train_iters, cfg.train.micro_batch_size, cfg.train.global_batch_size = 20, 1, 8
    cfg.optimizer.lr, cfg.optimizer.min_lr = 3e-4, 3e-5
    cfg.optimizer.adam_beta2, cfg.optimizer.weight_decay = 0.95, 0.1
    cfg.scheduler.lr_warmup_iters = 2
    return cfg


def _llama3() -> ConfigContainer:
    cfg = _started("attn")
    model = cfg.model
    model.vocab_size, model.seq_length, model.rotary_base = 128256, 8192, 500_000.0
    model.num_query_groups, model.kv_channels = 8, 128
    return cfg


def _qwen3_moe(cfg: ConfigContainer, rotary_base: float) -> None:
    model = cfg.model
    model.kind = "moe"
    model.num_layers, model.hidden_size, model.vocab_size, model.seq_length = 48, 2048, 151936, 4096
    model.num_attention_heads, model.num_query_groups, model.kv_channels = 32, 4, 128
    model.ffn_hidden_size, model.moe_ffn_hidden_size = 6144, 768
    model.qk_layernorm, model.rotary_base, model.layernorm_epsilon = True, rotary_base, 1e-6
    model.num_moe_experts, model.moe_router_topk, model.moe_aux_loss_coeff = 128, 8, 1e-3


def _gpt_oss(num_layers: int, num_experts: int) -> ConfigContainer:
    cfg = _started("attn", "moe_router", "moe_preprocess")
    model = cfg.model
    model.kind, model.num_layers, model.num_moe_experts = "moe", num_layers, num_experts
    model.hidden_size, model.vocab_size, model.seq_length = 2880, 201088, 4096
    model.num_attention_heads, model.num_query_groups, model.kv_channels = 64, 8, 64
    model.ffn_hidden_size, model.moe_ffn_hidden_size, model.moe_router_topk = 2880, 2880, 4
    model.activation_func, model.add_bias_linear, model.moe_router_bias = "clamped_swiglu", True, True
    model.softmax_type, model.window_size, model.window_attn_skip_freq = "learnable", 128, 2
    model.position_embedding_type, model.rotary_base = "yarn", 150_000.0
    model.rotary_scaling_factor, model.original_max_position_embeddings = 32.0, 4096
    model.moe_aux_loss_coeff = 1e-3
    return cfg


def for_task(cfg: ConfigContainer, task: str) -> ConfigContainer:
    """A copy of a configuration for another task: fine-tuning on pairs, of all weights or of adapters."""
    if task not in TASKS:
        raise InvalidArgument(
            f"{task!r} is not a task",
            rule="recipe",
            why=f"the tasks are {', '.join(TASKS)}.",
            fix=f"did you mean {nearest(task, TASKS) or TASKS[0]!r}?",
        )
    cfg = cfg.copy()
    if task == "pretrain":
        return cfg
    cfg.dataset.kind = "sft"
    cfg.optimizer.lr, cfg.optimizer.min_lr = (5e-6, 0.0) if task == "sft" else (1e-4, 0.0)
    if task == "lora":
        cfg.peft.scheme = "lora"
    return cfg


_HF = "https://huggingface.co/"
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe("gpt2_small", gpt2_small, 124_439_808, f"{_HF}openai-community/gpt2", _DENSE_REASON),
            Recipe("llama3_8b", llama3_8b, 8_030_261_248, f"{_HF}meta-llama/Meta-Llama-3-8B", _DENSE_REASON),
            Recipe("llama3_70b", llama3_70b, 70_553_706_496, f"{_HF}meta-llama/Meta-Llama-3-70B", _DENSE_REASON),
            Recipe(
                "llama3_70b_sft",
                llama3_70b_sft,
                70_553_706_496,
                f"{_HF}meta-llama/Meta-Llama-3-70B",
                "sequences of pairs differ in length and are packed, which attention must know at every step; the MLP "
                "sees one static shape whatever they hold",
                "sft",
            ),
            Recipe("qwen3_30b_a3b", qwen3_30b_a3b, 30_532_122_624, f"{_HF}Qwen/Qwen3-30B-A3B", _MOE_REASON),
            Recipe("gpt_oss_20b", gpt_oss_20b, 20_914_757_184, f"{_HF}openai/gpt-oss-20b", _MOE_REASON),
            Recipe(
                "gpt_oss_120b",
                gpt_oss_120b,
                116_829_156_672,
                f"{_HF}openai/gpt-oss-120b",
                f"{_MOE_REASON}; memory-gated: the weights leave little room, so capture is skipped unless its "
                "predicted bytes are free",
            ),
            Recipe(
                "deepseek_v3",
                deepseek_v3,
                671_026_419_200,
                f"{_HF}deepseek-ai/DeepSeek-V3",
                _MOE_REASON,
                built=671_026_404_352,
            ),
            Recipe(
                "qwen3_vl",
                qwen3_vl,
                31_070_754_032,
                f"{_HF}Qwen/Qwen3-VL-30B-A3B-Instruct",
                f"{_MOE_REASON}; nothing is captured until the data has real images: on padding alone the figures "
                "would mean nothing",
                built=30_954_802_544,
            ),
            Recipe(
                "nemotron_h",
                nemotron_h,
                8_100_852_736,
                f"{_HF}nvidia/Nemotron-H-8B-Base-8K",
                "a Mamba-2 layer is a long chain of small kernels, and attention is much the same; the MLPs are two "
                "large products that keep the GPU busy",
            ),
        )
    }
)
"""All recipes by name."""


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; dashes count as underscores."""
    spelled = name.replace("-", "_")
    if spelled not in RECIPES:
        near = nearest(spelled, RECIPES)
        raise InvalidArgument(
            f"there is no recipe {name!r}",
            rule="recipe",
            why=f"the recipes are {', '.join(RECIPES)}.",
            fix=f"did you mean {near!r}?" if near else "`stepgraph recipes` lists them.",
        )
    return RECIPES[spelled]


def recipe(name: str, task: str = "pretrain") -> ConfigContainer:
    """The configuration of a recipe, for a task.

    Example:
        >>> cfg = recipe("llama3_70b", task="sft")
    """
    spelled = name.replace("-", "_")
    own = find_recipe(f"{spelled}_{task}" if f"{spelled}_{task}" in RECIPES else spelled)
    return own.make() if own.task == task else for_task(own.make(), task)
