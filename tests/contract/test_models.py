"""Steps of the reference models, captured and replayed, equal eager; the one that reads on the host is named."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.models import Mamba, MambaConfig, MoEConfig, MoEGPT
from stepgraph.models.experts import Experts, collect, dispatch, place_padded, place_sorted
from stepgraph.models.mamba import Mamba2
from stepgraph.models.moe import MoE
from tests.harness import Program, assert_captured_equals_eager

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
    assert error.where.file.endswith("stepgraph/models/experts.py")
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
