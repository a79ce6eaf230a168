"""Floating-point operations of recipes, against the usual formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.core.errors import InvalidArgument
from stepgraph.lab import recipes
from stepgraph.lab.bench.flops import flops_per_step, forward_flops_per_token, positions_seen
from stepgraph.lab.bench.hardware import GPUS, find_gpu, gpu_of


@given(st.integers(1, 40), st.integers(1, 60) | st.none())
def test_positions_seen_are_those_of_a_causal_mask(length: int, window: int | None) -> None:
    width = length if window is None else window
    seen = [min(position + 1, width) for position in range(length)]
    assert positions_seen(length, window) == pytest.approx(sum(seen) / length)


def test_flops_of_a_dense_model_follow_six_per_weight() -> None:
    cfg = recipes.llama3_8b()
    model, tokens = cfg.model, cfg.train.global_batch_size * cfg.model.seq_length
    weights = 8_030_261_248 - model.vocab_size * model.hidden_size
    attention = 12 * model.num_layers * model.hidden_size * (model.seq_length + 1) / 2
    assert flops_per_step(cfg) / tokens == pytest.approx(6 * weights + attention, rel=1e-3)


def test_flops_count_chosen_experts_only() -> None:
    cfg = recipes.qwen3_30b_a3b()
    active = 3.3e9
    before = sum(forward_flops_per_token(cfg))
    assert before == pytest.approx(2 * active, rel=0.35)
    cfg.model.moe_router_topk *= 2
    assert sum(forward_flops_per_token(cfg)) > 1.3 * before


def test_flops_of_tied_embeddings_count_the_output_once() -> None:
    tied, apart = recipes.gpt2_small(), recipes.gpt2_small()
    apart.model.share_embeddings_and_output_weights = False
    assert forward_flops_per_token(tied) == forward_flops_per_token(apart)


def test_flops_of_lora_leave_out_gradients_of_frozen_weights() -> None:
    whole, lora = recipes.llama3_8b(), recipes.llama3_8b()
    lora.peft.scheme = "lora"
    weights, _ = forward_flops_per_token(whole)
    tokens = whole.train.global_batch_size * whole.model.seq_length
    assert flops_per_step(whole) - flops_per_step(lora) == pytest.approx(tokens * weights)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_flops_of_every_recipe_are_counted(name: str) -> None:
    assert flops_per_step(recipes.recipe(name)) > 1e12


def test_gpu_is_found_by_torchs_name() -> None:
    assert gpu_of("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_of("NVIDIA H200") is find_gpu("H200")
    assert gpu_of("Some Other Device") is None


def test_unknown_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="did you mean h100"):
        find_gpu("h10")
