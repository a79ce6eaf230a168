"""Steps of the reference models, captured and replayed, equal eager; the one that reads on the host is named."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.lab.models import (
    GPT,
    GPTConfig,
    Hybrid,
    HybridConfig,
    LatentShape,
    Mamba,
    MambaConfig,
    MoEConfig,
    MoEGPT,
    VisionMoE,
    VisionMoEConfig,
)
from stepgraph.lab.models.experts import Experts, collect, dispatch, place_padded, place_sorted
from stepgraph.lab.models.linear import Linear, backward_dw
from stepgraph.lab.models.mamba import Mamba2
from stepgraph.lab.models.moe import MoE
from tests.harness import Program, assert_captured_equals_eager
from tests.module_harness import Note, Training, assert_graphed_equals_eager

CALLS = 8
TINY = MoEConfig.tiny()
DEEPSEEK = replace(TINY, scores="sigmoid", bias_rate=0.01, weight_scale=2.5, shared_ffn_size=32)


def random_batches(device: torch.device, length: int = 16) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(torch.randint(256, (2, length), device=device) for _ in range(2)) for _ in range(CALLS)]


def moe(config: MoEConfig, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Program]:
    """A step with the auxiliary loss and, where there is a bias, its update."""

    def build(device: torch.device) -> Program:
        model = MoEGPT(replace(config, dropout=0.1)).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            optimizer.zero_grad()
            out, aux_loss, load = model(tokens, targets)
            (out + 0.01 * aux_loss).backward()
            optimizer.step()
            if config.bias_rate:
                model.update_bias(load)
            return out.detach(), aux_loss.detach(), load

        return Program(step, random_batches(device), [model], [optimizer])

    return build


def mamba(dtype: torch.dtype, length: int) -> Callable[[torch.device], Program]:
    def build(device: torch.device) -> Program:
        model = Mamba(replace(MambaConfig.tiny(), dropout=0.1)).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, random_batches(device, length), [model], [optimizer])

    return build


MODELS = {
    "moe grouped": moe(TINY),
    "moe grouped bf16": moe(TINY, torch.bfloat16),
    "moe capacity": moe(replace(TINY, experts="capacity", capacity_factor=1.0)),
    "moe capacity bf16": moe(replace(TINY, experts="capacity"), torch.bfloat16),
    "moe bias and shared expert": moe(replace(DEEPSEEK, shared_gate=True)),
    "moe bias and shared expert bf16": moe(DEEPSEEK, torch.bfloat16),
    "moe qwen3 attention": moe(replace(TINY, head_dim=32, qk_norm=True)),
    "mamba": mamba(torch.float32, length=16),
    "mamba padded inside": mamba(torch.float32, length=13),
    "mamba bf16": mamba(torch.bfloat16, length=16),
}
IN_FULL = {"moe grouped", "moe capacity bf16", "moe bias and shared expert", "moe qwen3 attention", "mamba"}
"""What others come near enough to for `make test`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in IN_FULL else []) for name in MODELS]
)
def test_model_step_captured_equals_eager(name: str, device: torch.device) -> None:
    report = assert_captured_equals_eager(MODELS[name], device)
    assert set(report.eager_reasons) == {"warm-up"}
    assert report.segments == 1


def test_model_with_bias_moves_it_in_every_replay(device: torch.device) -> None:
    program = moe(DEEPSEEK)(device)
    (model,) = program.modules
    steps = [buffer for name, buffer in model.named_buffers() if name.endswith("bias_steps")]
    with stepgraph.capture(program.step) as step:
        for call, batch in enumerate(program.batches):
            before = [s.clone() for s in steps]
            *_, load = step(*batch)
            for old, new, of_layer in zip(before, steps, load, strict=True):
                assert torch.equal(new - old, torch.sign(of_layer.sum() - of_layer * TINY.num_experts)), call
        assert step.report().replays == CALLS - 3


def test_model_reading_counts_on_the_host_is_refused_at_its_line(device: torch.device) -> None:
    program = moe(replace(TINY, experts="loop"))(device)
    with stepgraph.capture(program.step) as step:
        for batch in program.batches[:3]:
            step(*batch)
        with pytest.raises(stepgraph.CaptureError) as caught:
            step(*program.batches[3])
    error = caught.value
    assert error.rule == "host-read"
    assert error.where is not None
    assert error.where.file.endswith("stepgraph/lab/models/experts.py")
    assert ".tolist()" in linecache.getline(error.where.file, error.where.line)


