"""A configuration that is cut keeps its parts, stays within its budget, and says what was cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.recipes import RECIPES, gpt2_small, recipe
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.recipes.fit import SHARE, fit, for_cpu
from stepgraph.lab.recipes.layers import fewest_layers, with_layers
from stepgraph.lab.recipes.memory import estimate_memory


@pytest.mark.parametrize("name", RECIPES)
def test_fit_for_cpu_trains_all_kinds_of_layers(name: str) -> None:
    whole, cut = recipe(name), for_cpu(recipe(name))
    cut.mixed_precision = "fp32"
    model = build_model(cut.model)
    tokens = torch.randint(256, (1, 16))
    out = model(tokens, targets=tokens)
    (out if isinstance(out, torch.Tensor) else out.out + out.aux_loss).backward()
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e7
    if whole.model.hybrid_override_pattern:
        assert set(cut.model.hybrid_override_pattern) == set(whole.model.hybrid_override_pattern)
    if not isinstance(whole.model.moe_layer_freq, int):
        assert set(cut.model.moe_layer_freq) == {0, 1}
    assert cut.model.cuda_graph_scope == whole.model.cuda_graph_scope


def test_fit_that_is_roomy_cuts_nothing() -> None:
    cfg = for_cpu(gpt2_small())
    found = fit(cfg, 100 << 30, "cuda")
    assert found.cuts == ()
    assert found.config.to_dict() == cfg.to_dict()
    assert str(found).startswith("fits whole: ")


def test_fit_cuts_layers_first_and_as_few_as_needed() -> None:
    cfg = for_cpu(recipe("gpt2_small"))
    cfg.model.num_layers = 7
    six, five = (estimate_memory(with_layers(cfg, layers)).total for layers in (6, 5))
    found = fit(cfg, int((five + six) / 2 / SHARE), "cuda")
    assert [str(cut) for cut in found.cuts] == ["model.num_layers: 7 -> 5"]
    assert found.estimate.total <= found.budget_bytes < six
    assert str(found).endswith("  model.num_layers: 7 -> 5")
    assert cfg.model.num_layers == 7


@pytest.mark.slow
def test_fit_halves_experts_when_layers_are_not_enough() -> None:
    cfg = for_cpu(recipe("deepseek_v3"))
    cfg.model.num_moe_experts = 64
    one_of_each = with_layers(cfg, 2)
    one_of_each.model.num_moe_experts = 16
    found = fit(cfg, int(estimate_memory(one_of_each).total / SHARE) + 1, "cuda:0")
    assert (found.config.model.num_layers, found.config.model.num_moe_experts) == (2, 16)
    assert found.config.model.moe_layer_freq == [0, 1]


def test_fit_refuses_what_cannot_be_cut_enough() -> None:
    with pytest.raises(InvalidArgument, match="does not fit") as caught:
        fit(for_cpu(gpt2_small()), 1 << 20, "cuda")
    assert caught.value.rule == "fit"


@pytest.mark.parametrize(
    ("name", "layers", "kept"),
    [
        ("nemotron_h", 3, "M-*"),
        ("nemotron_h", 5, "M-M-*"),
        ("nemotron_h", 9, "M-M-M-M*-"),
        ("deepseek_v3", 2, [0, 1]),
        ("deepseek_v3", 5, [0, 0, 0, 1, 1]),
    ],
)
def test_with_layers_keeps_one_of_each_kind(name: str, layers: int, kept: str | list[int]) -> None:
    model = with_layers(recipe(name), layers).model
    assert model.num_layers == layers
    assert (model.hybrid_override_pattern if isinstance(kept, str) else model.moe_layer_freq) == kept
    assert fewest_layers(recipe(name)) == len(set(kept))


def test_fewest_layers_include_one_without_a_window() -> None:
    assert fewest_layers(recipe("gpt_oss_20b")) == 2


def test_fit_on_a_cpu_computes_in_float32_unless_told_otherwise() -> None:
    cut = fit(gpt2_small(), 1 << 34, "cpu")
    assert cut.config.mixed_precision.params_dtype == "fp32"
    assert "mixed_precision.params_dtype: bf16 -> fp32" in str(cut)
    assert fit(gpt2_small(), 1 << 34, "cpu", kept=["mixed_precision"]).config.mixed_precision.bf16
    assert fit(gpt2_small(), 1 << 40, "cuda").config.mixed_precision.bf16


def test_fit_on_a_cpu_trains_few_microbatches() -> None:
    def batch(**options: Any) -> int:
        return fit(gpt2_small(), 1 << 34, **({"device": "cpu"} | options)).config.train.global_batch_size

    assert batch() == 2
    assert batch(num_ranks=2) == 4
    assert batch(kept=["global_batch_size"]) == batch(device="cuda") == gpt2_small().train.global_batch_size == 8
    assert "train.global_batch_size: 8 -> 2" in str(fit(gpt2_small(), 1 << 34, "cpu"))
