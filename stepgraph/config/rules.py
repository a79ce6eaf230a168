"""The rules of a configuration, as pure functions of the configuration and the environment.

A rule returns one line for each way in which it is broken, and nothing if it is kept. Its texts (what, why, fix) are
the catalogue's entry with the same id. Rules of the kind `config` say what can be captured at all, and are applied by
`validate()`. Rules of the kind `run` say what this program and this machine can run, and are applied by
`validate(run=True)`, which training and benchmarks call.

Rules see a configuration after `finalised` has filled in what depends on other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stepgraph.config.base import ConfigSections
from stepgraph.config.bounds import out_of_bounds
from stepgraph.config.environment import Environment
from stepgraph.config.model import ModelSection
from stepgraph.core import catalogue
from stepgraph.core.errors import Violation

Rule = Callable[[ConfigSections, Environment], Iterable[str]]
NCCL_DDP_WARMUP = 11
"""DDP arranges its buckets in its first ten iterations."""


def finalised(config: ConfigSections, environment: Environment) -> ConfigSections:
    """A copy in which settings that depend on others have their values."""
    found = config.copy()
    model, rng = found.model, found.rng
    if model.cuda_graph_impl == "none":
        model.cuda_graph_scope = []
    else:
        model.use_te_rng_tracker = True if model.use_te_rng_tracker is None else model.use_te_rng_tracker
        rng.te_rng_tracker = True if rng.te_rng_tracker is None else rng.te_rng_tracker
    if model.kind == "gpt" and model.num_moe_experts is not None:
        model.kind = "moe"
    if found.rerun_state_machine.check_for_nan_in_loss is None:
        found.rerun_state_machine.check_for_nan_in_loss = "device" if model.captures_iteration else True
    if found.ddp.check_for_nan_in_grad is None:
        found.ddp.check_for_nan_in_grad = "device" if model.captures_iteration else False
    for name in ("delay_wgrad_compute", "overlap_moe_expert_parallel_comm"):
        is_on = getattr(found.comm_overlap, name) or getattr(model, name)
        setattr(found.comm_overlap, name, is_on)
        setattr(model, name, is_on)
    if found.dist.distributed_backend is None:
        found.dist.distributed_backend = "gloo" if environment.compute_capability is None else "nccl"
    return found


def broken_rules(
    config: ConfigSections, environment: Environment, kinds: Iterable[str] = ("config",)
) -> list[Violation]:
    """All rules of these kinds that a finalised configuration breaks."""
    applied = tuple(kinds)
    found = []
    for name, rule in RULES.items():
        entry = catalogue.entry(name)
        if entry.kind in applied and (lines := list(rule(config, environment))):
            theirs = [f'Megatron: "{text}"' for text in entry.texts]
            found.append(Violation(name, entry.what, (*lines, *theirs), entry.why, entry.fix))
    return found


# -- what a configuration captures


def captures(model: ModelSection, word: str) -> bool:
    """True if graphs of layers hold this part. Without a scope they hold whole layers."""
    return _captures_layers(model) and (word in model.cuda_graph_scope or not model.cuda_graph_scope)


def _captures_layers(model: ModelSection) -> bool:
    return model.cuda_graph_impl != "none" and not model.captures_iteration


def _names(model: ModelSection, *words: str) -> list[str]:
    """Those of these words that the scope has."""
    return [word for word in words if model.cuda_graph_impl != "none" and word in model.cuda_graph_scope]


def _shown(config: ConfigSections, *names: str) -> str:
    """Settings with their values, as a user types them."""
    found = []
    for name in names:
        section, _, field = name.partition(".")
        value: Any = getattr(getattr(config, section), field)
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        found.append(f"{name}={text.lower() if isinstance(value, bool) or value is None else text}")
    return ", ".join(found)


def _has_experts(model: ModelSection) -> bool:
    return model.num_moe_experts is not None


def _layer_kinds(model: ModelSection) -> set[str]:
    """The words that stand for something in this model."""
    if model.kind == "mamba":
        return {"mamba"}
    experts = {"moe", "moe_router", "moe_preprocess"} if _has_experts(model) else set()
    if model.kind == "hybrid":
        letters = {"M": {"mamba"}, "*": {"attn"}, "-": {"mlp"}, "E": experts}
        pattern = model.hybrid_override_pattern
        found = [words for letter, words in letters.items() if pattern is None or letter in pattern]
        return {word for words in found for word in words}
    every = model.moe_layer_freq
    is_dense = not experts or (every != 1 if isinstance(every, int) else 0 in every)
    return {"attn", *experts, *(["mlp"] if is_dense else [])}


# -- values


def config_value(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Numbers are in their range, and fit each other."""
    yield from out_of_bounds(config)
    model = config.model
    groups, heads = model.num_query_groups, model.num_attention_heads
    if groups is not None and groups > 0 and heads % groups:
        yield f"{_shown(config, 'model.num_attention_heads', 'model.num_query_groups')}: a multiple of the second"
    has_own_width = model.kv_channels is not None or model.multi_latent_attention
    if "attn" in _layer_kinds(model) and not has_own_width and heads > 0 and model.hidden_size % heads:
        yield f"{_shown(config, 'model.hidden_size', 'model.num_attention_heads')}: a multiple of the second"
    experts = model.num_moe_experts
    if experts is not None and model.moe_router_topk > experts:
        yield f"{_shown(config, 'model.moe_router_topk', 'model.num_moe_experts')}: a token chooses an expert once"
    if model.kind == "moe" and experts is None:
        yield "model.kind=moe, model.num_moe_experts=none: a number of experts"
    data_length = config.dataset.seq_length
    if data_length is not None and data_length != model.seq_length:
        yield f"{_shown(config, 'dataset.seq_length', 'model.seq_length')}: the same length"
    if config.mixed_precision.bf16 and config.mixed_precision.fp16:
        yield "mixed_precision.bf16=true, mixed_precision.fp16=true: one of them"


