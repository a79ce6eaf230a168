"""Several examples in one sequence: where each begins is `cu_seqlens`, a tensor of fixed length.

`cu_seqlens` [batch, n] has the positions where examples begin, then `length` in all places that are left. From it
follows the segment of each position. Positions of another segment are not attended to, and learned positions restart.
Rotary positions need not restart: they enter by differences, which inside a segment are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segments_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the number of each position's segment, [batch, length], counted from 1."""
    positions = torch.arange(length, device=cu_seqlens.device)
    return (positions.unsqueeze(-1) >= cu_seqlens.unsqueeze(1)).sum(-1)


def positions_in(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the distance of each position from the beginning of its segment, [batch, length]."""
    positions = torch.arange(length, device=cu_seqlens.device)
    begins = torch.where(positions.unsqueeze(-1) >= cu_seqlens.unsqueeze(1), cu_seqlens.unsqueeze(1), 0).amax(-1)
    return positions - begins


def same_segment(segments: Tensor) -> Tensor:
    """Return which positions are in the segment of each position, [batch, 1, length, length]."""
    return (segments.unsqueeze(-1) == segments.unsqueeze(-2)).unsqueeze(1)
