"""Each rule refuses what it is about and accepts the rest, on any machine: rules are functions of two records."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

import stepgraph
from stepgraph.config.environment import Environment
from stepgraph.config.overrides import CommandLine
from stepgraph.config.rules import RULES
from stepgraph.core import catalogue
from stepgraph.core.errors import ConfigError

TE, LOCAL = "model.cuda_graph_impl=transformer_engine", "model.cuda_graph_impl=local"
FULL = f"{LOCAL} model.cuda_graph_scope=full_iteration"
EXPERTS = "model.num_moe_experts=8"
DELAYED = "comm_overlap.delay_wgrad_compute=true"
FUSED = "model.gradient_accumulation_fusion=true"
HOPPER = Environment(compute_capability=(9, 0))
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def broken(text: str, environment: Environment = HOPPER, *, run: bool = False) -> list[str]:
    """The rules that overrides break."""
    config = stepgraph.ConfigContainer().override(text.split())
    try:
        frozen = config.validate(environment, run=run)
    except ConfigError as error:
        return [violation.rule for violation in error.violations]
    assert frozen.is_frozen
    return []


@pytest.mark.parametrize("impl", [TE, LOCAL])
@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ("", []),
        ("model.use_te_rng_tracker=true rng.te_rng_tracker=true", []),
        ("model.use_te_rng_tracker=false", ["rng-tracker"]),
        ("rng.te_rng_tracker=false", ["rng-tracker"]),
        ("model.use_te_rng_tracker=false rng.te_rng_tracker=false", ["rng-tracker"]),
    ],
)
def test_cuda_graph_needs_the_rng_tracker(impl: str, flags: str, rules: list[str]) -> None:
    assert broken(f"{impl} {flags}") == rules


def test_cuda_graph_rng_rule_has_the_text_of_megatron() -> None:
    config = stepgraph.ConfigContainer().override([LOCAL, "model.use_te_rng_tracker=false"])
    with pytest.raises(ConfigError, match="Transformer engine's RNG tracker is required for cudagraphs"):
        config.validate(HOPPER)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (FULL, []),
        (f"{LOCAL} model.cuda_graph_scope=full_iteration,attn", ["full-iteration-alone"]),
        (f"{TE} model.cuda_graph_scope=full_iteration", ["full-iteration-impl"]),
        (f"{TE} model.cuda_graph_scope=full_iteration,mlp", ["full-iteration-impl", "full-iteration-alone"]),
        ("model.cuda_graph_impl=none model.cuda_graph_scope=full_iteration,attn", []),
    ],
)
def test_cuda_graph_full_iteration_is_local_and_alone(text: str, rules: list[str]) -> None:
    assert broken(text) == rules


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ("", []),
        ("rerun_state_machine.check_for_nan_in_loss=false ddp.check_for_nan_in_grad=false", []),
        ("rerun_state_machine.check_for_nan_in_loss=device ddp.check_for_nan_in_grad=device", []),
        ("rerun_state_machine.check_for_nan_in_loss=true", ["nan-check-in-graph"]),
        ("ddp.check_for_nan_in_grad=true", ["nan-check-in-graph"]),
    ],
)
def test_cuda_graph_full_iteration_needs_nan_checks_off(flags: str, rules: list[str]) -> None:
    assert broken(f"{FULL} {flags}") == rules
    assert broken(f"{TE} model.cuda_graph_scope=attn {flags}") == []


@pytest.mark.parametrize(
    ("scope", "model", "rules"),
    [
        ("attn,moe_router,moe_preprocess", EXPERTS, []),
        ("moe", EXPERTS, []),
        ("moe,moe_router", EXPERTS, ["moe-and-router"]),
        ("moe_preprocess", EXPERTS, ["preprocess-needs-router"]),
        ("moe,moe_preprocess", EXPERTS, ["preprocess-needs-router"]),
        ("moe_router", "", ["moe-scope-without-experts"]),
        ("moe", "", ["moe-scope-without-experts"]),
        ("attn,mlp", "", []),
        ("mlp", EXPERTS, ["mlp-scope-without-dense"]),
        ("mlp", f"{EXPERTS} model.moe_layer_freq=2", []),
        ("mlp", f"{EXPERTS} model.moe_layer_freq=1,1,1", ["mlp-scope-without-dense"]),
        ("mlp,moe_router", f"{EXPERTS} model.moe_layer_freq=[0,1,1]", []),
        ("mamba", "", ["scope-without-layers"]),
        ("mamba", "model.kind=mamba", []),
        ("attn", "model.kind=mamba", ["scope-without-layers"]),
        ("mlp", "model.kind=mamba", ["mlp-scope-without-dense"]),
        ("mamba,attn,mlp", "model.kind=hybrid model.hybrid_override_pattern=M-M*-", []),
        ("mamba,attn", "model.kind=hybrid model.hybrid_override_pattern=MM-M", ["scope-without-layers"]),
        ("attn,mlp", "model.kind=vision_language", []),
    ],
)
def test_cuda_graph_scope_fits_the_layers_of_the_model(scope: str, model: str, rules: list[str]) -> None:
    for impl in (TE, LOCAL):
        assert broken(f"{impl} model.cuda_graph_scope={scope} {model}") == rules


@pytest.mark.parametrize("scope", ["moe", "attn,moe", ""])
@pytest.mark.parametrize(
    ("experts", "rules"),
    [
        ("", []),  # sync-free
        ("model.moe_token_dispatcher_type=alltoall", ["dropless-moe"]),
        ("model.moe_token_dispatcher_type=flex", ["dropless-moe"]),
        ("model.moe_token_dispatcher_type=alltoall model.moe_expert_capacity_factor=1.0", ["dropless-moe"]),
        (
            "model.moe_token_dispatcher_type=alltoall model.moe_expert_capacity_factor=1.0 "
            "model.moe_pad_expert_input_to_capacity=true",
            [],
        ),
    ],
)
def test_cuda_graph_of_experts_needs_static_dispatch(scope: str, experts: str, rules: list[str]) -> None:
    assert broken(f"{TE} model.cuda_graph_scope={scope} {EXPERTS} {experts}") == rules
    assert broken(f"{TE} model.cuda_graph_scope=attn,moe_router {EXPERTS} {experts}") == []


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("model.variable_seq_lengths=true", ["static-shapes"]),
        ("model.seq_length=0", ["config-value", "static-shapes"]),
        ("train.micro_batch_size=0", ["config-value", "static-shapes"]),
        ("dataset.pad_to_max_length=false", ["static-shapes"]),
        ("model.seq_length=512 dataset.seq_length=512", []),
    ],
)
def test_cuda_graph_needs_static_shapes(text: str, rules: list[str]) -> None:
    assert broken(f"{LOCAL} {text}") == rules
    assert "static-shapes" not in broken(text)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (f"{TE} model.cuda_graph_scope=attn", ["packed-sequence"]),
        (TE, ["packed-sequence"]),
        (f"{TE} dataset.pad_cu_seqlens=true", []),
        (f"{LOCAL} model.cuda_graph_scope=attn", []),
        (FULL, []),
        ("", []),
    ],
)
def test_cuda_graph_with_packed_sequences(text: str, rules: list[str]) -> None:
    assert broken(f"dataset.packed_sequence=true {text}") == rules


@pytest.mark.parametrize(
    ("impl", "capability", "variables", "rules"),
    [
        (TE, (9, 0), SEGMENTS, ["expandable-segments"]),
        (TE, (10, 0), SEGMENTS, ["expandable-segments"]),
        (TE, None, SEGMENTS, ["expandable-segments"]),
        (LOCAL, (9, 0), SEGMENTS, ["expandable-segments"]),
        (
            LOCAL,
            (8, 6),
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:true"},
            ["expandable-segments"],
        ),
        (LOCAL, (10, 0), SEGMENTS, []),
        (LOCAL, (12, 0), SEGMENTS, []),
        (LOCAL, None, SEGMENTS, []),
        (TE, (9, 0), SEGMENTS | {"NCCL_GRAPH_REGISTER": "0"}, []),
        (TE, (9, 0), SEGMENTS | {"NCCL_GRAPH_REGISTER": "1"}, ["expandable-segments"]),
        (TE, (9, 0), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, []),
        (TE, (9, 0), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, []),
        ("", (9, 0), SEGMENTS, []),
    ],
)
def test_cuda_graph_with_expandable_segments(
    impl: str, capability: Any, variables: dict[str, str], rules: list[str]
) -> None:
    assert broken(impl, Environment(compute_capability=capability, variables=variables)) == rules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (f"{TE} model.cpu_offloading=true", ["cpu-offloading"]),
        (f"{FULL} model.cpu_offloading=true", ["cpu-offloading"]),
        ("model.cpu_offloading=true", []),
        (f"{TE} model.cuda_graph_scope=mlp model.recompute_granularity=full", ["full-recompute"]),
        (f"{LOCAL} model.recompute_granularity=full", ["full-recompute"]),
        (f"{FULL} model.recompute_granularity=full", []),
        (f"{TE} model.cuda_graph_scope=mlp model.recompute_granularity=selective", []),
        ("model.recompute_granularity=full", []),
    ],
)
def test_cuda_graph_with_offloading_and_full_recompute(text: str, rules: list[str]) -> None:
    assert broken(text) == rules


def test_cuda_graph_full_recompute_offers_three_fixes() -> None:
    config = stepgraph.ConfigContainer().override(
        [TE, "model.cuda_graph_scope=mlp", "model.recompute_granularity=full"]
    )
    with pytest.raises(ConfigError, match="only supported with full iteration CUDA graph") as raised:
        config.validate(HOPPER)
    for fix in ("recompute_granularity=selective", "cuda_graph_impl=none", "cuda_graph_scope=full_iteration"):
        assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (f"{TE} model.cuda_graph_scope=attn,moe_router model.recompute_modules=moe", ["moe-recompute"]),
        (f"{TE} model.cuda_graph_scope=attn,moe_router model.recompute_modules=moe_act", []),
        (f"{LOCAL} model.cuda_graph_scope=attn,moe_router model.recompute_modules=moe", []),
        (f"{TE} model.cuda_graph_scope=attn model.recompute_modules=moe", []),
    ],
)
def test_cuda_graph_of_router_with_moe_recompute(text: str, rules: list[str]) -> None:
    assert broken(f"{EXPERTS} model.recompute_granularity=selective {text}") == rules


@pytest.mark.parametrize("name", ["comm_overlap.delay_wgrad_compute", "model.delay_wgrad_compute"])
@pytest.mark.parametrize(
    ("scope", "text", "rules"),
    [
        ("attn", FUSED, []),
        ("attn", "", ["delayed-wgrad-fusion"]),
        ("moe_router", "", ["delayed-wgrad-fusion"]),
        ("mlp", "model.moe_layer_freq=2", []),
        ("", "", ["delayed-wgrad-fusion"]),
        ("attn", f"{FUSED} model.add_bias_linear=true", ["delayed-wgrad-bias"]),
        ("attn", f"{FUSED} model.add_qkv_bias=true", ["delayed-wgrad-bias"]),
        ("moe_router", f"{FUSED} model.add_bias_linear=true model.add_qkv_bias=true", []),
        ("attn,moe_router", "model.add_qkv_bias=true", ["delayed-wgrad-fusion", "delayed-wgrad-bias"]),
    ],
)
def test_cuda_graph_overlap_with_delayed_wgrad(name: str, scope: str, text: str, rules: list[str]) -> None:
    base = f"{TE} {EXPERTS} {name}=true model.cuda_graph_scope={scope} {text}"
    assert broken(base) == rules
    assert broken(base.replace(TE, "")) == []


@pytest.mark.parametrize(
    ("version", "rules"),
    [
        (None, []),
        ("2.11.0", ["delayed-wgrad-te-version"]),
        ("2.9", ["delayed-wgrad-te-version"]),
        ("1.14.0+abc", ["delayed-wgrad-te-version"]),
        ("2.12.0", []),
        ("2.12", []),
        ("2.13.0rc1", []),
        ("3.0", []),
    ],
)
def test_cuda_graph_overlap_needs_transformer_engine(version: str | None, rules: list[str]) -> None:
    environment = Environment(te_version=version, compute_capability=(9, 0))
    assert broken(f"{TE} model.cuda_graph_scope=attn {DELAYED} {FUSED}", environment) == rules
    assert broken(f"{TE} model.cuda_graph_scope=mlp {DELAYED}", environment) == []


@pytest.mark.parametrize(
    ("text", "world_size", "rules"),
    [
        (FULL, 2, ["nccl-ddp-warmup"]),
        (f"{FULL} model.cuda_graph_warmup_steps=10", 2, ["nccl-ddp-warmup"]),
        (f"{FULL} model.cuda_graph_warmup_steps=11", 2, []),
        (FULL, 1, []),
        (f"{FULL} dist.distributed_backend=gloo", 2, []),
        (f"{FULL} model.pipeline_model_parallel_size=2", 2, []),
        (f"{TE} model.cuda_graph_scope=attn", 2, []),
    ],
)
def test_cuda_graph_with_nccl_ddp_needs_eleven_steps(text: str, world_size: int, rules: list[str]) -> None:
    environment = Environment(compute_capability=(9, 0), world_size=world_size)
    assert broken(f"train.global_batch_size=2 {text}", environment) == rules


def test_cuda_graph_without_gpu_talks_over_gloo() -> None:
    config = stepgraph.ConfigContainer().override([*FULL.split(), "train.global_batch_size=2"])
    frozen = config.validate(Environment(world_size=2))
    assert frozen.dist.distributed_backend == "gloo"
    assert stepgraph.ConfigContainer().validate(HOPPER).dist.distributed_backend == "nccl"


@pytest.mark.parametrize(
    ("text", "world_size", "rules"),
    [
        ("train.global_batch_size=8 train.micro_batch_size=2", 1, []),
        ("train.global_batch_size=8 train.micro_batch_size=2", 4, []),
        ("train.global_batch_size=7 train.micro_batch_size=2", 1, ["batch-size"]),
        ("train.global_batch_size=8 train.micro_batch_size=2", 8, ["batch-size"]),
        ("train.global_batch_size=8 train.micro_batch_size=2 model.tensor_model_parallel_size=2", 8, []),
        ("model.num_layers=0", 1, ["config-value"]),
        ("model.attention_dropout=1", 1, ["config-value"]),
        ("model.num_query_groups=5", 1, ["config-value"]),
        ("model.num_query_groups=4", 1, []),
        ("model.hidden_size=100", 1, ["config-value"]),
        ("model.num_attention_heads=7", 1, ["config-value"]),
        ("model.hidden_size=100 model.kv_channels=32", 1, []),
        ("model.hidden_size=100 model.multi_latent_attention=true", 1, []),
        ("model.hidden_size=100 model.kind=mamba", 1, []),
        (f"{EXPERTS} model.moe_router_topk=9", 1, ["config-value"]),
        ("model.kind=moe", 1, ["config-value"]),
        ("dataset.seq_length=5", 1, ["config-value"]),
        ("optimizer.lr=-1", 1, ["config-value"]),
        ("mixed_precision.bf16=true mixed_precision.fp16=true", 1, ["config-value"]),
        ("model.cuda_graph_warmup_steps=0", 1, []),
        ("model.cuda_graph_warmup_steps=-1", 1, ["config-value"]),
    ],
)
def test_values_and_batches_fit_each_other(text: str, world_size: int, rules: list[str]) -> None:
    assert broken(text, Environment(compute_capability=(9, 0), world_size=world_size)) == rules


@pytest.mark.parametrize(
    ("text", "environment", "rules"),
    [
        ("", HOPPER, []),
        ("model.tensor_model_parallel_size=2", HOPPER, ["not-run-here"]),
        ("model.expert_model_parallel_size=2", HOPPER, ["not-run-here"]),
        ("model.context_parallel_size=2", HOPPER, ["not-run-here"]),
        ("ddp.use_torch_fsdp2=true", HOPPER, ["not-run-here"]),
        ("model.pipeline_model_parallel_size=2", Environment(world_size=2), []),
        ("model.pipeline_model_parallel_size=2", Environment(world_size=3), ["world-size"]),
        ("", Environment(device="cuda"), ["gpu-missing"]),
        ("", Environment(device="cuda", compute_capability=(9, 0)), []),
        ("", Environment(device="cpu"), []),
    ],
)
def test_rules_of_a_run_are_left_to_runs(text: str, environment: Environment, rules: list[str]) -> None:
    assert broken(text, environment, run=True) == rules
    assert broken(text, environment) == []


def test_cuda_graph_violations_are_reported_all_at_once() -> None:
    text = f"{TE} {EXPERTS} model.cuda_graph_scope=moe,moe_router model.cpu_offloading=true rng.te_rng_tracker=false"
    config = stepgraph.ConfigContainer().override(text.split())
    with pytest.raises(ConfigError, match="breaks 3 rules") as raised:
        config.validate(HOPPER)
    error = raised.value
    assert (error.rule, isinstance(error, stepgraph.InvalidArgument)) == ("config-rules", True)
    assert [each.rule for each in error.violations] == ["rng-tracker", "moe-and-router", "cpu-offloading"]
    for each in error.violations:
        assert f"[{each.rule}]" in str(error)
        assert f"Fix: {each.fix}" in str(error)
        assert f"Why: {each.why}" in str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.cuda_graph_scope=attn,mlp", {"model.cuda_graph_scope": (), "model.use_te_rng_tracker": None}),
        (LOCAL, {"model.use_te_rng_tracker": True, "rng.te_rng_tracker": True, "model.use_cudagraphable_rng": True}),
        ("", {"rerun_state_machine.check_for_nan_in_loss": True, "ddp.check_for_nan_in_grad": False}),
        (FULL, {"rerun_state_machine.check_for_nan_in_loss": "device", "ddp.check_for_nan_in_grad": "device"}),
        (f"{FULL} ddp.check_for_nan_in_grad=false", {"ddp.check_for_nan_in_grad": False}),
        (DELAYED, {"model.delay_wgrad_compute": True}),
        ("model.delay_wgrad_compute=true", {"comm_overlap.delay_wgrad_compute": True}),
        (EXPERTS, {"model.kind": "moe"}),
    ],
)
def test_cuda_graph_settings_are_finalised(text: str, expected: dict[str, Any]) -> None:
    config = stepgraph.ConfigContainer().override(text.split())
    before = config.copy()
    frozen = config.validate(HOPPER)
    assert config == before, "the draft stays as it was written"
    for name, value in expected.items():
        section, _, field = name.partition(".")
        assert getattr(getattr(frozen, section), field) == value, name


def test_validation_finds_what_was_put_into_lists() -> None:
    config = stepgraph.ConfigContainer()
    config.model.cuda_graph_scope.append("atn")  # type: ignore[attr-defined]
    with pytest.raises(stepgraph.InvalidArgument, match="'atn'"):
        config.validate(HOPPER)


# -- the catalogue


def test_rules_are_those_of_the_catalogue() -> None:
    """All entries about a configuration; a run raises further ones of its own, such as a damaged checkpoint."""
    reading = {entry.id for entry in catalogue.entries("config") if entry.section == "Reading a configuration"}
    assert {entry.id for entry in catalogue.entries("config")} - reading <= set(RULES)
    assert {catalogue.entry(name).kind for name in RULES} == {"config", "run"}
    assert {"not-run-here", "gpu-missing", "world-size"} <= set(RULES)


def examples() -> list[tuple[str, str]]:
    reading = ("config-field", "config-value")
    entries = [entry for entry in catalogue.entries() if entry.id in (*RULES, *reading)]
    assert len(entries) > 20
    return [(entry.id, line) for entry in entries for line in entry.example.splitlines() if line.strip()]


@pytest.mark.parametrize(("rule", "line"), examples())
def test_examples_of_the_catalogue_do_what_they_say(rule: str, line: str) -> None:
    """A line that ends in `# refused` breaks the rule, and only that rule; the others are kept."""
    command, _, comment = line.partition("#")
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if word.split("=")[0].isupper())
    processes = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    device = words[words.index("--device") + 1] if "--device" in words else None
    capability = None if device is not None else (9, 0)  # examples of devices are about a machine without a GPU
    environment = Environment(None, capability, variables, processes, device)
    rest = words[words.index("train") + 1 :]
    config = stepgraph.ConfigContainer()
    config.train.global_batch_size = 4 * processes
    try:
        CommandLine.read(rest).apply_to(config)
        if "train.global_batch_size" not in line:
            config.train.global_batch_size = config.train.micro_batch_size * 4 * processes
        found = []
        try:
            config.validate(environment, run=True)
        except ConfigError as error:
            found = [violation.rule for violation in error.violations]
    except stepgraph.InvalidArgument as error:
        found = [error.rule]
    assert found == ([rule] if "refused" in comment else [])
