"""The functions between the matrices of an MLP.

A gated one takes two vectors, gate and up, and multiplies a function of the one by the other; a plain one takes one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["swiglu", "clamped_swiglu", "gelu", "relu2"]
_CLAMP_LIMIT = 7.0
_CLAMP_SLOPE = 1.702


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=_CLAMP_LIMIT), up.clamp(-_CLAMP_LIMIT, _CLAMP_LIMIT)
    return gate * torch.sigmoid(_CLAMP_SLOPE * gate) * (up + 1)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


GATED = MappingProxyType({"swiglu": _swiglu, "clamped_swiglu": _clamped_swiglu})
PLAIN = MappingProxyType({"gelu": _gelu, "relu2": _relu2})


def is_gated(name: str) -> bool:
    """Whether an activation takes a gate and another vector."""
    return name in GATED


def of_stacked(name: str) -> Callable[[Tensor], Tensor]:
    """The activation as a function of one tensor, which holds the gate before the other vector if it has one."""
    if name in PLAIN:
        return PLAIN[name]
    gated = GATED[name]
    return lambda x: gated(*x.chunk(2, dim=-1))
