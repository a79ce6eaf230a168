"""Windows, sinks, biases, latent attention and YaRN against written-out forms in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from stepgraph.lab.models import GPT, GPTConfig, LatentShape
from stepgraph.lab.models.attention import CoreAttention, LatentAttention, RotaryPositions, make_rotary

TINY = GPTConfig.tiny()
LATENT = LatentShape(q_rank=24, kv_rank=16, nope_size=12, rope_size=8, value_size=10)


def core_by_hand(core: CoreAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head, one position at a time: a softmax over the keys it sees, and over its sink."""
    batch, heads, length, width = q.shape
    out = q.new_zeros(batch, heads, length, v.shape[-1])
    for head in range(heads):
        group = head // (heads // k.shape[1])
        for t in range(length):
            first = 0 if core.window is None else max(0, t - core.window + 1)
            scores = (k[:, group, first : t + 1] @ q[:, head, t, :, None]).squeeze(-1) / math.sqrt(width)
            total = scores.exp().sum(-1, keepdim=True)
            if core.sinks is not None:
                total = total + core.sinks[head].exp()
            out[:, head, t] = ((scores.exp() / total)[..., None] * v[:, group, first : t + 1]).sum(1)
    return out


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 99])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_core_equals_written_out_form_with_gradients(sinks: bool, window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    config = replace(TINY, num_kv_heads=kv_heads, attention_sinks=sinks, sliding_window=window)
    core = CoreAttention(config, layer=0).double()
    if core.sinks is not None:
        nn.init.normal_(core.sinks)
    q, k, v = (
        torch.randn(2, heads, 6, 8, dtype=torch.float64, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    )
    leaves = [q, k, v, *core.parameters()]
    received, expected = core(q, k, v), core_by_hand(core, q, k, v)
    torch.testing.assert_close(received, expected, rtol=1e-9, atol=1e-10)
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * direction).sum(), leaves) for y in (received, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-7, atol=1e-8)


def test_core_with_a_large_sink_attends_to_nothing() -> None:
    core = CoreAttention(replace(TINY, attention_sinks=True), layer=0)
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    with torch.no_grad():
        core.sinks.fill_(-1e9)  # type: ignore[union-attr]
        plain = CoreAttention(TINY, layer=0)(q, k, v)
        torch.testing.assert_close(core(q, k, v), plain, rtol=1e-5, atol=1e-6)
        core.sinks.fill_(1e9)  # type: ignore[union-attr]
        assert not core(q, k, v).any()


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_dropout_acts_on_weights_in_training_only(sinks: bool) -> None:
    core = CoreAttention(replace(TINY, attention_dropout=0.5, attention_sinks=sinks), layer=0)
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    assert not torch.equal(core(q, k, v), core(q, k, v))
    core.eval()
    assert torch.equal(core(q, k, v), core(q, k, v))
    assert CoreAttention(replace(TINY, dropout=0.5, attention_dropout=0.0), layer=0).dropout == 0.0
    assert CoreAttention(replace(TINY, dropout=0.5), layer=0).dropout == 0.5


@pytest.mark.parametrize(
    ("interval", "windows"), [(None, [4, 4, 4, 4]), (2, [4, None, 4, None]), (4, [4, 4, 4, None]), (1, [None] * 4)]
)
def test_windows_alternate_with_full_attention(interval: int | None, windows: list[int | None]) -> None:
    config = replace(TINY, sliding_window=4, full_attention_interval=interval, num_layers=4)
    assert [block.attn.core.window for block in GPT(config).blocks] == windows


