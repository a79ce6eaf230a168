"""The engines take configuration objects, ours and Megatron's, and check them by the same rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.config.environment import Environment
from stepgraph.config.objects import checked_settings
from stepgraph.lab.models import GPT, GPTConfig

TINY = replace(GPTConfig.tiny(), hidden_size=32, ffn_size=32)
HOPPER = Environment(compute_capability=(9, 0))


def ours(**model: Any) -> stepgraph.ConfigContainer:
    config = stepgraph.ConfigContainer()
    for name, value in ({"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 2} | model).items():
        setattr(config.model, name, value)
    return config


def megatron(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"cuda_graph_impl": "local", "use_te_rng_tracker": True} | fields)


def forward_backward(**call: Any) -> Any:
    return [call["model"](next(call["data_iterator"])).sum()]


ENGINES: dict[str, Callable[[Any], Any]] = {
    "manager": lambda config: stepgraph.CudaGraphManager(config, base_module=torch.nn.Linear(2, 2)),
    "helper": lambda config: stepgraph.TECudaGraphHelper(GPT(TINY), config, 16, 1),
    "modules": lambda config: stepgraph.graph_modules(GPT(TINY), config=config),
    "wrapper": lambda config: stepgraph.FullCudaGraphWrapper(forward_backward, config=config),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"use_te_rng_tracker": False}, "rng-tracker"),
        ({"cpu_offloading": True}, "cpu-offloading"),
        ({"cuda_graph_scope": ["moe", "moe_router"], "num_moe_experts": 8}, "moe-and-router"),
        ({"cuda_graph_scope": ["attn"], "recompute_granularity": "full"}, "full-recompute"),
        ({"cuda_graph_scope": ["attn"], "delay_wgrad_compute": True}, "delayed-wgrad-fusion"),
    ],
)
@pytest.mark.parametrize("make", [ours, lambda **fields: ours(**fields).model, megatron])
def test_cuda_graph_engines_apply_the_rules(
    engine: str, fields: dict[str, Any], rule: str, make: Callable[..., Any]
) -> None:
    with pytest.raises(stepgraph.ConfigError) as raised:
        ENGINES[engine](make(**fields))
    assert rule in [violation.rule for violation in raised.value.violations]


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, ["rng-tracker"]),
        ({"use_te_rng_tracker": None}, ["rng-tracker"]),
        ({"use_te_rng_tracker": True}, []),
        ({"use_te_rng_tracker": False, "cuda_graph_impl": "none"}, []),
        ({"use_te_rng_tracker": True, "cuda_graph_scope": ["moe"], "num_moe_experts": 8}, ["dropless-moe"]),
        ({"use_te_rng_tracker": True, "cuda_graph_scope": ["moe"]}, []),
        ({"use_te_rng_tracker": True, "cuda_graph_scope": ["layers.0"], "add_qkv_bias": True}, []),
        ({"use_te_rng_tracker": True, "activation_func": torch.relu, "num_query_groups": 5}, []),
    ],
)
def test_cuda_graph_rules_read_objects_of_megatron(fields: dict[str, Any], rules: list[str]) -> None:
    config = SimpleNamespace(**{"cuda_graph_impl": "local"} | fields)
    try:
        checked_settings(config, HOPPER)
        found = []
    except stepgraph.ConfigError as error:
        found = [violation.rule for violation in error.violations]
    assert found == rules


NOT_CAPTURED: list[dict[str, Any]] = [
    {"fp8": "hybrid"},
    {"fp4": "e2m1"},
    {"tensor_model_parallel_size": 2},
    {"context_parallel_size": 2},
    {"expert_tensor_parallel_size": 2},
    {"moe_paged_stash": True},
]


@pytest.mark.parametrize("engine", [*ENGINES, "vision"])
@pytest.mark.parametrize("fields", NOT_CAPTURED, ids=lambda fields: next(iter(fields)))
def test_engines_refuse_settings_that_they_do_not_carry_out(engine: str, fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    make = ENGINES.get(engine, lambda config: stepgraph.VisionTECudaGraphHelper(GPT(TINY), config, 16, 1))
    with pytest.raises(stepgraph.ConfigError, match=f"{name}={value!r}") as raised:
        make(megatron(**fields))
    assert raised.value.rule == "not-captured"
    with pytest.raises(stepgraph.ConfigError, match=f"model.{name}={value!r}"):
        make(SimpleNamespace(model=megatron(**fields)))
    if hasattr(ours().model, name):
        with pytest.raises(stepgraph.ConfigError, match=f"model.{name}={value!r}"):
            make(ours(**fields))


def test_engines_refuse_every_broken_rule_beside_such_settings() -> None:
    with pytest.raises(stepgraph.ConfigError) as raised:
        checked_settings(megatron(fp8="e4m3", context_parallel_size=4, cpu_offloading=True), HOPPER)
    assert [broken.rule for broken in raised.value.violations] == ["cpu-offloading", "not-captured"]
    assert raised.value.violations[1].details == ("fp8='e4m3'", "context_parallel_size=4")


@pytest.mark.parametrize("mix", ["bf16_with_fp8_current_scaling_mixed", "bf16_with_nvfp4_mixed"])
def test_engines_refuse_fp8_in_the_mixed_precision(mix: str) -> None:
    with pytest.raises(stepgraph.ConfigError, match=f"mixed_precision='{mix}'"):
        checked_settings(SimpleNamespace(model=megatron(), mixed_precision=mix), HOPPER)
    config = ours()
    config.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
    with pytest.raises(stepgraph.ConfigError, match=r"mixed_precision\.fp8='hybrid'"):
        checked_settings(config, HOPPER)


def test_engines_take_such_settings_where_they_are_off() -> None:
    off = {name: None for fields in NOT_CAPTURED for name in fields}
    sizes = {name: 1 for name in off if name.endswith("_size")}
    for fields in (off, {**dict.fromkeys(off, False), **sizes}):
        assert checked_settings(megatron(**fields), HOPPER).impl == "local"
    on = {name: value for fields in NOT_CAPTURED for name, value in fields.items()}
    assert checked_settings(megatron(cuda_graph_impl="none", **on), HOPPER).impl == "none"


@pytest.mark.parametrize("switch", ["enable_cuda_graph", "external_cuda_graph"])
def test_cuda_graph_older_switches_turn_the_tracker_on(switch: str) -> None:
    """As in Megatron of that time."""
    config = SimpleNamespace(**{switch: True}, cuda_graph_num_warmup_steps=3)
    with pytest.warns(stepgraph.StepgraphWarning):
        assert checked_settings(config, HOPPER).warmup_steps == 3


def test_cuda_graph_rules_of_objects_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    config = megatron(cuda_graph_impl="transformer_engine")
    with pytest.raises(stepgraph.ConfigError, match="NCCL_GRAPH_REGISTER=0"):
        ENGINES["helper"](config)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    ENGINES["helper"](config)


def trained(model: torch.nn.Module, steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        tokens = torch.randint(TINY.vocab_size, (2, 16))
        loss = model(tokens, tokens)
        loss.backward()
        found.append(loss.detach().clone())
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("fields", "paths", "is_captured"),
    [
        ({"cuda_graph_scope": "attn"}, ["blocks.0.attn", "blocks.1.attn"], True),
        ({"cuda_graph_scope": "attn", "cuda_graph_impl": "none"}, ["blocks.0", "blocks.1"], False),
        ({"cuda_graph_scope": "full_iteration"}, ["blocks.0", "blocks.1"], False),
    ],
)
def test_cuda_graph_modules_take_a_configuration(fields: dict[str, Any], paths: list[str], is_captured: bool) -> None:
    torch.manual_seed(0)
    eager, model = GPT(TINY), GPT(TINY)
    model.load_state_dict(eager.state_dict())
    with stepgraph.graph_modules(model, config=ours(**fields).validate(HOPPER)) as handle:
        assert handle.paths == paths
        for ours_, theirs in zip(trained(model), trained(eager), strict=True):
            assert torch.equal(ours_, theirs)
        report = handle.report()
    assert (sum(row.forwards for row in report.rows) > 0) == is_captured
    if is_captured:
        assert report.rows[0].eager_reasons["warm-up"] == 2, "as the configuration says"
    else:
        assert next(iter(report.rows[0].eager_reasons)).startswith("cuda_graph_impl is")


def test_cuda_graph_warmup_steps_have_all_their_microbatches() -> None:
    model, config = GPT(TINY), ours(cuda_graph_scope="mlp", cuda_graph_warmup_steps=1)
    config.train.global_batch_size, config.train.micro_batch_size = 6, 2
    with stepgraph.graph_modules(model, config=config) as handle:
        trained(model, 5)
        assert handle.report().rows[0].eager_reasons["warm-up"] == 3


def test_cuda_graph_options_come_before_the_configuration() -> None:
    model = GPT(TINY)
    config = ours(cuda_graph_scope="attn")
    with stepgraph.graph_modules(model, "mlp", warmup=1, config=config) as handle:
        assert handle.paths == ["blocks.0.mlp", "blocks.1.mlp"]
        trained(model, 3)
        assert handle.report().rows[0].eager_reasons["warm-up"] == 1


@pytest.mark.parametrize(("given", "config_steps", "eager"), [(None, 3, 3), (4, 2, 4), (None, 0, 2), (0, 3, 2)])
def test_cuda_graph_warmup_steps_are_eager_steps(given: int | None, config_steps: int, eager: int) -> None:
    """At least two, of which the operations are compared."""
    config = ours(cuda_graph_scope="full_iteration", cuda_graph_warmup_steps=config_steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapper = stepgraph.FullCudaGraphWrapper(forward_backward, given, config=config)
    assert len(caught) == (1 if 0 in (given, config_steps) and given != 4 else 0)
    model = torch.nn.Linear(4, 4)
    batches = iter([torch.randn(2, 4) for _ in range(6)])
    with torch.no_grad(), wrapper:
        for _ in range(6):
            wrapper(
                forward_step_func=None,  # type: ignore[arg-type]
                data_iterator=batches,
                model=model,
                num_microbatches=1,
                forward_only=True,
            )
        assert wrapper.report().eager_reasons == {"warm-up": eager}


def test_cuda_graph_manager_reads_zero_steps_as_one() -> None:
    with pytest.warns(stepgraph.StepgraphWarning, match="cuda_graph_warmup_steps=0 is read as 1"):
        manager = ENGINES["manager"](ours(cuda_graph_warmup_steps=0))
    assert manager.options.warmup == 1


def test_wrapper_refuses_a_configuration_of_layers() -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="without the scope 'full_iteration'"):
        ENGINES["wrapper"](ours(cuda_graph_scope="attn"))


def test_cuda_graph_helper_takes_a_configuration() -> None:
    shape = {"hidden_size": TINY.hidden_size, "num_attention_heads": TINY.num_heads}
    config = ours(cuda_graph_impl="transformer_engine", cuda_graph_scope="attn", **shape).validate(HOPPER)
    model = GPT(TINY)
    helper = stepgraph.TECudaGraphHelper([model], config, seq_length=16, micro_batch_size=2, num_microbatches=1)
    helper.create_cudagraphs()
    assert helper.paths == ["blocks.0.attn", "blocks.1.attn"]
    helper.delete_cuda_graphs()
