"""The linear layer whose weight gradient is delayed or added to `main_grad`, against `nn.Linear`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stepgraph.engine.record.pair.split_backward import input_gradients
from stepgraph.lab.models import GPT, GPTConfig, Hybrid, HybridConfig
from stepgraph.lab.models.linear import Linear, backward_dw


def pair(
    *, bias: bool = False, delay: bool = False, fused: bool = False, sizes: tuple[int, int] = (8, 6)
) -> tuple[nn.Linear, Linear]:
    """A torch layer and ours with equal weights."""
    plain, ours = nn.Linear(*sizes, bias), Linear(*sizes, bias)
    ours.load_state_dict(plain.state_dict())
    ours.delay_wgrad_compute, ours.gradient_accumulation_fusion = delay, fused
    if fused:
        ours.weight.main_grad = torch.zeros_like(ours.weight)
    return plain, ours


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_linear_gradients_are_those_of_torch(bias: bool, delay: bool, fused: bool) -> None:
    plain, ours = pair(bias=bias, delay=delay, fused=fused)
    for _ in range(2):  # the second backward adds to the first
        x = torch.randn(2, 3, 8, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        plain(x).square().sum().backward()
        ours(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        if delay:
            assert ours.need_backward_dw()
            ours.backward_dw()
        assert not ours.need_backward_dw()
    if fused:
        assert ours.weight.grad is None
        torch.testing.assert_close(ours.weight.main_grad, plain.weight.grad, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(ours.weight.grad, plain.weight.grad)
    assert not bias or torch.equal(ours.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (64, 6)])
def test_linear_delay_multiplies_in_the_order_of_torch(shape: tuple[int, ...]) -> None:
    """For some sizes the transposed product has other bits."""
    torch.manual_seed(0)
    plain, ours = pair(delay=True, sizes=(6, 12))
    x = torch.randn(shape)
    for layer in (plain, ours):
        torch.nn.functional.gelu(layer(x)).square().mean().backward()
    ours.backward_dw()
    assert torch.equal(ours.weight.grad, plain.weight.grad)


def test_linear_delay_gives_autograd_grad_the_gradient() -> None:
    """Who asks for a weight's gradient gets it, and nothing waits."""
    plain, ours = pair(delay=True)
    x = torch.randn(3, 8)
    (found,) = torch.autograd.grad(ours(x).sum(), [ours.weight])
    plain(x).sum().backward()
    assert torch.equal(found, plain.weight.grad)
    assert not ours.need_backward_dw()


class InPlace:
    """What takes the place of a forward, and computes the weight gradients of the layers inside by itself."""

    def __init__(self, *waiting: bool) -> None:
        self.waiting, self.runs = list(waiting), 0

    def need_backward_dw(self) -> bool:
        return self.waiting.pop(0)

    def backward_dw(self) -> None:
        self.runs += 1


def test_backward_dw_reaches_what_stands_for_a_module() -> None:
    outer = nn.Sequential(pair(delay=True)[1])
    vars(outer)["forward"] = part = InPlace(True, False, False)
    backward_dw(outer)
    assert part.runs == 1
    with pytest.raises(RuntimeError, match="no weight gradient waits"):
        backward_dw(outer)  # neither the part nor the layer has one
    outer[0](torch.randn(3, 8)).sum().backward()
    backward_dw(outer)
    assert outer[0].weight.grad is not None


def test_linear_delay_leaves_the_weight_until_asked() -> None:
    _, ours = pair(delay=True)
    ours(torch.randn(3, 8)).sum().backward()
    assert ours.weight.grad is None
    ours.backward_dw()
    assert ours.weight.grad is not None
    assert ours.weight.grad.stride() == ours.weight.stride()  # fused optimizers refuse others
    with pytest.raises(RuntimeError, match="no weight gradient waits"):
        ours.backward_dw()


def test_linear_delay_computes_the_oldest_backward_first() -> None:
    plain, ours = pair(delay=True)
    first, second = torch.randn(3, 8), torch.randn(3, 8)
    ours(first).sum().backward()
    ours(second).sum().backward()
    ours.backward_dw()
    plain(first).sum().backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("fused", [False, True])
