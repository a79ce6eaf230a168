"""The published settings for each GPU: every entry is a valid configuration, and what is typed wins."""

from __future__ import annotations

from typing import Any

import pytest

from stepgraph.commands.train import read
from stepgraph.config.environment import Environment
from stepgraph.config.rules import broken_rules, finalised
from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.bench import predict as prediction
from stepgraph.lab.bench.hardware import GPUS, find_gpu
from stepgraph.lab.recipes import RECIPES, recipe
from stepgraph.lab.recipes.machines import FSDP, PUBLISHED, Published, machine_settings
from stepgraph.lab.recipes.memory import state_memory

ENTRIES = [(name, task, gpu) for (name, task), on in PUBLISHED.items() for gpu in on]


def settings(name: str, gpu: str, *typed: str, task: str = "pretrain", **how: Any) -> dict[str, Any]:
    """What `-g` adds, by `section.field`."""
    return dict(machine_settings(name, task, gpu, how.pop("num_gpus", None), typed, **how).settings or {})


@pytest.mark.parametrize(("name", "task", "gpu"), ENTRIES)
def test_machine_entry_is_a_valid_configuration(name: str, task: str, gpu: str) -> None:
    chosen = machine_settings(name, task, gpu, None)
    there = Environment(find_gpu(gpu).compute_capability, world_size=chosen.num_gpus, device="cuda")
    cfg = read(name, task, chosen.words, False).config
    assert broken_rules(finalised(cfg, there), there) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task", "gpu"), ENTRIES)
def test_machine_entry_is_predicted(name: str, task: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "estimate_memory", state_memory)  # activations take seconds, and no rule sees them
    chosen = machine_settings(name, task, gpu, None)
    found = prediction.predict(read(name, task, chosen.words, False).config, find_gpu(gpu), chosen.num_gpus)
    assert found.num_gpus == PUBLISHED[name, task][gpu].num_gpus
    assert {violation.rule for violation in found.not_run_here} <= {"not-run-here"}


