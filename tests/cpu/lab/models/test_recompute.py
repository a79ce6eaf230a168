"""Recomputation changes what is stored and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph.lab.models import GPT, GPTConfig, LatentShape, MoEConfig, MoEGPT
from stepgraph.lab.models.language_model import LanguageModel

TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
LATENT = LatentShape(q_rank=24, kv_rank=16, nope_size=16, rope_size=8, value_size=16)
DENSE = replace(GPTConfig.tiny(), num_layers=4, dropout=0.1)
SPARSE = replace(MoEConfig.tiny(), dropout=0.1, shared_ffn_size=32, latent=LATENT, num_kv_heads=4)
CONFIGS: dict[str, GPTConfig] = {"dense": DENSE, "sparse": SPARSE}
FULL = {"recompute_granularity": "full"}


def only(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def stored_and_gradients(config: GPTConfig) -> tuple[int, list[torch.Tensor]]:
    """Bytes that the forward stores, and what it and the backward compute."""
    torch.manual_seed(0)
    model: LanguageModel = MoEGPT(config) if isinstance(config, MoEConfig) else GPT(config)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stored: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out: Any = model(TOKENS, TOKENS)
    loss = out if isinstance(out, torch.Tensor) else out.out + out.aux_loss
    loss.backward()
    return sum(stored.values()), [loss, torch.rand(1), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dense", FULL),
        ("dense", {**FULL, "recompute_num_layers": 2}),
        ("dense", {**FULL, "recompute_num_layers": 99}),
        ("dense", {**FULL, "recompute_method": "uniform", "recompute_num_layers": 3}),
        ("dense", only("core_attn")),
        ("dense", only("mlp")),
        ("dense", only("layernorm")),
        ("dense", only("core_attn", "mlp", "layernorm")),
        ("sparse", FULL),
        ("sparse", only("moe")),
        ("sparse", only("moe_act")),
        ("sparse", only("shared_experts")),
        ("sparse", only("mla_up_proj")),
    ],
    ids=str,
)
def test_recompute_stores_less_and_computes_the_same(kind: str, settings: dict[str, Any]) -> None:
    config = CONFIGS[kind]
    plain, expected = stored_and_gradients(config)
    less, received = stored_and_gradients(replace(config, **settings))
    assert less < plain
    assert all(torch.equal(one, two) for one, two in zip(received, expected, strict=True))


def test_recompute_of_more_layers_stores_less() -> None:
    sizes = [stored_and_gradients(replace(DENSE, **FULL, recompute_num_layers=n))[0] for n in (1, 2, 3, 4)]
    assert sizes == sorted(set(sizes), reverse=True)


def test_recompute_of_parts_that_are_not_there_changes_nothing() -> None:
    assert stored_and_gradients(replace(DENSE, **only("moe")))[0] == stored_and_gradients(DENSE)[0]
