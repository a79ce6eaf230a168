"""The mixture of experts against a loop over tokens in float64, and the properties that graphs of its parts rest on."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stepgraph.lab.models import MoEConfig, MoEGPT
from stepgraph.lab.models.attention import RotaryPositions
from stepgraph.lab.models.experts import Experts, collect, dispatch, place_padded, place_sorted
from stepgraph.lab.models.moe import MoE, MoEBlock, Router, Routing

TINY = MoEConfig.tiny()
SMALL = replace(TINY, hidden_size=16, ffn_size=8, num_experts=6)
WAYS = {
    "grouped": {"experts": "grouped"},
    "capacity": {"experts": "capacity", "capacity_factor": 6.0},
    "drop": {"experts": "drop", "capacity_factor": 6.0},
    "loop": {"experts": "loop"},
}
"""Each way to run experts, with nothing dropped."""
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax not normalized": {"normalize_weights": False},
    "sigmoid with bias": {"scores": "sigmoid", "bias_rate": 0.05, "weight_scale": 2.5},
    "shared expert": {"shared_ffn_size": 12},
    "gated shared expert": {"shared_ffn_size": 12, "shared_gate": True},
    "one expert": {"top_k": 1},
    "biases": {"add_bias_linear": True, "router_bias": True, "shared_ffn_size": 12},
    "clamped with biases": {"activation": "clamped_swiglu", "add_bias_linear": True, "router_bias": True},
    "not gated": {"activation": "relu2", "add_bias_linear": True},
    "groups": {"num_expert_groups": 3, "top_groups": 2, "scores": "sigmoid", "bias_rate": 0.05},
}


def make_layer(config: MoEConfig, seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    layer = MoE(config)
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 1.5)
        layer.router.gate.weight.normal_()  # scores far enough apart to choose by
        if layer.router.bias_steps is not None:
            layer.router.bias_steps += torch.arange(-3, config.num_experts - 3)
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return layer


def make_model(config: MoEConfig = TINY, seed: int = 0) -> MoEGPT:
    torch.manual_seed(seed)
    return MoEGPT(config)


def random_tokens(batch: int = 2, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def mlp_by_hand(x: torch.Tensor, activation: str, first: list[torch.Tensor], down: torch.Tensor) -> torch.Tensor:
    """An MLP of any activation; the first matrices have their bias as a last column."""
    inner = [weight[:, :-1] @ x + weight[:, -1] for weight in first]
    if activation == "relu2":
        mixed = inner[0].relu() ** 2
    elif activation == "swiglu":
        mixed = inner[0] * torch.sigmoid(inner[0]) * inner[1]
    else:
        gate, up = torch.minimum(inner[0], torch.tensor(7.0)), inner[1].clamp(-7.0, 7.0)
        mixed = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return down[:, :-1] @ mixed + down[:, -1]


def with_bias(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    column = torch.zeros_like(weight[..., :1]) if bias is None else bias[..., None]
    return torch.cat((weight, column), dim=-1)


def choices_by_hand(config: MoEConfig, wanted: list[float]) -> list[int]:
    """The best experts of the best groups; a group is worth its two best."""
    size = config.num_experts // config.num_expert_groups
    groups = [list(range(start, start + size)) for start in range(0, config.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[:2]))
    allowed = [e for group in groups[: config.top_groups] for e in group]
    return sorted(allowed, key=lambda e: -wanted[e])[: config.top_k]


def swiglu_by_hand(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    inner = gate @ x
    return down @ (inner * torch.sigmoid(inner) * (up @ x))


def layer_by_hand(layer: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """One token after the other, in the type of `x`: output, auxiliary loss, and how often each expert was chosen."""
    config, outputs = layer.config, []
    load, shares = [0] * config.num_experts, []
    gate_up = with_bias(layer.experts.gate_up_proj, layer.experts.gate_up_bias)
    down = with_bias(layer.experts.down_proj, layer.experts.down_bias)
    router_bias = 0.0 if layer.router.gate.bias is None else layer.router.gate.bias
    for token in x.flatten(0, -2):
        h = token / (token.square().mean() + config.norm_eps).sqrt() * layer.norm.weight
        logits = layer.router.gate.weight @ h + router_bias
        raw = logits.exp() if config.scores == "softmax" else 1 / (1 + (-logits).exp())
        shares.append(raw / raw.sum())
        scores = shares[-1] if config.scores == "softmax" else raw
        steps = layer.router.bias_steps
        wanted = [s.item() + (0 if steps is None else steps[e].item() * config.bias_rate) for e, s in enumerate(scores)]
        chosen = choices_by_hand(config, wanted)
        total = sum(scores[e] for e in chosen) if config.normalize_weights else 1.0
        out = torch.zeros_like(h)
        for e in chosen:
            load[e] += 1
            first = list(gate_up[e].split(config.ffn_size))
            out = out + scores[e] / total * config.weight_scale * mlp_by_hand(h, config.activation, first, down[e])
        if layer.shared is not None:
            mlp, shared_gate = layer.shared.mlp, layer.shared.gate
            first, last = (
                [with_bias(linear.weight, linear.bias) for linear in linears]
                for linears in ((mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
            )
            shared = mlp_by_hand(h, config.activation, first, last[0])
            out = out + shared * (1.0 if shared_gate is None else torch.sigmoid(shared_gate.weight @ h))
        outputs.append(out)
    frequency = [count / sum(load) for count in load]
    mean_share = torch.stack(shares).mean(0)
    aux_loss = config.num_experts * sum(f * p for f, p in zip(frequency, mean_share, strict=True))
    return torch.stack(outputs).view_as(x), aux_loss, load


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("router", ROUTERS)
def test_moe_equals_written_out_form_with_gradients(router: str, way: str) -> None:
    layer = make_layer(replace(SMALL, **ROUTERS[router], **WAYS[way])).double()
    x = torch.randn(2, 7, SMALL.hidden_size, dtype=torch.float64, requires_grad=True)
    leaves = {"x": x, **dict(layer.named_parameters())}
    out, aux_loss, load = layer(x)
    expected, expected_aux, expected_load = layer_by_hand(layer, x)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(aux_loss, expected_aux, rtol=1e-9, atol=0)
    assert load.tolist() == expected_load
    direction = torch.randn_like(out)
    received = torch.autograd.grad((out * direction).sum() + aux_loss, list(leaves.values()))
    wanted = torch.autograd.grad((expected * direction).sum() + expected_aux, list(leaves.values()))
    for name, one, two in zip(leaves, received, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("way", WAYS)
def test_moe_gradients_pass_gradcheck(way: str) -> None:
    layer = make_layer(replace(SMALL, hidden_size=8, num_experts=4, **WAYS[way])).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *weights: layer(x)[:2], (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_ways_agree_with_idle_experts(dtype: torch.dtype) -> None:
    """One routing, three ways: results, gradients of the tokens and of all weights."""
    torch.manual_seed(0)
    experts = Experts(num_experts=6, hidden_size=16, ffn_size=8).to(dtype)
    choices = torch.tensor([[5, 1], [1, 3], [3, 5], [1, 5]])  # nobody wants 0, 2 or 4
    ids, hidden = torch.arange(6), torch.randn(4, 16).to(dtype).requires_grad_()
    direction = torch.randn(8, 16).to(dtype)
    results = {}
    for way in ("grouped", "padded", "loop"):
        placement = place_padded(choices, ids, capacity=4) if way == "padded" else place_sorted(choices, ids)
        extra = () if way == "padded" else (placement.ends,)
        out = collect(getattr(experts, way)(dispatch(hidden, placement), *extra), placement)
        results[way] = (out, *torch.autograd.grad((out * direction).sum(), [hidden, *experts.parameters()]))
    gradient = results["grouped"][2]
    assert not gradient[[0, 2, 4]].any()
    assert gradient[[1, 3, 5]].any()
    # bf16 keeps 8 bits, and products of different shape may add in another order
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for other in ("padded", "loop"):
        for one, two in zip(results["grouped"], results[other], strict=True):
            torch.testing.assert_close(one, two, **tolerance)


def test_experts_group_in_bfloat16_where_widths_are_aligned() -> None:
    experts = Experts(num_experts=4, hidden_size=16, ffn_size=8)
    assert not experts.can_group()
    assert experts.bfloat16().can_group()
    assert not Experts(num_experts=4, hidden_size=16, ffn_size=12).bfloat16().can_group()
    with torch.autocast("cpu", torch.bfloat16):
        assert experts.float().can_group()


def test_place_sorted_keeps_the_order_of_tokens() -> None:
    placement = place_sorted(torch.tensor([[2, 0], [0, 3], [3, 2]]), torch.arange(5))
    assert placement.rows.tolist() == [1, 2, 0, 5, 3, 4]  # experts 0, 0, 2, 2, 3, 3
    assert placement.ends.tolist() == [2, 2, 4, 6, 6]
    assert placement.ends.dtype is torch.int32
    assert placement.slots[placement.rows].tolist() == list(range(6))
    assert placement.filled is None
    assert placement.kept is None


def test_place_padded_drops_the_last_tokens_of_a_full_expert() -> None:
    choices = torch.tensor([[0, 1], [0, 2], [2, 0], [0, 3]])
    placement = place_padded(choices, torch.arange(5), capacity=2)
    assert placement.filled is not None
    assert placement.kept is not None
    held = [row if full else None for row, full in zip(placement.rows.tolist(), placement.filled.tolist(), strict=True)]
    assert held == [0, 2, 1, None, 3, 4, 7, None, None, None]
    assert placement.kept.view(4, 2).tolist() == [[True, True], [True, True], [True, False], [False, True]]
    slots = [slot for slot, kept in zip(placement.slots.tolist(), placement.kept.tolist(), strict=True) if kept]
    assert slots == [0, 2, 1, 4, 5, 6]


def test_dispatch_and_collect_pass_gradcheck_with_drops() -> None:
    choices = torch.tensor([[0, 1], [0, 2], [2, 0], [0, 3]])
    placement = place_padded(choices, torch.arange(4), capacity=2)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    slots = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dispatch(x, placement), (hidden,))
    assert torch.autograd.gradcheck(lambda x: collect(x, placement), (slots,))


@pytest.mark.parametrize(("factor", "capacity"), [(1.0, 5), (1.25, 6), (0.1, 1), (100.0, 14)])
def test_moe_capacity_is_a_multiple_of_the_even_share(factor: float, capacity: int) -> None:
    layer = make_layer(replace(SMALL, experts="capacity", capacity_factor=factor))
    placement = layer.preprocess(torch.zeros(14, 2, dtype=torch.int64))  # 28 choices of 6 experts; 14 tokens at most
    assert placement.rows.shape == (6 * capacity,)


@pytest.mark.parametrize("way", ["capacity", "drop"])
def test_moe_past_capacity_drops_the_choice_and_nothing_else(way: str) -> None:
    config = replace(SMALL, experts=way, capacity_factor=0.5)
    layer = make_layer(config).double()
    x = torch.randn(1, 12, SMALL.hidden_size, dtype=torch.float64, requires_grad=True)
    out, _, load = layer(x)
    routing = layer.route(x)
    capacity, seen, expected = 2, [0] * 6, []
    for token, weights, choices in zip(routing.hidden, routing.weights, routing.choices.tolist(), strict=True):
        total = torch.zeros_like(token)
        for weight, e in zip(weights, choices, strict=True):
            seen[e] += 1
            if seen[e] <= capacity:
                gate, up = layer.experts.gate_up_proj[e].split(config.ffn_size)
                total = total + weight * swiglu_by_hand(token, gate, up, layer.experts.down_proj[e])
        expected.append(total)
    assert max(seen) > capacity
    assert load.tolist() == seen  # what was wanted, not what there was room for
    torch.testing.assert_close(out[0], torch.stack(expected), rtol=1e-9, atol=1e-10)
    received = torch.autograd.grad(out.square().sum(), [x, *layer.experts.parameters()])
    wanted = torch.autograd.grad(torch.stack(expected).square().sum(), [x, *layer.experts.parameters()])
    torch.testing.assert_close(received, wanted, rtol=1e-8, atol=1e-9)


def test_router_auxiliary_loss_is_one_if_even_larger_if_crowded() -> None:
    config = replace(SMALL, top_k=1, num_experts=4, hidden_size=4, num_heads=1, num_kv_heads=1)
    router = Router(config)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(4) * 50)
    assert router(torch.eye(4))[3].item() == pytest.approx(1.0)
    assert router(torch.eye(4)[[0, 0, 0, 0]])[3].item() == pytest.approx(4.0)


def test_router_bias_steers_choices_but_not_weights() -> None:
    config = replace(SMALL, scores="sigmoid", bias_rate=10.0, normalize_weights=False)
    router = Router(config)
    hidden = torch.randn(9, SMALL.hidden_size)
    assert router.bias_steps is not None
    router.bias_steps[4] = 1  # a bias above every score
    weights, choices, load, _ = router(hidden)
    assert choices[:, 0].tolist() == [4] * 9
    assert load[4].item() == 9
    torch.testing.assert_close(weights, router.gate(hidden).sigmoid().gather(1, choices))


def test_router_bias_update_follows_the_sign_of_the_load_error() -> None:
    router = Router(replace(SMALL, bias_rate=0.001))
    router.update_bias(torch.tensor([7, 3, 5, 5, 0, 10]))
    assert router.bias_steps is not None
    assert router.bias_steps.tolist() == [-1, 1, 0, 0, 1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_bias_moves_loads_toward_equal(dtype: torch.dtype) -> None:
    config = replace(SMALL, scores="sigmoid", bias_rate=0.002)
    router = Router(config).to(dtype)
    with torch.no_grad():
        router.gate.weight[0] += 0.5  # an expert that everybody likes
    hidden = torch.randn(512, SMALL.hidden_size).abs().to(dtype)
    crowding = []
    for _ in range(400):
        _, _, load, _ = router(hidden)
        crowding.append(load.max().item() * config.num_experts / load.sum().item())
        router.update_bias(load)
    assert crowding[0] > 2.0
    assert max(crowding[-20:]) < 1.25


def test_router_bias_counts_on_in_bfloat16() -> None:
    router = Router(replace(SMALL, bias_rate=0.001))
    assert router.bias_steps is not None
    router.bias_steps += 1000  # the next number that bf16 knows is 1004
    router.bfloat16().update_bias(torch.tensor([7, 3, 5, 5, 0, 10]))
    assert router.bias_steps.tolist() == [999, 1001, 1000, 1000, 1001, 999]


def test_moe_update_bias_without_a_bias_names_the_field() -> None:
    with pytest.raises(ValueError, match="bias_rate"):
        make_model().update_bias(torch.ones(2, 8, dtype=torch.int64))


def test_moe_update_bias_gives_each_layer_its_own_load() -> None:
    model = make_model(replace(TINY, bias_rate=0.01, num_experts=2, top_k=1))
    model.update_bias(torch.tensor([[3, 1], [0, 4]]))
    assert [block.moe.router.bias_steps.tolist() for block in model.blocks] == [[-1, 1], [1, -1]]
    assert "blocks.0.moe.router.bias_steps" in model.state_dict()


def test_moe_forward_calls_its_parts_with_tensors_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of one part is put in its place on the instance, and sees all that passes."""
    layer = make_layer(replace(SMALL, shared_ffn_size=8))
    called: list[str] = []

    def watched(name: str) -> Any:
        part = getattr(layer, name)

        def call(*args: Any) -> Any:
            called.append(name)
            out = part(*args)
            leaves = torch.utils._pytree.tree_leaves((args, out))
            assert all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
            return out

        return call

    x = torch.randn(2, 3, SMALL.hidden_size)
    expected = layer(x)
    parts = ("route", "preprocess", "run_experts", "combine")
    for name in parts:
        monkeypatch.setattr(layer, name, watched(name))
    received = layer(x)
    assert tuple(called) == parts
    assert all(torch.equal(one, two) for one, two in zip(expected, received, strict=True))


