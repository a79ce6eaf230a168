"""Configurations of published models, how they become models, and how they are cut to fit a machine."""

from stepgraph.lab.recipes.published import (
    RECIPES,
    TASKS,
    Recipe,
    deepseek_v3,
    find_recipe,
    for_task,
    gpt2_small,
    gpt_oss_20b,
    gpt_oss_120b,
    llama3_8b,
    llama3_70b,
    llama3_70b_sft,
    nemotron_h,
    qwen3_30b_a3b,
    qwen3_vl,
    recipe,
)

__all__ = [
    "RECIPES",
    "TASKS",
    "Recipe",
    "deepseek_v3",
    "find_recipe",
    "for_task",
    "gpt2_small",
    "gpt_oss_20b",
    "gpt_oss_120b",
    "llama3_8b",
    "llama3_70b",
    "llama3_70b_sft",
    "nemotron_h",
    "qwen3_30b_a3b",
    "qwen3_vl",
    "recipe",
]
