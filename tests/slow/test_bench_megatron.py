"""megatron-core's GPTModel of a recipe's sizes, where megatron-core is installed; its schedule needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stepgraph.lab import recipes
from stepgraph.lab.bench import megatron_core
from stepgraph.lab.recipes.build import build_model

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["gpt2_small", "llama3_8b"])
def test_megatron_model_has_the_recipes_parameters(name: str) -> None:
    model = recipes.recipe(name).model
    model.num_layers, model.hidden_size, model.ffn_hidden_size = 2, 64, 128
    model.num_attention_heads, model.vocab_size, model.seq_length = 4, 256, 16
    model.kv_channels, model.num_query_groups = 16, None if name == "gpt2_small" else 2
    shape = megatron_core.Shape.of(model)
    built, again = (megatron_core.build_gpt(shape, "none", device=torch.device("cpu")) for _ in range(2))
    assert sum(p.numel() for p in built.parameters()) == sum(p.numel() for p in build_model(model).parameters())
    for one, two in zip(built.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