class Apart(torch.autograd.Function):
    """A part with an autograd graph of its own: one node in the model's, as a graphed part is."""

    @staticmethod
    def forward(ctx: Any, part: Any, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.outputs = part(ctx.x)
        ctx.mark_non_differentiable(*(t for t in ctx.outputs if not t.is_floating_point()))
        return tuple(t.detach() for t in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = [(out, grad) for out, grad in zip(ctx.outputs, grads, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, ctx.x.grad


def test_moe_route_differentiated_apart_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(apart: bool) -> list[torch.Tensor | None]:
        model = make_model(replace(TINY, shared_ffn_size=32, shared_gate=True))
        for block in model.blocks:
            route = block.moe.route
            if apart:
                monkeypatch.setattr(block.moe, "route", lambda x, route=route: Routing(*Apart.apply(route, x)))
        out, aux_loss, _ = model(random_tokens(), random_tokens(seed=2))
        (out + 0.01 * aux_loss).backward()
        return [p.grad for p in model.parameters()]

    for one, two in zip(gradients(apart=False), gradients(apart=True), strict=True):
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_step_is_equal_to_itself(way: str, dtype: torch.dtype) -> None:
    def step() -> list[torch.Tensor]:
        model = make_model(replace(TINY, shared_ffn_size=32, **WAYS[way])).to(dtype)
        out, aux_loss, load = model(random_tokens(), random_tokens(seed=2))
        (out + 0.01 * aux_loss).backward()
        return [out, aux_loss, load, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(torch.equal(one, two) for one, two in zip(step(), step(), strict=True))


def test_moe_forward_and_backward_change_no_state() -> None:
    model = make_model(replace(TINY, bias_rate=0.01))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    out, aux_loss, _ = model(random_tokens(), random_tokens(seed=2))
    (out + aux_loss).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_moe_model_returns_mean_loss_and_load_of_each_layer() -> None:
    model, tokens, targets = make_model(), random_tokens(), random_tokens(seed=2)
    logits, aux_loss, load = model(tokens)
    assert logits.shape == (2, 16, TINY.vocab_size)
    assert load.shape == (2, 8)
    assert load.sum(1).tolist() == [2 * 16 * 2] * 2
    assert aux_loss.shape == ()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets).out, expected)
    assert expected.item() == pytest.approx(math.log(TINY.vocab_size), abs=0.15)


def test_moe_block_drops_expert_outputs_in_training_only() -> None:
    torch.manual_seed(0)
    block, rotary = MoEBlock(replace(TINY, dropout=0.5)), RotaryPositions(16, 64, 10_000.0)
    torch.nn.init.zeros_(block.attn.out_proj.weight)
    x = torch.randn(2, 8, TINY.hidden_size)
    assert not torch.equal(block(x, rotary)[0], block(x, rotary)[0])
    block.eval()
    assert torch.equal(block(x, rotary)[0], block(x, rotary)[0])


def test_moe_model_is_causal() -> None:
    model, tokens = make_model(), random_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY.vocab_size
    before, after = model(tokens).out, model(changed).out
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_moe_runs_in_bfloat16_and_under_autocast(way: str) -> None:
    config = replace(TINY, qk_norm=True, shared_ffn_size=32, shared_gate=True, **WAYS[way])
    tokens, targets = random_tokens(), random_tokens(seed=2)
    expected = make_model(config)(tokens, targets).out
    model = make_model(config).to(torch.bfloat16)
    out, aux_loss, _ = model(tokens, targets)
    (out + 0.01 * aux_loss).backward()
    assert model(tokens).out.dtype is torch.bfloat16
    assert (out.dtype, aux_loss.dtype) == (torch.float32, torch.float32)
    # bf16 keeps 8 bits, and close scores may choose otherwise: experts start small, so the loss moves little.
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a norm's types differ
        torch.testing.assert_close(make_model(config)(tokens, targets).out, expected, rtol=0, atol=2e-2)


def test_moe_every_parameter_gets_a_gradient() -> None:
    model = make_model(replace(TINY, shared_ffn_size=32, shared_gate=True, qk_norm=True))
    out, aux_loss, _ = model(random_tokens(4, 32), random_tokens(4, 32, seed=2))
    (out + 0.01 * aux_loss).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_moe_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        out, _, load = MoEGPT(MoEConfig.qwen3_30b_a3b(num_layers=1))(torch.empty(2, 64, dtype=torch.int64))
    assert out.shape == (2, 64, 151936)
    assert load.shape == (1, 128)


def test_qwen3_30b_a3b_has_its_published_size() -> None:
    with torch.device("meta"):
        model = MoEGPT(MoEConfig.qwen3_30b_a3b())
        cut = MoEGPT(MoEConfig.qwen3_30b_a3b(num_layers=4))
    assert sum(p.numel() for p in model.parameters()) == 30_532_122_624
    assert len(cut.blocks) == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"top_k": 9}, "top_k"),
        ({"num_experts": 0}, "num_experts"),
        ({"experts": "dense"}, "experts.*'loop'"),
        ({"scores": "tanh"}, "scores"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"bias_rate": -0.1}, "bias_rate"),
        ({"shared_gate": True}, "shared_ffn_size"),
        ({"head_dim": 5}, "head_dim"),
    ],
)
def test_moe_config_names_the_wrong_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"MoEConfig: .*{named}"):
        replace(TINY, **change)


