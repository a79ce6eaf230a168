"""What the loop does with each setting of a configuration: no setting is ignored in silence.

A field is read by the loop or by the models, or it stands in one of the tables here. A test walks all fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepgraph.config.container import ConfigContainer
from stepgraph.core.errors import InvalidArgument

NOT_CARRIED_OUT = (
    "rerun_state_machine.check_for_spiky_loss",
    "rerun_state_machine.spiky_loss_factor",
    "ddp.use_distributed_optimizer",
    "ddp.grad_reduce_in_fp32",
    "ddp.bucket_size",
    "train.rampup_batch_size",
    "dataset.num_workers",
    "scheduler.start_weight_decay",
    "scheduler.end_weight_decay",
    "scheduler.weight_decay_incr_style",
    "model.variable_seq_lengths",
    "model.cpu_offloading",
    "model.cpu_offloading_num_layers",
    "model.sequence_parallel",
    "model.microbatch_group_size_per_vp_stage",
    "comm_overlap.tp_comm_overlap",
    "comm_overlap.overlap_p2p_comm",
    "comm_overlap.batch_p2p_comm",
    "comm_overlap.overlap_moe_expert_parallel_comm",
    "mixed_precision.loss_scale",
    "rng.inference_rng_tracker",
    "logger.log_throughput",
    "logger.log_memory",
)
"""Settings that are refused unless they have their default."""

REFUSED_BY_A_RULE = (
    "model.tensor_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "model.expert_tensor_parallel_size",
    "ddp.use_torch_fsdp2",
)
"""Settings that `ConfigContainer.validate(run=True)` refuses."""

WITHOUT_EFFECT = {
    "model.moe_token_dispatcher_type": "tokens do not leave their rank, so that nothing is dispatched",
    "model.overlap_moe_expert_parallel_comm": "validate makes it equal to comm_overlap's, which is refused",
    "comm_overlap.delay_wgrad_compute": "validate makes it equal to model.delay_wgrad_compute, which is read",
    "dataset.pad_cu_seqlens": "the metadata of packed sequences always has a fixed length",
    "mixed_precision.fp8_recipe": "FP8 is refused",
    "mixed_precision.grad_reduce_in_fp32": "gradients are summed in the type of the parameters",
}
"""Settings that change nothing in a run, and why."""


def _has_other_precision(cfg: Any) -> bool:
    precision = cfg.mixed_precision
    return precision.bf16 and precision.params_dtype != "bf16" and not precision.autocast_enabled


def _can_gather(cfg: Any) -> bool:
    """Return whether hooks before each forward can run: not inside the graph of an iteration, or of a method."""
    model = cfg.model
    methods = {"moe_router", "moe_preprocess"} & set(model.cuda_graph_scope) if model.cuda_graph_impl == "local" else ()
    is_possible = not model.captures_iteration and not methods and cfg.optimizer.optimizer == "adam"
    return is_possible and model.pipeline_model_parallel_size == 1 and cfg.peft.scheme is None


SOMETIMES: dict[str, Callable[[Any], bool]] = {
    "ddp.overlap_param_gather": lambda cfg: cfg.ddp.overlap_param_gather and not _can_gather(cfg),
    "peft.dropout_position": lambda cfg: cfg.peft.scheme is not None and cfg.peft.dropout_position != "pre",
    "dataset.pad_to_max_length": lambda cfg: not (cfg.dataset.pad_to_max_length or cfg.dataset.packed_sequence),
    "dataset.packed_sequence without examples": lambda cfg: cfg.dataset.packed_sequence and cfg.dataset.kind != "sft",
    "model.moe_router_load_balancing_type": lambda cfg: (
        cfg.model.moe_router_load_balancing_type != "aux_loss" and cfg.model.moe_aux_loss_coeff != 0
    ),
    "model.kind=vision_language": lambda cfg: cfg.model.kind == "vision_language",
    "model.delay_wgrad_compute in a pipeline": lambda cfg: (
        cfg.model.delay_wgrad_compute and cfg.model.pipeline_model_parallel_size > 1
    ),
    "model.delay_wgrad_compute with LoRA": lambda cfg: cfg.model.delay_wgrad_compute and cfg.peft.scheme is not None,
    "model.virtual_pipeline_model_parallel_size without a pipeline": lambda cfg: (
        (cfg.model.virtual_pipeline_model_parallel_size or 1) > 1 and cfg.model.pipeline_model_parallel_size == 1
    ),
    "mixed_precision.bf16 without params_dtype": _has_other_precision,
}
"""Settings that are refused together with others."""

_REASONS = {
    "dataset.packed_sequence without examples": "Only pairs of prompt and answer (dataset.kind=sft) are "
    "packed; text and tokens fill every sequence already.",
    "model.kind=vision_language": "Its batches have images beside tokens, and the loop has no such data yet.",
    "model.delay_wgrad_compute in a pipeline": "torch's schedules run the whole backward of a microbatch at once, "
    "and the loop has no moment for what it left.",
    "model.delay_wgrad_compute with LoRA": "LoRA freezes the weights whose gradients could be delayed; those of its "
    "own small matrices are computed in the backward.",
}
"""Reasons of single refusals, beside the one of all."""
_FIXES = {
    "mixed_precision": 'leave it at its default; for number formats, cfg.mixed_precision = "bf16_mixed".',
    "dataset.packed_sequence": "dataset.packed_sequence=false, or --task sft.",
    "model.delay_wgrad_compute": "model.delay_wgrad_compute=false.",
    "model.kind=": "take a recipe of text, such as qwen3_30b_a3b, or train the model in your own loop with "
    "stepgraph.graph_modules or stepgraph.capture: docs/models.md.",
}
"""Fixes of settings that begin so."""


def refuse_untrained(cfg: Any) -> None:
    """Refuse settings that the loop does not carry out, all at once, rather than ignore them."""
    default = ConfigContainer()
    found = [name for name in NOT_CARRIED_OUT if _value(cfg, name) != _value(default, name)]
    found += [name for name, is_refused in SOMETIMES.items() if is_refused(cfg)]
    if found:
        reasons = [_REASONS[name] for name in found if name in _REASONS]
        fixes = [fix for start, fix in _FIXES.items() if any(name.startswith(start) for name in found)]
        raise InvalidArgument(
            f"the training loop does not carry out {', '.join(found)}",
            rule="not-trained",
            why=" ".join(["a setting that is ignored would make a run look like one that it is not.", *reasons]),
            fix=" ".join(fixes) or "leave it at its default.",
        )


def _value(cfg: Any, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(cfg, section), field)
