"""Recipes have the published sizes, their graph settings, and a reason for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepgraph.config.environment import Environment
from stepgraph.core.errors import InvalidArgument
from stepgraph.lab import recipes
from stepgraph.lab.recipes import RECIPES, find_recipe, recipe
from stepgraph.lab.recipes.build import build_model, model_config
from stepgraph.lab.recipes.fit import for_cpu
from stepgraph.lab.recipes.listing import record

MOE_SCOPE = ["attn", "moe_router", "moe_preprocess"]
PUBLISHED = {
    "gpt2_small": 124_439_808,  # openai-community/gpt2, the head tied to the embedding; transformers counts the same
    "llama3_8b": 8_030_261_248,  # general.parameter_count of ollama's llama3:8b, a context of 8192
    "llama3_70b": 70_553_706_496,  # safetensors of Llama-3.1-70B and Llama-3.3-70B-Instruct, which have this shape
    "llama3_70b_sft": 70_553_706_496,
    "qwen3_30b_a3b": 30_532_122_624,  # general.parameter_count of qwen3moe 30B.A3B, in ollama and llama.cpp
    "gpt_oss_20b": 20_914_757_184,  # 20.9 B in arXiv 2508.10925; general.parameter_count of ollama's gpt-oss:20b
    "gpt_oss_120b": 116_829_156_672,  # 116.8 B there; general.parameter_count of ollama's gpt-oss:120b
    "deepseek_v3": 671_026_419_200,  # 671 B in README_WEIGHTS.md without the MTP module, 58 * 256 of them router biases
    "qwen3_vl": 31_070_754_032,  # parameter count of Qwen3-VL-30B-A3B-Instruct in Fireworks' list of models
    "nemotron_h": 8_100_852_736,  # elements of the weights of Nemotron-H-8B-Base-8K, counted by its users
}
"""Elements of the published weights. Authors publish rounded totals; the exact counts were found where comments say,
and not on the authors' own pages, which are cited for the shapes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = build_model(RECIPES[name].make().model)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert RECIPES[name].parameters == PUBLISHED[name]
    exact = name not in ("qwen3_vl", "deepseek_v3")  # merging and, as a buffer, the router's bias are not as published
    assert count == pytest.approx(PUBLISHED[name], rel=0 if exact else 0.005)
    told = record(name)
    assert (told["parameters"], told["built_parameters"]) == (PUBLISHED[name], count)
    page = (Path(__file__).parents[4] / "docs" / "recipes.md").read_text(encoding="utf-8")
    built = "the same" if exact else f"{count:,}"
    assert f"| `{name}` | {PUBLISHED[name]:,} | {built} |" in page


@pytest.mark.parametrize(
    ("name", "impl", "scope"),
    [
        ("gpt2_small", "transformer_engine", ["attn"]),
        ("llama3_8b", "transformer_engine", ["attn"]),
        ("llama3_70b", "transformer_engine", ["attn"]),
        ("llama3_70b_sft", "transformer_engine", ["mlp"]),
        ("qwen3_30b_a3b", "transformer_engine", MOE_SCOPE),
        ("gpt_oss_20b", "transformer_engine", MOE_SCOPE),
        ("gpt_oss_120b", "transformer_engine", MOE_SCOPE),
        ("deepseek_v3", "transformer_engine", MOE_SCOPE),
        ("qwen3_vl", "none", MOE_SCOPE),
        ("nemotron_h", "transformer_engine", ["mamba", "attn"]),
    ],
)
def test_recipe_captures_what_it_says(name: str, impl: str, scope: list[str]) -> None:
    model = RECIPES[name].make().model
    assert (model.cuda_graph_impl, [str(word) for word in model.cuda_graph_scope]) == (impl, scope)
    assert len(RECIPES[name].reason) > 40


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_keeps_the_rules(name: str) -> None:
    hopper = Environment(None, (9, 0), {}, 1, "cuda")
    cut = for_cpu(RECIPES[name].make())
    for cfg in (RECIPES[name].make(), cut):
        assert cfg.validate(hopper, run=True).is_frozen


