"""A linear layer that can compute its weight gradient later, or add it to `main_grad` in place.

A linear layer's backward has two products. The gradient of its input is awaited by the layers before it; the gradient
of its weight is awaited by nobody until the optimizer runs. Two settings use this:

- `delay_wgrad_compute`: the backward computes the gradients of inputs only, and `backward_dw()` computes those of the
  weights when there is time. Whoever asks for a weight's gradient (`torch.autograd.grad`), as a schedule does that
  splits the backward in two, gets it at once, and nothing is left for `backward_dw()`.
- `gradient_accumulation_fusion`: where the weight has a tensor `main_grad`, the gradient is added to it in place, and
  `weight.grad` stays as it was.

With either setting the layer makes two nodes in autograd's graph where torch makes one: the product, which knows the
weight as a constant, and beside it the weight's own node. So each of the two can be run without the other.

What takes the place of a module's method may have `need_backward_dw()` and `backward_dw()` too. Where a backward ran
there in place of the layers' own, it has left the weight gradients of the layers inside to that `backward_dw()`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear`, bit for bit, whose weight gradient can be delayed or added to `weight.main_grad`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.delay_wgrad_compute = False
        self.gradient_accumulation_fusion = False
        self._delayed: tuple[tuple[_WeightNode, Tensor, Tensor], ...] = ()  # whoever restores attributes restores it

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last dimension of `x` by the weight and add the bias."""
        is_apart = self.delay_wgrad_compute or self.gradient_accumulation_fusion
        if not (is_apart and self.weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(x)
        product = F.linear(x, self.weight.detach(), self.bias)
        node = _WeightNode(self)
        token: Tensor = _WeightGradient.apply(x.detach(), self.weight, node, product.detach())  # type: ignore[no-untyped-call]
        out: Tensor = _Join.apply(product, token)  # type: ignore[no-untyped-call]
        return out

    def need_backward_dw(self) -> bool:
        """Whether a weight gradient waits to be computed."""
        return bool(self._delayed)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that left them; refuse if there is none."""
        if not self._delayed:
            raise RuntimeError(
                "Linear.backward_dw: no weight gradient waits here; call it once after each backward of a model with "
                "`delay_wgrad_compute=True`, and not where the backward was split or replayed by others"
            )
        (node, x, grad), self._delayed = self._delayed[0], self._delayed[1:]
        if node.weight is not self.weight:
            raise RuntimeError(
                "Linear.backward_dw: the weight is not the one that the backward saw, which ran on a copy of the "
                "weights; call `backward_dw()` while that copy is in place"
            )
        node.add_later(x, grad)


def backward_dw(model: nn.Module) -> None:
    """Compute the weight gradients that the oldest backward through `model` left to be computed.

    Every layer must have one, or stand inside a part whose graphs have it.

    Example:
        `loss.backward(); backward_dw(model); optimizer.step()`
    """
    covered: set[nn.Module] = set()
    for module in model.modules():
        for part in _in_place_of_methods(module):
            if part.need_backward_dw():
                part.backward_dw()
                covered.update(module.modules())
        layer = module if isinstance(module, Linear) and module.delay_wgrad_compute else None
        if layer is not None and (layer.need_backward_dw() or layer not in covered):
            layer.backward_dw()


def _in_place_of_methods(module: nn.Module) -> list[Any]:
    """What stands in the place of a module's methods and has weight gradients of its own to compute."""
    return [each for each in vars(module).values() if hasattr(each, "need_backward_dw")]


class _WeightNode:
    """What the weight's node of one call knows: the layer, and where its gradient goes."""

    def __init__(self, layer: Linear) -> None:
        weight = layer.weight
        self._layer = layer if layer.delay_wgrad_compute else None
        self.weight = weight
        self.main_grad: Tensor | None = None
        if layer.gradient_accumulation_fusion:
            self.main_grad = getattr(weight, "main_grad", None)

    def is_left_for_later(self, x: Tensor, grad: Tensor, accumulator: Any) -> bool:
        """Whether the gradient waits for `backward_dw()`: not if the running backward returns it to its caller."""
        if self._layer is None or not _is_accumulated(accumulator):
            return False
        self._layer._delayed = (*self._layer._delayed, (self, x, grad))
        return True

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor | None:
        """The weight's gradient, or None where it was added to `main_grad`."""
        x, grad = x.flatten(0, -2).to(grad.dtype), grad.flatten(0, -2)
        if self.main_grad is None:
            # the product as torch's own backward writes it, so that its bits are the same
            return (grad.mT @ x).to(self.weight.dtype)
        if self.main_grad.dtype is grad.dtype:
            self.main_grad.addmm_(grad.mT, x)
        else:
            self.main_grad.add_(grad.mT @ x)
        return None

    def add_later(self, x: Tensor, grad: Tensor) -> None:
        """Compute the gradient now, after the backward, and add it to what the weight has."""
        with torch.no_grad():
            found = self.gradient(x, grad)
        if found is None:
            return
        if self.weight.grad is None:  # with the weight's strides, as autograd keeps them: fused optimizers need it
            self.weight.grad = torch.empty_like(self.weight).copy_(found)
        else:
            self.weight.grad.add_(found)


class _WeightGradient(torch.autograd.Function):
    """The weight's node: its result has the product's shape and no memory, and exists for its gradient only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, node: _WeightNode, product: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.node = node
        return product.new_empty(()).expand(product.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), node, grad = ctx.saved_tensors, ctx.node, grads[0]
        if node.is_left_for_later(x, grad, ctx.next_functions[1][0]):
            return None, None, None, None
        return None, node.gradient(x, grad), None, None


class _Join(torch.autograd.Function):
    """The product, unchanged; its gradient goes to the product's node and to the weight's."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, token: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], grads[0]


def _is_accumulated(accumulator: Any) -> bool:
    """Whether the running backward adds a gradient to its leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # so torch says that this leaf's gradient is returned
        return False
