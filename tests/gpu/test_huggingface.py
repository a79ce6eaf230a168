"""Hugging Face's own models, tiny and without downloads, graphed by the words of a scope: equal to eager bit for bit.

Their attention masks are made by the model, outside of what is graphed here, so that code that asks whether it is being
captured is not in the graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepgraph
from tests.contract.module_programs import Training, assert_orders_equal_eager, order

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2Config": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False},
    "LlamaConfig": LLAMA,
    "Qwen3Config": {**LLAMA, "head_dim": 8},
    "Qwen3MoeConfig": {**LLAMA, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "MixtralConfig": {**LLAMA, **EXPERTS, "num_local_experts": 4},
    "GptOssConfig": {**LLAMA, **EXPERTS, "num_local_experts": 4, "sliding_window": 8},
}
DENSE, ROUTED = ("GPT2Config", "LlamaConfig", "Qwen3Config"), ("Qwen3MoeConfig", "MixtralConfig", "GptOssConfig")


def training_of(name: str, attention: str) -> Any:
    def build(device: torch.device) -> Training:
        config = getattr(transformers, name)(**CONFIGS[name])
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)
        model.train()

        def loss(tokens: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens, labels=tokens).loss

        def make(draw: torch.Generator, size: int) -> torch.Tensor:
            return torch.randint(64, (size, 16), generator=draw)

        return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), make, lambda step: [loss])

    return build


def assert_equal(name: str, attention: str, scope: list[str]) -> stepgraph.ModuleReport:
    report = assert_orders_equal_eager(
        training_of(name, attention),
        [order("F0 B0 F1 F2 B1 B2")] * 11,
        torch.device("cuda"),
        lambda training: stepgraph.graph_modules(training.model, scope),
    )
    for row in report.rows:
        assert set(row.eager_reasons) == {"warm-up"}, row
        assert row.forwards > row.eager_calls
    return report


@pytest.mark.parametrize("scope", [[], ["attn"], ["attn", "mlp"]], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DENSE)
def test_dense_model_in_parts_equals_eager(name: str, attention: str, scope: list[str]) -> None:
    report = assert_equal(name, attention, scope)
    assert len(report.rows) == 2 * max(1, len(scope))


@pytest.mark.parametrize("scope", [["attn"], ["attn", "moe_router"]], ids=str)
@pytest.mark.parametrize("name", ROUTED)
def test_experts_stay_eager_beside_graphs(name: str, scope: list[str]) -> None:
    report = assert_equal(name, "eager", scope)
    assert len(report.rows) == 2 * len(scope)
    assert not any("experts" in row.path for row in report.rows)