def test_recipes_are_all_listed() -> None:
    assert set(RECIPES) == set(PUBLISHED)
    assert all(getattr(recipes, name) is RECIPES[name].make for name in RECIPES)
    assert all(RECIPES[name].make() is not RECIPES[name].make() for name in RECIPES)


def test_recipe_of_a_task_is_the_one_made_for_it() -> None:
    assert recipe("llama3-70b", "sft").to_dict() == recipes.llama3_70b_sft().to_dict()
    sft, lora = recipe("llama3_8b", "sft"), recipe("llama3_8b", "lora")
    assert (sft.dataset.kind, sft.peft.scheme, lora.peft.scheme) == ("sft", None, "lora")
    assert recipe("llama3_8b").dataset.kind == "text"


@pytest.mark.parametrize(
    ("wrong", "fix"), [(lambda: find_recipe("lama3_8b"), "llama3_8b"), (lambda: recipe("gpt2_small", "sfd"), "sft")]
)
def test_recipe_with_a_typo_names_the_nearest(wrong: object, fix: str) -> None:
    with pytest.raises(InvalidArgument, match=f"did you mean '{fix}'") as caught:
        wrong()  # type: ignore[operator]
    assert caught.value.rule == "recipe"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_attention_heads": 7}, "num_heads"),
        ({"kind": "hybrid"}, "hybrid_override_pattern"),
        ({"kind": "moe"}, "num_moe_experts"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"position_embedding_type": "yarn"}, "rotary_scaling_factor"),
        ({"gated_linear_unit": True}, "activation_func"),
        (
            {"num_moe_experts": 4, "activation_func": "silu", "gated_linear_unit": True, "moe_layer_freq": [1]},
            "12 layers",
        ),
    ],
)
def test_build_names_the_wrong_setting(settings: dict[str, object], named: str) -> None:
    model = recipes.gpt2_small().model
    for name, value in settings.items():
        setattr(model, name, value)
    with pytest.raises(InvalidArgument, match=named) as caught:
        model_config(model)
    assert caught.value.rule == "model-shape"


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({}, "grouped"),
        ({"moe_grouped_gemm": False}, "loop"),
        ({"moe_expert_capacity_factor": 1.5}, "drop"),
        ({"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}, "capacity"),
    ],
)
def test_build_reads_how_experts_run(settings: dict[str, object], way: str) -> None:
    model = recipes.qwen3_30b_a3b().model
    for name, value in settings.items():
        setattr(model, name, value)
    config = model_config(model)
    assert config.experts == way
    assert config.capacity_factor == (1.5 if "moe_expert_capacity_factor" in settings else 1.25)


def test_build_hands_compute_settings_to_the_model() -> None:
    model = recipes.gpt2_small().model
    model.recompute_granularity, model.recompute_num_layers, model.recompute_method = "full", 3, "uniform"
    model.delay_wgrad_compute = model.gradient_accumulation_fusion = model.add_qkv_bias = True
    model.attention_dropout, model.hidden_dropout, model.make_vocab_size_divisible_by = 0.2, 0.1, 128
    config = model_config(model)
    assert (config.recompute_granularity, config.recompute_num_layers, config.recompute_method) == (
        "full",
        3,
        "uniform",
    )
    assert config.delay_wgrad_compute
    assert config.gradient_accumulation_fusion
    assert (config.core_dropout, config.dropout, config.vocab_size) == (0.2, 0.1, 50304)


@pytest.mark.usefixtures("new_processes")
def test_recipes_import_no_torch() -> None:
    program = (
        "import sys, stepgraph.lab.recipes.machines, stepgraph.lab.recipes as r; "
        "[x.make() for x in r.RECIPES.values()]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