def test_moe_refuses_a_sequence_beyond_its_tables() -> None:
    with pytest.raises(ValueError, match=r"MoEGPT\.forward.*max_seq_len"):
        make_model()(random_tokens(1, TINY.max_seq_len + 1))


@pytest.mark.parametrize("change", [{}, {"add_bias_linear": True, "activation": "clamped_swiglu"}], ids=str)
def test_moe_drop_and_capacity_agree_in_bfloat16(change: dict[str, Any]) -> None:
    """In bfloat16 `drop` runs in the grouped kernel, `capacity` in a batched one: the same choices are dropped."""
    x = torch.randn(2, 20, 64).bfloat16()
    results = []
    for way in ("drop", "capacity"):
        layer = make_layer(replace(TINY, experts=way, capacity_factor=0.75, **change)).bfloat16()
        given = x.clone().requires_grad_()
        out = layer(given)[0]
        out.float().square().sum().backward()
        results.append([out, given.grad, *(parameter.grad for parameter in layer.experts.parameters())])
        placement = layer.preprocess(layer.route(given).choices)
        assert (placement.rows.shape == placement.slots.shape) == (way == "drop")
        assert not placement.kept.all()
    for one, two in zip(*results, strict=True):
        scale = two.abs().max().item()  # bf16 keeps 8 bits, and kernels add in another order
        torch.testing.assert_close(one, two, rtol=0, atol=0.03 * scale)


def test_moe_model_with_dense_layers_among_experts() -> None:
    config = replace(TINY, num_layers=3, dense_layers=(0, 2), dense_ffn_size=96, bias_rate=0.01)
    model, tokens = make_model(config), random_tokens()
    assert [type(block).__name__ for block in model.blocks] == ["Block", "MoEBlock", "Block"]
    assert model.blocks[0].mlp.up_proj.weight.shape == (96, 64)
    out, _, load = model(tokens, tokens)
    assert load.shape == (1, 8)
    out.backward()
    model.update_bias(load)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_expert_groups": 3}, "num_expert_groups"),
        ({"num_expert_groups": 8, "top_groups": 1}, "top_groups"),
        ({"dense_layers": (2,), "dense_ffn_size": 8}, "dense_layers"),
        ({"dense_layers": (0,)}, "dense_ffn_size"),
        ({"dense_layers": (0, 1), "dense_ffn_size": 8}, "dense_layers"),
    ],
)
def test_moe_config_names_wrong_groups_and_layers(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(TINY, **change)