def test_experts_ways_agree_with_idle_experts(device: torch.device) -> None:
    """bfloat16, in which the grouped product is a kernel of its own on CUDA."""
    experts = Experts(num_experts=8, hidden_size=64, ffn_size=32).to(device, torch.bfloat16)
    choices = torch.stack([torch.randperm(5)[:2] for _ in range(40)]).to(device)  # nobody wants 5, 6 or 7
    ids = torch.arange(8, device=device)
    hidden = torch.randn(40, 64, device=device).bfloat16().requires_grad_()
    direction = torch.randn(80, 64, device=device).bfloat16()
    results = {}
    for way in ("padded", "loop", *(["grouped"] if experts.can_group() else [])):
        placement = place_padded(choices, ids, capacity=40) if way == "padded" else place_sorted(choices, ids)
        extra = () if way == "padded" else (placement.ends,)
        out = collect(getattr(experts, way)(dispatch(hidden, placement), *extra), placement)
        results[way] = (out, *torch.autograd.grad((out * direction).sum(), [hidden, *experts.parameters()]))
    for found in results.values():
        assert not found[2][5:].any()
        assert not found[3][5:].any()
        for one, two in zip(found, results["padded"], strict=True):
            scale = two.abs().max().item()  # bf16 keeps 8 bits, and kernels may add in another order
            torch.testing.assert_close(one, two, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["grouped", "capacity", "loop", "mamba"])