# -- random numbers, full iteration


def rng_tracker(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Graphs need random states that they can replay."""
    if config.model.cuda_graph_impl == "none":
        return
    for name, is_on in (
        ("model.use_te_rng_tracker", config.model.use_te_rng_tracker),
        ("rng.te_rng_tracker", config.rng.te_rng_tracker),
    ):
        if is_on is False:
            yield f"{_shown(config, 'model.cuda_graph_impl')}, {name}=false"


def full_iteration_impl(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Only `local` captures the full iteration."""
    if config.model.captures_iteration and config.model.cuda_graph_impl == "transformer_engine":
        yield _shown(config, "model.cuda_graph_impl", "model.cuda_graph_scope")


def full_iteration_alone(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """The graph of an iteration holds all layers."""
    if config.model.captures_iteration and len(config.model.cuda_graph_scope) > 1:
        yield _shown(config, "model.cuda_graph_scope")


def nan_check_in_graph(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """A check on the host has no place in the graph of an iteration; one on the device has."""
    if config.model.captures_iteration:
        if config.rerun_state_machine.check_for_nan_in_loss is True:
            yield _shown(config, "rerun_state_machine.check_for_nan_in_loss")
        if config.ddp.check_for_nan_in_grad is True:
            yield _shown(config, "ddp.check_for_nan_in_grad")


# -- scopes of layers


def moe_and_router(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """No part can be in two graphs."""
    if len(_names(config.model, "moe", "moe_router")) == 2:
        yield _shown(config, "model.cuda_graph_scope")


def preprocess_needs_router(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """The preprocessing goes on from the router's graph."""
    if _names(config.model, "moe_router", "moe_preprocess") == ["moe_preprocess"]:
        yield _shown(config, "model.cuda_graph_scope")


def moe_scope_without_experts(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """A scope of experts needs experts."""
    if _names(config.model, "moe", "moe_router", "moe_preprocess") and "moe" not in _layer_kinds(config.model):
        yield _shown(config, "model.cuda_graph_scope", "model.num_moe_experts")


def mlp_scope_without_dense(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """`mlp` stands for dense layers."""
    if _names(config.model, "mlp") and "mlp" not in _layer_kinds(config.model):
        yield _shown(config, "model.cuda_graph_scope", "model.kind", "model.num_moe_experts", "model.moe_layer_freq")


def scope_without_layers(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """`attn` needs attention, `mamba` needs Mamba layers."""
    for word in _names(config.model, "attn", "mamba"):
        if word not in _layer_kinds(config.model):
            yield f"{_shown(config, 'model.cuda_graph_scope', 'model.kind')}: no {word}"


def dropless_moe(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """A graph of experts needs a fixed number of tokens for each, or a dispatch without host reads."""
    model = config.model
    is_padded = model.moe_expert_capacity_factor is not None and model.moe_pad_expert_input_to_capacity
    is_static = is_padded or model.moe_token_dispatcher_type == "sync_free"
    if captures(model, "moe") and _has_experts(model) and not is_static:
        settings = ("moe_token_dispatcher_type", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")
        yield _shown(config, "model.cuda_graph_scope", *(f"model.{name}" for name in settings))


# -- shapes


def static_shapes(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Graphs replay one shape."""
    if config.model.cuda_graph_impl == "none":
        return
    if config.model.variable_seq_lengths:
        yield _shown(config, "model.variable_seq_lengths")
    for name, value in (
        ("model.seq_length", config.model.seq_length),
        ("train.micro_batch_size", config.train.micro_batch_size),
    ):
        if value < 1:
            yield _shown(config, name)
    if not config.dataset.pad_to_max_length and not config.dataset.packed_sequence:
        yield _shown(config, "dataset.pad_to_max_length")


def packed_sequence(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Graphs captured ahead of time take tensors of fixed shape only."""
    is_ahead = config.model.cuda_graph_impl == "transformer_engine"
    if is_ahead and config.dataset.packed_sequence and not config.dataset.pad_cu_seqlens:
        yield _shown(config, "dataset.packed_sequence", "dataset.pad_cu_seqlens", "model.cuda_graph_impl")


def batch_size(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Every process runs the same number of whole microbatches."""
    micro, ranks = config.train.micro_batch_size, data_parallel_size(config.model, environment)
    if micro > 0 and config.train.global_batch_size % (micro * ranks):
        sizes = _shown(config, "train.global_batch_size", "train.micro_batch_size")
        yield f"{sizes}, {ranks} data-parallel process{'es' if ranks > 1 else ''}"


def data_parallel_size(model: ModelSection, environment: Environment) -> int:
    """The number of processes that have the same part of the model and other data."""
    others = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    return max(1, environment.world_size // max(1, others))


# -- memory and recomputation


def expandable_segments(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """NCCL registers the memory of graphs by address: `local` below capability 10.0, `transformer_engine` always."""
    impl, capability = config.model.cuda_graph_impl, environment.compute_capability
    is_old = capability is not None and capability < (10, 0)
    applies = impl == "transformer_engine" or (impl == "local" and is_old)
    if applies and environment.has_expandable_segments and environment.variables.get("NCCL_GRAPH_REGISTER") != "0":
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER")
        yield ", ".join(f"{name}={environment.variables.get(name, '')}" for name in names)


def cpu_offloading(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """A replay has no host."""
    if config.model.cuda_graph_impl != "none" and config.model.cpu_offloading:
        yield _shown(config, "model.cuda_graph_impl", "model.cpu_offloading")


def full_recompute(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Only the graph of the full iteration holds the second forward of whole layers."""
    if _captures_layers(config.model) and config.model.recompute_granularity == "full":
        yield _shown(config, "model.cuda_graph_impl", "model.cuda_graph_scope", "model.recompute_granularity")


def moe_recompute(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """A captured router has one forward."""
    model = config.model
    is_ahead = model.cuda_graph_impl == "transformer_engine"
    is_recomputed = model.recompute_granularity == "selective" and "moe" in model.recompute_modules
    if is_ahead and is_recomputed and _names(model, "moe_router"):
        yield _shown(config, "model.cuda_graph_scope", "model.recompute_modules")


# -- delayed weight gradients


def _delays_captured(config: ConfigSections) -> bool:
    model = config.model
    has_router = captures(model, "moe_router") and _has_experts(model)
    return config.comm_overlap.delay_wgrad_compute and (captures(model, "attn") or has_router)


def delayed_wgrad_te_version(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Transformer Engine captures delayed weight gradients from 2.12 on."""
    if _delays_captured(config) and environment.te_is_older_than(2, 12):
        yield f"{_shown(config, 'comm_overlap.delay_wgrad_compute')}, Transformer Engine {environment.te_version}"


def delayed_wgrad_fusion(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """A delayed weight gradient is added to main_grad in its own graph."""
    if _delays_captured(config) and not config.model.gradient_accumulation_fusion:
        yield _shown(config, "comm_overlap.delay_wgrad_compute", "model.gradient_accumulation_fusion")


def delayed_wgrad_bias(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """The graph of attention's backward would end without the gradient of its biases."""
    if _delays_captured(config) and captures(config.model, "attn"):
        for name in ("add_bias_linear", "add_qkv_bias"):
            if getattr(config.model, name):
                yield _shown(config, "comm_overlap.delay_wgrad_compute", f"model.{name}")


# -- several processes


def nccl_ddp_warmup(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """DDP inside the graph of an iteration is captured after it has arranged its buckets."""
    model = config.model
    is_inside = model.captures_iteration and data_parallel_size(model, environment) > 1
    if is_inside and config.dist.distributed_backend == "nccl" and model.cuda_graph_warmup_steps < NCCL_DDP_WARMUP:
        yield f"{_shown(config, 'model.cuda_graph_warmup_steps')}, {environment.world_size} processes"


# -- what can be run


def not_run_here(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Tensor, expert and context parallelism and FSDP2 are checked, not run."""
    for name in ("tensor_model_parallel_size", "expert_model_parallel_size", "context_parallel_size"):
        if getattr(config.model, name) != 1:
            yield _shown(config, f"model.{name}")
    if (config.model.expert_tensor_parallel_size or 1) != 1:
        yield _shown(config, "model.expert_tensor_parallel_size")
    if config.ddp.use_torch_fsdp2:
        yield _shown(config, "ddp.use_torch_fsdp2")


def gpu_missing(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """A run that asks for a GPU does not go on without one."""
    if environment.device == "cuda" and environment.compute_capability is None:
        yield "--device cuda, and no GPU was found"


def world_size(config: ConfigSections, environment: Environment) -> Iterator[str]:
    """Every process belongs to one pipeline."""
    stages = config.model.pipeline_model_parallel_size
    if stages > 0 and environment.world_size % stages:
        yield f"{_shown(config, 'model.pipeline_model_parallel_size')}, {environment.world_size} processes"


RULES: dict[str, Rule] = {
    "config-value": config_value,
    "rng-tracker": rng_tracker,
    "full-iteration-impl": full_iteration_impl,
    "full-iteration-alone": full_iteration_alone,
    "nan-check-in-graph": nan_check_in_graph,
    "moe-and-router": moe_and_router,
    "preprocess-needs-router": preprocess_needs_router,
    "moe-scope-without-experts": moe_scope_without_experts,
    "mlp-scope-without-dense": mlp_scope_without_dense,
    "scope-without-layers": scope_without_layers,
    "dropless-moe": dropless_moe,
    "static-shapes": static_shapes,
    "packed-sequence": packed_sequence,
    "batch-size": batch_size,
    "expandable-segments": expandable_segments,
    "cpu-offloading": cpu_offloading,
    "full-recompute": full_recompute,
    "moe-recompute": moe_recompute,
    "delayed-wgrad-te-version": delayed_wgrad_te_version,
    "delayed-wgrad-fusion": delayed_wgrad_fusion,
    "delayed-wgrad-bias": delayed_wgrad_bias,
    "nccl-ddp-warmup": nccl_ddp_warmup,
    "not-run-here": not_run_here,
    "gpu-missing": gpu_missing,
    "world-size": world_size,
}
"""All rules by their id in the catalogue, in the order in which they are reported."""