@pytest.mark.parametrize(
    ("settings", "with_bias"),
    [
        ({}, set()),
        ({"add_qkv_bias": True}, {"q_proj", "k_proj", "v_proj"}),
        ({"add_bias_linear": True}, {"q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_biases_are_where_the_config_says(settings: dict[str, bool], with_bias: set[str]) -> None:
    model = GPT(replace(TINY, **settings))
    linears = {name.rpartition(".")[2]: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {name for name, linear in linears.items() if linear.bias is not None} == with_bias
    assert all(not linear.bias.any() for linear in linears.values() if linear.bias is not None)


def latent_by_hand(attention: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values written out, one head at a time."""
    shape, length = attention.shape, x.shape[1]

    def normed(y: torch.Tensor, norm: Any) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    def rotated(y: torch.Tensor) -> torch.Tensor:
        half = shape.rope_size // 2
        speed = torch.tensor([10_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * speed
        pairs = torch.complex(y[..., :half], y[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    q = x if shape.q_rank is None else normed(x @ attention.q_down_proj.weight.T, attention.q_norm)
    q = (q @ attention.q_up_proj.weight.T).unflatten(-1, (-1, shape.head_size))
    down = x @ attention.kv_down_proj.weight.T
    kv = normed(down[..., : shape.kv_rank], attention.kv_norm) @ attention.kv_up_proj.weight.T
    kv = kv.unflatten(-1, (-1, shape.nope_size + shape.value_size))
    k_rope = rotated(down[..., shape.kv_rank :])
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for head in range(q.shape[2]):
        scores = q[:, :, head, : shape.nope_size] @ kv[:, :, head, : shape.nope_size].mT
        scores = scores + rotated(q[:, :, head, shape.nope_size :]) @ k_rope.mT
        weights = (scores / math.sqrt(shape.head_size)).masked_fill(future, -math.inf).softmax(-1)
        heads.append(weights @ kv[:, :, head, shape.nope_size :])
    return torch.cat(heads, dim=-1) @ attention.out_proj.weight.T


@pytest.mark.parametrize("q_rank", [None, 24])
def test_latent_attention_equals_written_out_form(q_rank: int | None) -> None:
    torch.manual_seed(0)
    shape = replace(LATENT, q_rank=q_rank)
    config = replace(TINY, latent=shape, num_kv_heads=4)
    attention = LatentAttention(config, shape).double()
    rotary = make_rotary(config).double()
    x = torch.randn(2, 7, 64, dtype=torch.float64, requires_grad=True)
    leaves = [x, *attention.parameters()]
    received, expected = attention(x, rotary), latent_by_hand(attention, x)
    torch.testing.assert_close(received, expected, rtol=1e-5, atol=1e-7)  # the tables are made in float32
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * direction).sum(), leaves) for y in (received, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_latent_attention_gives_every_parameter_a_gradient() -> None:
    model = GPT(replace(TINY, latent=LATENT, num_kv_heads=4))
    tokens, targets = torch.randint(256, (2, 2, 16))
    model(tokens, targets).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    width, heads = 64, 4
    count = width * 24 + 24 + 24 * heads * 20 + width * (16 + 8) + 16 + 16 * heads * 22 + heads * 10 * width
    assert sum(p.numel() for p in model.blocks[0].attn.parameters()) == count


def test_yarn_divides_slow_frequencies_and_leaves_fast_ones() -> None:
    plain = RotaryPositions(64, 128, base=150_000.0)
    yarn = RotaryPositions(64, 128, base=150_000.0, scaling=32.0, original=4096)
    length = 0.1 * math.log(32.0) + 1.0
    torch.testing.assert_close(yarn.cos.square() + yarn.sin.square(), torch.full((128, 32), length**2))
    speed, stretched = (torch.atan2(r.sin[1], r.cos[1]) for r in (plain, yarn))
    ratio = speed / stretched
    turns = 4096 * speed / (2 * math.pi)
    torch.testing.assert_close(ratio[turns > 32], torch.ones_like(ratio[turns > 32]), rtol=1e-4, atol=0)
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 32.0), rtol=1e-3, atol=0)
    between = ratio[(turns < 32) & (turns > 1)]
    assert ((between > 1) & (between < 32)).all()
    assert (between.diff() > 0).all()


def test_learned_positions_are_added_and_trained() -> None:
    torch.manual_seed(0)
    model = GPT(replace(TINY, positions="learned"))
    tokens = torch.randint(256, (2, 16))
    assert torch.equal(model.embed(tokens), model.embedding(tokens) + model.places[:16])
    model(tokens, tokens).backward()
    assert model.places.grad[:16].any(-1).all()
    assert not model.places.grad[16:].any()
    assert isinstance(model.rotary, nn.Identity)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"positions": "sinus"}, "positions"),
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"latent": replace(LATENT, rope_size=7)}, "rope_size"),
        ({"activation": "tanh"}, "activation"),
        ({"norm": "batch"}, "norm"),
        ({"recompute_granularity": "some"}, "recompute_granularity"),
        ({"recompute_modules": ("attn",)}, "recompute_modules"),
        ({"recompute_num_layers": 0}, "recompute_num_layers"),
        ({"recompute_method": "all"}, "recompute_method"),
    ],
)
def test_attention_config_names_the_wrong_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(TINY, **change)
