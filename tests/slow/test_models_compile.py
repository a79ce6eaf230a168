"""The models compile whole: no graph break, and the results of eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stepgraph.lab.models import GPT, GPTConfig, Mamba, MambaConfig, MoEConfig, MoEGPT


@pytest.mark.parametrize(
    ("kind", "config", "dtype"),
    [
        (GPT, GPTConfig.tiny(), torch.float32),
        (Mamba, MambaConfig.tiny(), torch.float32),
        (MoEGPT, replace(MoEConfig.tiny(), experts="grouped"), torch.bfloat16),
        (MoEGPT, replace(MoEConfig.tiny(), experts="capacity", capacity_factor=6.0), torch.float32),
    ],
    ids=["gpt", "mamba", "moe grouped", "moe capacity"],
)
def test_model_compiles_without_a_graph_break(kind: type, config: object, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = kind(config).to(dtype)
    tokens, targets = torch.randint(0, config.vocab_size, (2, 2, 24))  # type: ignore[attr-defined]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = compiled(tokens, targets), model(tokens, targets)
    if kind is MoEGPT:
        found, expected = found.out, expected.out
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
