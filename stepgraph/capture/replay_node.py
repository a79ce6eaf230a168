"""The node in autograd's graph that stands for a replayed module.

Its inputs are the tensors through which gradients flow back to the caller, and an anchor: an empty leaf that makes
autograd build the node where no argument needs a gradient, and that tells a full backward, which reaches every leaf,
from one that was asked for certain tensors only. Parameters whose gradients the graph itself accumulates are no inputs:
each input costs the host more than the look at it in the runner.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stepgraph.capture.use import Use


class ReplayNode(torch.autograd.Function):
    """Replays the forward, outside autograd's eyes, and later the backward."""

    @staticmethod
    def forward(
        ctx: Any, use: Use, leaves: Sequence[Any], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        use.node = weakref.ref(ctx)
        results = use.forward(leaves)
        constant = use.runner.result.constant
        if constant:
            ctx.mark_non_differentiable(*[results[i] for i in constant])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.use.backward(grads))


_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, ReplayNode).apply
_is_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


def replay_node(
    use: Use, leaves: Sequence[Any], anchor: torch.Tensor, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Replay the forward for these arguments, and add the node to autograd's graph; gives the results."""
    if _is_transforming():
        results: tuple[torch.Tensor, ...] = ReplayNode.apply(use, leaves, anchor, *inputs)  # type: ignore[no-untyped-call]
        return results
    return _apply(use, leaves, anchor, *inputs)  # what torch's own wrapper looks for costs the host as much as the node


def is_replayed(tensor: torch.Tensor) -> bool:
    """Whether a tensor came straight out of a replayed module, so that its gradient goes straight back into one."""
    return type(tensor.grad_fn) is ReplayNode._backward_cls