@pytest.mark.parametrize(("name", "task", "gpu"), ENTRIES)
def test_machine_entry_divides_its_gpus_and_batch(name: str, task: str, gpu: str) -> None:
    assert name in RECIPES
    assert gpu in GPUS
    found: Published = PUBLISHED[name, task][gpu]
    one_copy = found.tensor * found.pipeline * found.context
    assert found.num_gpus % one_copy == 0
    assert found.num_gpus % (found.pipeline * found.expert) == 0
    assert found.global_batch % (found.micro_batch * found.num_gpus // one_copy) == 0
    assert found.global_batch % found.num_gpus == 0, "it scales with any number of GPUs"


@pytest.mark.parametrize(("name", "task", "gpu"), ENTRIES)
def test_machine_entry_is_valid_on_one_gpu(name: str, task: str, gpu: str) -> None:
    chosen = machine_settings(name, task, gpu, None, divides=False)
    assert chosen.num_gpus == 1
    cfg = read(name, task, chosen.words, False).config
    cfg.validate()
    own = recipe(name, task)
    assert cfg.train.global_batch_size == own.train.global_batch_size
    assert cfg.model.pipeline_model_parallel_size == cfg.model.expert_model_parallel_size == 1


def test_machine_settings_differ_between_gpus() -> None:
    hopper, blackwell = settings("qwen3_30b_a3b", "h100"), settings("qwen3_30b_a3b", "b200")
    assert hopper["model.expert_model_parallel_size"] == 16
    assert hopper["model.cuda_graph_scope"] == ["moe_router", "moe_preprocess"]
    assert blackwell["model.expert_model_parallel_size"] == 8
    assert blackwell["train.micro_batch_size"] == 4
    assert "attn" in blackwell["model.cuda_graph_scope"]


def test_machine_settings_leave_what_was_typed() -> None:
    line = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
    line += ["model.expert_model_parallel_size=4", "model.cuda_graph_impl=transformer_engine"]
    line += ["model.cuda_graph_scope=attn,moe_router,moe_preprocess"]
    found = settings("qwen3_30b_a3b", "h100", *line, num_gpus=16)
    assert found == {"train.global_batch_size": 1024, "train.micro_batch_size": 1}


@pytest.mark.parametrize(
    ("typed", "left_out"),
    [
        ("model.cuda_graph_scope=attn", "model.cuda_graph_impl"),
        ("model.cuda_graph_modules=attn", "model.cuda_graph_scope"),
        ("model.enable_cuda_graph=true", "model.cuda_graph_impl"),
        ("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size"),
        ("model.cuda_graph_impl=local", "model.recompute_granularity"),
        ("model.recompute_granularity=none", "model.recompute_num_layers"),
        ("train.global_batch_size=3", "train.micro_batch_size"),
        ("dataset.seq_length=512", "model.seq_length"),
    ],
)
def test_typed_setting_leaves_out_what_goes_with_it(typed: str, left_out: str) -> None:
    assert left_out in settings("llama3_70b", "h100", task="lora") | settings("llama3_70b", "b200")
    assert left_out not in settings("llama3_70b", "h100", typed, task="lora")
    assert typed.partition("=")[0] not in settings("llama3_70b", "h100", typed, task="lora")


def test_number_of_gpus_scales_the_global_batch() -> None:
    assert settings("llama3_8b", "b200", num_gpus=64)["train.global_batch_size"] == 1024
    alone = settings("llama3_8b", "h100", num_gpus=1)
    assert alone["train.global_batch_size"] == 16
    assert "model.context_parallel_size" not in alone, "one GPU shares nothing"


def test_number_of_gpus_must_fit_published_sizes() -> None:
    with pytest.raises(InvalidArgument, match="-ng 24 is not a multiple of 32"):
        settings("llama3_70b", "h100", num_gpus=24)
    found = settings("llama3_70b", "h100", "model.context_parallel_size=1", num_gpus=48)
    assert found["model.tensor_model_parallel_size"] == 4, "sizes that are typed replace those of the machine"


def test_micro_batch_fits_the_global_batch_of_a_run() -> None:
    assert settings("qwen3_30b_a3b", "b300", divides=False)["train.micro_batch_size"] == 8
    assert "train.micro_batch_size" not in settings("qwen3_30b_a3b", "b300", divides=False, num_gpus=2)


def test_whole_iteration_warms_up_longer_with_ddp() -> None:
    assert settings("llama3_8b", "b200")["model.cuda_graph_warmup_steps"] == 11
    assert "model.cuda_graph_warmup_steps" not in settings("llama3_8b", "b200", divides=False)


def test_sft_recipe_has_the_settings_of_its_task() -> None:
    assert settings("llama3_70b_sft", "gb200") == settings("llama3_70b", "gb200", task="sft")
    assert settings("llama3_70b_sft", "gb200")["model.cuda_graph_scope"] == ["mlp"]


@pytest.mark.parametrize(
    ("name", "task", "gpu", "line"),
    [
        ("gpt2_small", "pretrain", "h100", "no settings are published for gpt2_small on h100"),
        ("llama3_8b", "lora", "b200", "no settings are published for lora of llama3_8b on b200"),
        ("llama3_70b", "pretrain", "gb300", "the settings published for llama3_70b on gb300 need Megatron's FSDP"),
    ],
)
def test_unpublished_combination_is_named(name: str, task: str, gpu: str, line: str) -> None:
    found = machine_settings(name, task, gpu, None)
    assert found.line == f"{line}; the recipe's own are used"
    assert (found.words, found.num_gpus, found.settings) == ([], 1, {})


def test_sharded_entries_are_not_in_the_table() -> None:
    assert not [gpu for key, gpus in FSDP.items() for gpu in gpus if gpu in PUBLISHED[key]]


@pytest.mark.parametrize("gpu", [None, "cpu"])
def test_machine_settings_without_a_gpu_are_none(gpu: str | None) -> None:
    found = machine_settings("llama3_8b", "pretrain", gpu, None)
    assert (found.words, found.line, found.num_gpus, found.settings) == ([], None, 1, None)
