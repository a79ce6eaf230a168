"""The hybrid stack: its pattern, its layers one by one, and its norm by groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph.lab.models import Hybrid, HybridConfig
from stepgraph.lab.models.hybrid import AttentionBlock, HybridMambaBlock, MLPBlock
from stepgraph.lab.models.mamba import Mamba2

TINY = HybridConfig.tiny()


def make_model(config: HybridConfig = TINY) -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(config)


def random_tokens(length: int = 16) -> torch.Tensor:
    return torch.randint(256, (2, length), generator=torch.Generator().manual_seed(1))


def test_hybrid_layers_follow_the_pattern() -> None:
    kinds = {"M": HybridMambaBlock, "-": MLPBlock, "*": AttentionBlock}
    for pattern in ("M-M*-", "*", "--MM*"):
        model = make_model(replace(TINY, pattern=pattern, num_layers=len(pattern)))
        assert [type(block) for block in model.blocks] == [kinds[letter] for letter in pattern]


def test_hybrid_equals_its_branches_added_one_by_one() -> None:
    model, tokens = make_model(), random_tokens()
    x = model.embedding(tokens)
    for letter, block in zip(TINY.pattern, model.blocks, strict=True):
        normed = block.norm(x)
        if letter == "M":
            x = x + block.mixer(normed)
        elif letter == "*":
            x = x + block.attn(normed, model.rotary)
        else:
            mlp = block.mlp
            x = x + torch.relu(normed @ mlp.up_proj.weight.T).square() @ mlp.down_proj.weight.T
    expected = model.norm(x) @ model.head.weight.T
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-6)


def test_hybrid_is_causal_and_trains_every_parameter() -> None:
    model, tokens = make_model(), random_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-4)
    model(tokens, tokens).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_mamba_norm_by_group_is_a_norm_of_each_part() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(TINY.mamba)
    torch.nn.init.uniform_(mixer.norm.weight, 0.5, 1.5)
    y = torch.randn(2, 3, 128)
    parts = [part / (part.square().mean(-1, keepdim=True) + mixer.norm.eps).sqrt() for part in y.chunk(2, dim=-1)]
    torch.testing.assert_close(mixer._normed(y), torch.cat(parts, dim=-1) * mixer.norm.weight)


def test_hybrid_parameter_count_is_that_of_its_layers() -> None:
    width, inner, states, heads = 64, 128, 2 * 2 * 16, 8
    mamba = width * (2 * inner + states + heads) + (inner + states) * 5 + 3 * heads + inner + inner * width
    attention = width * 64 * 2 + width * 32 * 2
    layers = 2 * mamba + attention + 2 * (2 * width * 128) + 5 * width
    assert sum(p.numel() for p in make_model().parameters()) == 2 * 256 * width + width + layers


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pattern": "M-E*-"}, "pattern"),
        ({"pattern": "M-"}, "num_layers"),
        ({"mamba_num_groups": 3}, "num_groups"),
        ({"state_size": 0}, "state_size"),
    ],
)
def test_hybrid_config_names_the_wrong_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(TINY, **change)


def test_hybrid_refuses_a_sequence_beyond_its_tables() -> None:
    with pytest.raises(ValueError, match="max_seq_len"):
        make_model()(random_tokens(65))
