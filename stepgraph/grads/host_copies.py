"""Copies in the host's memory, of what may die before it is known whether it is needed again.

Memory that a process has just been given has to be entered into its page table when it is first written to, and one
thread does that more slowly than a GPU sends the data. So all copies lie in one piece, which many threads write zeros
to first: that halves the time, or better.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

_ALIGNED = 64
"""Bytes; no dtype needs more."""


def copies_on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors that fill their memory, with the strides they have."""
    begins = list(accumulate((-(-t.nbytes // _ALIGNED) * _ALIGNED for t in tensors), initial=0))
    with torch.no_grad():
        memory = torch.zeros(begins[-1], dtype=torch.uint8, device="cpu")
        return [
            _part(memory[begin : begin + t.nbytes], t).copy_(t) for begin, t in zip(begins[:-1], tensors, strict=True)
        ]


def _part(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
