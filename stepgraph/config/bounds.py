"""The range of each numeric setting, in one table.

A type says that `optimizer.adam_beta1` is a number; torch takes only those from 0 to less than 1, and no integer of
more than 64 bits. What torch would refuse in the middle of a run is refused when the configuration is validated. Every
numeric field stands here, which a test checks. Items of a list have a row of their own, `train.rampup_batch_size[]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_LARGEST_INT, _LARGEST_FLOAT = 2**31 - 1, 1e18


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and the largest value of a setting, which belong to the range unless they are said to be open."""

    least: float
    most: float
    is_open_below: bool = False
    is_open_above: bool = False

    def hold(self, value: float) -> bool:
        """True if a value is in the range."""
        above = self.least < value if self.is_open_below else self.least <= value
        return above and (value < self.most if self.is_open_above else value <= self.most)

    def __str__(self) -> str:
        low = f"more than {self.least:g}" if self.is_open_below else f"at least {self.least}"
        if self.most in (_LARGEST_INT, _LARGEST_FLOAT):
            return f"{low}, and at most {self.most}"
        low = low if self.is_open_below else f"from {self.least}"
        return f"{low} to {'less than ' if self.is_open_above else ''}{self.most}"


SIZE, COUNT = Bounds(1, _LARGEST_INT), Bounds(0, _LARGEST_INT)
SHARE, PROBABILITY = Bounds(0, 1), Bounds(0, 1, is_open_above=True)
POSITIVE, NOT_NEGATIVE = Bounds(0, _LARGEST_FLOAT, is_open_below=True), Bounds(0, _LARGEST_FLOAT)
FACTOR = Bounds(-_LARGEST_FLOAT, _LARGEST_FLOAT)
SEED = Bounds(-(2**32), 2**32)
"""Data multiply a seed by a million, and torch's generators take 64 bits."""
_YEAR = 366 * 24 * 60

_TABLE = (
    (SIZE, "model", "cuda_graph_max_runners num_layers hidden_size ffn_hidden_size vocab_size seq_length"),
    (SIZE, "model", "make_vocab_size_divisible_by num_attention_heads num_query_groups kv_channels"),
    (SIZE, "model", "original_max_position_embeddings window_attn_skip_freq moe_layer_freq recompute_num_layers"),
    (SIZE, "model", "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"),
    (SIZE, "model", "num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size"),
    (SIZE, "model", "moe_router_topk moe_router_num_groups moe_router_group_topk"),
    (SIZE, "model", "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_chunk_size"),
    (SIZE, "model", "vision_num_layers vision_hidden_size vision_num_attention_heads vision_ffn_hidden_size"),
    (SIZE, "model", "vision_image_size vision_patch_size vision_spatial_merge_size max_vision_cuda_graph_seq_length"),
    (SIZE, "model", "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size"),
    (SIZE, "model", "microbatch_group_size_per_vp_stage context_parallel_size expert_model_parallel_size"),
    (SIZE, "model", "expert_tensor_parallel_size"),
    (COUNT, "model", "cuda_graph_warmup_steps cpu_offloading_num_layers window_size image_token_id"),
    (SHARE, "model", "moe_layer_freq[] rotary_percent"),
    (PROBABILITY, "model", "hidden_dropout attention_dropout"),
    (POSITIVE, "model", "rotary_base rotary_scaling_factor moe_expert_capacity_factor"),
    (NOT_NEGATIVE, "model", "init_method_std layernorm_epsilon"),
    (FACTOR, "model", "moe_router_topk_scaling_factor moe_router_bias_update_rate moe_aux_loss_coeff"),
    (SEED, "rng", "seed"),
    (SIZE, "ddp", "bucket_size"),
    (NOT_NEGATIVE, "rerun_state_machine", "spiky_loss_factor"),
    (PROBABILITY, "optimizer", "adam_beta1 adam_beta2"),
    (NOT_NEGATIVE, "optimizer", "lr min_lr weight_decay adam_eps sgd_momentum clip_grad"),
    (SHARE, "scheduler", "lr_warmup_fraction"),
    (COUNT, "scheduler", "lr_warmup_iters lr_decay_iters"),
    (NOT_NEGATIVE, "scheduler", "lr_warmup_init start_weight_decay end_weight_decay"),
    (SIZE, "train", "train_iters global_batch_size micro_batch_size eval_interval exit_interval"),
    (COUNT, "train", "rampup_batch_size[] eval_iters exit_duration_in_mins manual_gc_interval iterations_to_skip[]"),
    (SIZE, "dataset", "seq_length packed_sequence_size max_packed_examples"),
    (COUNT, "dataset", "num_workers"),
    (SEED, "dataset", "random_seed"),
    (SIZE, "checkpoint", "save_interval"),
    (Bounds(-1, _LARGEST_INT), "checkpoint", "most_recent_k"),
    (COUNT, "logger", "log_interval"),
    (Bounds(1, _YEAR), "dist", "distributed_timeout_minutes"),
    (COUNT, "dist", "local_rank"),
    (SIZE, "peft", "dim"),
    (COUNT, "peft", "alpha"),
    (PROBABILITY, "peft", "dropout"),
    (POSITIVE, "mixed_precision", "loss_scale"),
)
BOUNDS: Mapping[str, Bounds] = MappingProxyType(
    {f"{section}.{field}": bounds for bounds, section, fields in _TABLE for field in fields.split()}
)
"""The range of each numeric setting, by `section.field`."""


def out_of_bounds(config: Any) -> Iterator[str]:
    """A line for each number of a configuration that is not in its range."""
    for name, bounds in BOUNDS.items():
        section, _, field = name.removesuffix("[]").partition(".")
        value = getattr(getattr(config, section), field)
        values = value if isinstance(value, (list, tuple)) else [value]
        if name.endswith("[]") != (values is value):
            continue
        yield from (
            f"{section}.{field}={each}: {bounds}" for each in values if each is not None and not bounds.hold(each)
        )