def test_linear_delay_fills_the_w_part_of_a_split_backward(fused: bool) -> None:
    """Whoever splits the backward gets the weight's gradient in his second part, and nothing waits afterwards."""
    plain, ours = pair(delay=True, fused=fused)
    x = torch.randn(3, 8, requires_grad=True)
    out = ours(x)
    (grad,), later = input_gradients([out], [torch.ones_like(out)], [x], [ours.weight])
    assert torch.equal(grad, torch.ones(3, 6) @ ours.weight)
    assert not fused or not ours.weight.main_grad.any()
    (found,) = later.gradients()
    plain(x).sum().backward()
    torch.testing.assert_close(ours.weight.main_grad if fused else found, plain.weight.grad)
    assert not ours.need_backward_dw()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_fusion_adds_to_a_main_grad_of_float32(dtype: torch.dtype) -> None:
    layer = Linear(8, 6).to(dtype)
    layer.gradient_accumulation_fusion = True
    layer.weight.main_grad = torch.ones(6, 8)
    address = layer.weight.main_grad.data_ptr()
    layer(torch.ones(4, 8, dtype=dtype)).sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.full((6, 8), 5.0))
    assert layer.weight.main_grad.data_ptr() == address


def test_linear_without_main_grad_falls_back_to_grad() -> None:
    plain, ours = pair(fused=True)
    del ours.weight.main_grad
    x = torch.randn(3, 8)
    for layer in (plain, ours):
        layer(x).sum().backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)


def test_linear_frozen_weight_and_no_grad_need_nothing() -> None:
    _, ours = pair(delay=True)
    with torch.no_grad():
        assert not ours(torch.randn(3, 8)).requires_grad
    ours.weight.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad is not None
    assert not ours.need_backward_dw()


def test_linear_under_autocast_gives_float32_gradients() -> None:
    plain, ours = pair(delay=True)
    x = torch.randn(3, 8)
    for layer in (plain, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x)
        out.sum().backward()
    ours.backward_dw()
    assert out.dtype is torch.bfloat16
    assert ours.weight.grad.dtype is torch.float32
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=0.02, atol=0.02)  # bf16 keeps 8 bits


@pytest.mark.parametrize("settings", [{"delay_wgrad_compute": True}, {"gradient_accumulation_fusion": True}], ids=str)
@pytest.mark.parametrize(("kind", "config"), [(GPT, GPTConfig.tiny()), (Hybrid, HybridConfig.tiny())])
def test_model_with_weight_gradients_apart_equals_plain(kind: type, config: GPTConfig, settings: dict) -> None:
    torch.manual_seed(0)
    plain = kind(config)
    apart = kind(replace(config, **settings))
    apart.load_state_dict(plain.state_dict())
    tokens, targets = torch.randint(256, (2, 2, 16))
    for parameter in apart.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    for model in (plain, apart):
        model(tokens, targets).backward()
    if "delay_wgrad_compute" in settings:
        assert apart.blocks[0].norm.weight.grad is not None if kind is Hybrid else True
        assert apart.head.weight.grad is None
        apart.backward_dw()
    for ours, expected in zip(apart.parameters(), plain.parameters(), strict=True):
        found = ours.grad if ours.grad is not None else ours.main_grad
        torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-7)


def test_model_with_tied_embeddings_adds_both_uses() -> None:
    torch.manual_seed(0)
    config = replace(GPTConfig.tiny(), tie_embeddings=True)
    plain, apart = GPT(config), GPT(replace(config, delay_wgrad_compute=True))
    apart.load_state_dict(plain.state_dict())
    tokens, targets = torch.randint(256, (2, 2, 16))
    for model in (plain, apart):
        model(tokens, targets).backward()
    apart.backward_dw()
    torch.testing.assert_close(apart.embedding.weight.grad, plain.embedding.weight.grad, rtol=1e-5, atol=1e-7)