def test_model_layer_is_deterministic_by_default(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.use_deterministic_algorithms(False)
    if kind == "mamba":
        layer: torch.nn.Module = Mamba2(MambaConfig.tiny())
    else:
        layer = MoE(replace(TINY, experts=kind, shared_ffn_size=32, num_heads=4))
    layer = layer.to(device, dtype)
    x = torch.randn(4, 48, 64, device=device, dtype=dtype, requires_grad=True)
    runs = []
    for _ in range(3):
        out = layer(x)
        loss = out.float().square().sum() if kind == "mamba" else out[0].float().square().sum() + out[1]
        runs.append([loss, *torch.autograd.grad(loss, [x, *layer.parameters()])])
    assert all(torch.equal(one, two) for run in runs[1:] for one, two in zip(runs[0], run, strict=True))


# -- kinds of models


GPT2 = replace(
    GPTConfig.tiny(),
    num_kv_heads=4,
    positions="learned",
    norm="layer",
    activation="gelu",
    add_bias_linear=True,
    tie_embeddings=True,
)
GPT_OSS = replace(
    TINY,
    add_bias_linear=True,
    router_bias=True,
    attention_sinks=True,
    sliding_window=5,
    full_attention_interval=2,
    activation="clamped_swiglu",
    rope_scaling=4.0,
    rope_original_length=16,
)
LATENT = LatentShape(q_rank=24, kv_rank=16, nope_size=16, rope_size=8, value_size=16)
DEEPSEEK_V3 = replace(
    DEEPSEEK, latent=LATENT, num_kv_heads=4, num_expert_groups=4, top_groups=2, dense_layers=(0,), dense_ffn_size=96
)
KINDS: dict[str, tuple[Any, list[str]]] = {
    "gpt": (GPTConfig.tiny(), ["attn", "mlp"]),
    "gpt-2": (GPT2, ["attn", "mlp"]),
    "qkv bias and window": (replace(GPTConfig.tiny(), add_qkv_bias=True, sliding_window=4), ["attn"]),
    "qwen3": (replace(TINY, qk_norm=True, head_dim=32), ["attn", "moe_router", "moe_preprocess"]),
    "gpt-oss": (GPT_OSS, ["attn", "moe_router", "moe_preprocess"]),
    "deepseek-v3": (DEEPSEEK_V3, ["attn", "moe_router", "moe_preprocess"]),
    "drop": (replace(TINY, experts="drop", capacity_factor=1.0), ["attn", "moe"]),
    "mamba": (MambaConfig.tiny(), ["mamba"]),
    "nemotron-h": (HybridConfig.tiny(), ["mamba", "attn"]),
    "vision with experts": (VisionMoEConfig.tiny(), ["attn", "moe_router", "moe_preprocess"]),
}
"""One small model of each kind that a recipe has, and the scope that it is captured by."""
MAKERS: dict[type, Any] = {
    GPTConfig: GPT,
    MoEConfig: MoEGPT,
    MambaConfig: Mamba,
    HybridConfig: Hybrid,
    VisionMoEConfig: VisionMoE,
}


def loss_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.out + 0.01 * out.aux_loss


def whole_step(config: Any, **settings: Any) -> Callable[[torch.device], Program]:
    """A step of a model of any kind, with two microbatches; delayed weight gradients are computed in between."""

    def build(device: torch.device) -> Program:
        model = MAKERS[type(config)](replace(config, dropout=0.1, **settings)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for parameter in model.parameters() if model.config.gradient_accumulation_fusion else ():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad = parameter.main_grad  # what the optimizer reads

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=not model.config.gradient_accumulation_fusion)
            for one in range(2):
                loss = loss_of(model(tokens[one : one + 1], targets=targets[one : one + 1]))
                loss.backward()
                if model.config.delay_wgrad_compute:
                    model.backward_dw()
            optimizer.step()
            return loss.detach()

        return Program(step, random_batches(device), [model], [optimizer])

    return build


def kinds(*quick: str) -> list[Any]:
    """All kinds; those that are not quick enough, or near others, for the slow run only."""
    return [pytest.param(kind, marks=[] if kind in quick else [pytest.mark.slow]) for kind in KINDS]


@pytest.mark.parametrize("kind", kinds("gpt-oss", "deepseek-v3"))
def test_kind_of_model_captured_equals_eager(kind: str, device: torch.device) -> None:
    report = assert_captured_equals_eager(whole_step(KINDS[kind][0]), device)
    assert set(report.eager_reasons) == {"warm-up"}
    assert report.segments == 1


@pytest.mark.parametrize("kind", kinds("gpt-2", "nemotron-h"))
def test_kind_of_model_with_graphed_parts_equals_eager(kind: str, device: torch.device) -> None:
    config, scope = KINDS[kind]

    def build(device: torch.device) -> Training:
        model = MAKERS[type(config)](replace(config, dropout=0.1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step(batch: Any, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(batch[0], targets=batch[1]))
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        return Training(model, step, random_batches(device), [optimizer])

    assert_graphed_equals_eager(build, device, scope)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("gpt", {"recompute_granularity": "full"}, marks=pytest.mark.slow),
        ("gpt", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}),
        ("gpt", {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")}),
        (
            "deepseek-v3",
            {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "shared_experts", "mla_up_proj")},
        ),
        ("qwen3", {"recompute_granularity": "selective", "recompute_modules": ("moe",)}),
        ("gpt", {"delay_wgrad_compute": True}),
        ("gpt-2", {"gradient_accumulation_fusion": True, "tie_embeddings": False}),
        ("nemotron-h", {"delay_wgrad_compute": True, "gradient_accumulation_fusion": True}),
        ("gpt", {"attention_dropout": 0.3}),
    ],
    ids=str,
)
def test_compute_setting_captured_equals_eager(kind: str, settings: dict[str, Any], device: torch.device) -> None:
    report = assert_captured_equals_eager(whole_step(KINDS[kind][0], **settings), device)
    assert report.segments == 1


@pytest.mark.parametrize("fused", [False, True])
def test_callables_split_delayed_weight_gradients(fused: bool, device: torch.device) -> None:
    """The graphs of an order with -1.5 run them in `backward_dw()`, and equal an eager model's."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(Linear(8, 8), torch.nn.Tanh()).to(device) for _ in range(2)]
    for layer in layers:
        layer[0].delay_wgrad_compute, layer[0].gradient_accumulation_fusion = True, fused
    eager = copy.deepcopy(layers)
    for layer in (*layers, *eager) if fused else ():
        layer[0].weight.main_grad = torch.zeros_like(layer[0].weight)
    samples = tuple((torch.randn(4, 8, device=device, requires_grad=True),) for _ in range(2))
    graphed = stepgraph.make_graphed_callables(
        tuple(layers), samples, order=[1, 2, -2, -1, -2.5, -1.5], num_warmup_iters=1
    )
    for _ in range(3):
        x = torch.randn(4, 8, device=device)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        for model, given in ((eager, two), (graphed, one)):
            out = model[1](model[0](given))
            out.square().sum().backward()
        for model in graphed[::-1]:
            model.backward_dw()
        for layer in eager:
            backward_dw(layer)
        assert torch.equal(one.grad, two.grad)
        for ours, expected in zip(layers, eager, strict=True):
            one, two = (layer[0].weight.main_grad if fused else layer[0].weight.grad for layer in (ours, expected))
            assert torch.equal(one, two)
            assert one.any()


@pytest.mark.parametrize("order", [[1, -1, -1.5], None])
def test_callables_with_delayed_weights_of_constant_inputs(order: list[float] | None, device: torch.device) -> None:
    """Without a gradient of the input all is in the W part; without a W part, all is in the backward."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(Linear(8, 8), torch.nn.Tanh()).to(device)
    layer[0].delay_wgrad_compute = True
    eager, x = copy.deepcopy(layer), torch.randn(4, 8, device=device)
    (graphed,) = stepgraph.make_graphed_callables((layer,), ((x.clone(),),), order=order, num_warmup_iters=1)
    for _ in range(2):
        graphed(x).square().sum().backward()
        assert (layer[0].weight.grad is None) == (order is not None)
        if order is not None:
            graphed.backward_dw()
        with pytest.raises(RuntimeError, match="no weight gradient waits"):
            backward_dw(layer)
        eager(x).square().sum().backward()
        backward_dw(eager)
        assert torch.equal(layer[0].weight.grad, eager[0].weight.grad)
        layer.zero_grad()
        eager.zero_grad()


def test_graphed_modules_with_delayed_weights_equal_eager(device: torch.device) -> None:
    torch.manual_seed(0)
    model = GPT(replace(GPTConfig.tiny(), num_layers=1, delay_wgrad_compute=True)).to(device)
    eager, tokens = copy.deepcopy(model), torch.randint(256, (2, 16), device=device)
    with stepgraph.graph_modules(model, ["attn"], warmup=1) as handle:
        for _ in range(4):
            for each in (model, eager):
                each.zero_grad()
                each(tokens, tokens).backward()
                each.backward_dw()
            for ours, expected in zip(model.parameters(), eager.parameters(), strict=True):
                assert torch.equal(ours.grad, expected.grad)
        assert handle.replays == 3
