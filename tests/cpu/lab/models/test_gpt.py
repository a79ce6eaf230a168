"""The GPT against written-out forms of its parts, and the properties that the demo and benchmarks rest on."""

import math
from dataclasses import replace

import pytest
import torch

from stepgraph.lab.models import GPT, GPTConfig
from stepgraph.lab.models.attention import Attention, RotaryPositions
from stepgraph.lab.models.language_model import RMSNorm

TINY = GPTConfig.tiny()


def make_model(config: GPTConfig = TINY, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def random_tokens(batch: int = 2, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def rotate_by_hand(x: torch.Tensor, base: float) -> torch.Tensor:
    """Each pair as a complex number, turned by position times frequency."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attend_by_hand(attention: Attention, x: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """Softmax attention in float64, one query head at a time, with its group's key and value head."""
    batch, length, _ = x.shape
    size, x = config.head_size, x.double()
    q = (x @ attention.q_proj.weight.double().T).view(batch, length, config.num_heads, size).transpose(1, 2)
    k = (x @ attention.k_proj.weight.double().T).view(batch, length, config.num_kv_heads, size).transpose(1, 2)
    v = (x @ attention.v_proj.weight.double().T).view(batch, length, config.num_kv_heads, size).transpose(1, 2)
    if config.qk_norm:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * norm.weight.double()
            for x, norm in ((q, attention.q_norm), (k, attention.k_norm))
        )
    q, k = rotate_by_hand(q, config.rope_base), rotate_by_hand(k, config.rope_base)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for head in range(config.num_heads):
        group = head // (config.num_heads // config.num_kv_heads)
        scores = (q[:, head] @ k[:, group].transpose(-1, -2) / math.sqrt(size)).masked_fill(future, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, group])
    return torch.cat(heads, dim=-1) @ attention.out_proj.weight.double().T


@pytest.mark.parametrize(
    "change", [{"num_kv_heads": 1}, {"num_kv_heads": 2}, {"num_kv_heads": 4}, {"head_dim": 24}, {"qk_norm": True}]
)
def test_attention_equals_written_out_form(change: dict[str, int]) -> None:
    config = replace(TINY, **change)
    model = make_model(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    x = torch.randn(2, 12, config.hidden_size)
    expected = attend_by_hand(model.blocks[0].attn, x, config)
    # float32 against float64: a few roundings of values around 1e-2.
    torch.testing.assert_close(model.blocks[0].attn(x, model.rotary).double(), expected, rtol=1e-4, atol=1e-6)


def test_rotary_scores_depend_on_distance_only() -> None:
    rotary = RotaryPositions(head_size=16, max_seq_len=32, base=10_000.0)
    q, k = (torch.randn(16).expand(1, 1, 32, 16) for _ in range(2))
    scores = (rotary(q) @ rotary(k).transpose(-1, -2))[0, 0]
    for distance in (0, 3, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_rms_norm_equals_written_out_form() -> None:
    x = torch.randn(3, 64)
    norm = RMSNorm(64, eps=1e-5)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def test_gpt_is_causal() -> None:
    model, tokens = make_model(), random_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-4)


def test_gpt_loss_is_mean_cross_entropy_of_its_logits() -> None:
    model, tokens, targets = make_model(), random_tokens(), random_tokens(seed=2)
    log_probabilities = model(tokens).double().log_softmax(-1)
    expected = -log_probabilities.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets).double(), expected, rtol=1e-5, atol=0)


def test_gpt_loss_at_init_is_near_uniform() -> None:
    loss = make_model()(random_tokens(4, 64), random_tokens(4, 64, seed=2))
    assert loss.item() == pytest.approx(math.log(TINY.vocab_size), abs=0.1)


def test_gpt_tied_embeddings_are_one_parameter() -> None:
    untied, tied = make_model(), make_model(replace(TINY, tie_embeddings=True))
    assert tied.head.weight is tied.embedding.weight
    saved = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert saved == TINY.vocab_size * TINY.hidden_size
    tied(random_tokens(), random_tokens(seed=2)).backward()
    # Rows of tokens that never came in get a gradient too: from the head.
    assert tied.embedding.weight.grad is not None
    assert (tied.embedding.weight.grad.abs().sum(-1) > 0).all()


def test_gpt_init_follows_the_global_seed() -> None:
    first, again, other = make_model(seed=3), make_model(seed=3), make_model(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_gpt_dropout_acts_in_training_only() -> None:
    model, tokens = make_model(replace(TINY, dropout=0.5)), random_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_runs_in_bfloat16_with_float32_loss() -> None:
    tokens, targets = random_tokens(), random_tokens(seed=2)
    expected = make_model()(tokens, targets)
    model = make_model().to(torch.bfloat16)
    loss = model(tokens, targets)
    loss.backward()
    assert model(tokens).dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    # bf16 keeps 8 bits: logits of size 0.2 move by about 1e-3.
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(make_model()(tokens, targets), expected, rtol=0, atol=1e-2)


def test_gpt_every_parameter_gets_a_gradient() -> None:
    model = make_model()
    model(random_tokens(), random_tokens(seed=2)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(("name", "count"), [("gpt2_small", 124_439_808), ("gpt_162m", 162_220_800)])
def test_gpt_named_shapes_have_their_sizes(name: str, count: int) -> None:
    """GPT-2 small as its weights on Hugging Face (openai-community/gpt2) count, and the benchmarks' model."""
    with torch.device("meta"):
        model = GPT(getattr(GPTConfig, name)())
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 65}, "hidden_size"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_gpt_config_names_the_wrong_field(change: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(TINY, **change)


def test_gpt_refuses_a_sequence_beyond_its_tables() -> None:
    with pytest.raises(ValueError, match="max_seq_len"):
        make_model()(random_tokens(1, TINY.max_seq_len + 1))
