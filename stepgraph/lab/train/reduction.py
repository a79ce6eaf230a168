"""Averages gradients over data-parallel ranks after the backward, as Megatron does without `overlap_grad_reduce`.

DDP reduces while the last backward runs and must see each gradient when it is ready. Stages of a pipeline, sharded
parameters and delayed weight gradients do not fit that: there gradients are averaged at the end of the iteration.
The arithmetic is DDP's: gradients are copied to a flat buffer, divided by the number of ranks, and summed. With two
ranks both ways give the same bits; with more, the order of the sum may depend on a gradient's place in its buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUFFER_BYTES = 25 << 20


def broadcast_from_first(model: nn.Module, source: int, group: Any = None) -> None:
    """Give all ranks the parameters and buffers of one of them."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), source, group=group)


def average_gradients(parameters: Sequence[nn.Parameter], size: int, group: Any = None) -> None:
    """Replace gradients by their average over the ranks; every rank must have the same gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        for part in _parts(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in part]).div_(size)
            dist.all_reduce(flat, group=group)
            pieces = flat.split([gradient.numel() for gradient in part])
            torch._foreach_copy_(part, [p.view_as(g) for p, g in zip(pieces, part, strict=True)])


def _parts(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group gradients by type into buffers of limited size."""
    open_parts: dict[torch.dtype, list[Tensor]] = {}
    room: dict[torch.dtype, int] = defaultdict(int)
    found: list[list[Tensor]] = []
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if gradient.dtype not in open_parts or room[gradient.dtype] < size:
            open_parts[gradient.dtype], room[gradient.dtype] = [], _BUFFER_BYTES
            found.append(open_parts[gradient.dtype])
        open_parts[gradient.dtype].append(gradient)
        room[gradient.dtype] -= size
    return found
