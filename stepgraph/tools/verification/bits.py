"""Two tensors compared by their bits, and how far apart they are where the bits differ.

Equality here is that of bytes: NaN equals itself, and -0.0 differs from 0.0. A tensor too large to keep is remembered
by a digest: two sums over all its elements, each element times an odd number of its own, modulo 2**64. A change of one
element always changes both sums; any other change leaves both as they are with a chance of 2**-128.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.wording import counted

__all__ = ["Digest", "Gap", "digest", "measure", "same_bits", "same_form"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element, what to read it as to compare its bits."""
_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_FACTORS = (0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64)
"""Odd numbers, as signed integers of 64 bits."""
_AT_ONCE = 1 << 22
"""Elements that a digest takes at once: its weights need eight bytes an element."""


def same_form(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Check for the same shape, dtype and device."""
    return one.shape == two.shape and one.dtype == two.dtype and one.device == two.device


def same_bits(one: Any, two: Any) -> bool:
    """Compare tensors, and containers of tensors and plain values, bit for bit."""
    if issubclass(type(one), torch.Tensor) and issubclass(type(two), torch.Tensor):
        return same_form(one, two) and torch.equal(as_bits(one), as_bits(two))
    if type(one) is not type(two):
        return False
    if issubclass(type(one), Mapping):
        return one.keys() == two.keys() and all(same_bits(value, two[key]) for key, value in one.items())
    if issubclass(type(one), list | tuple):
        return len(one) == len(two) and all(map(same_bits, one, two))
    if issubclass(type(one), float):
        return bool(one.hex() == float(two).hex())
    return bool(one == two)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, read as integers; bytes where elements have another size than integers have."""
    tensor = tensor.detach()
    bits = _BITS.get(tensor.element_size())
    return tensor.contiguous().view(-1).view(torch.uint8) if bits is None else tensor.view(bits)


@dataclass(frozen=True, slots=True)
class Digest:
    """A tensor that was not kept: its form, and two sums over its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: tuple[int, int]


def digest(tensor: torch.Tensor) -> Digest:
    """Return the digest of a tensor."""
    bits = as_bits(tensor.contiguous()).reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64) * 2 + 1
        for which, factor in enumerate(_FACTORS):
            sums[which] += (part * (places * factor)).sum()
    first, second = sums.tolist()
    return Digest(tuple(tensor.shape), tensor.dtype, (first, second))


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two values are apart."""

    differing: int
    """Elements whose bits differ."""
    elements: int
    max_abs: float | None = None
    """Largest absolute difference; None if it is not known, infinite where one side is not finite."""
    max_rel: float | None = None
    max_ulp: int | None = None
    """Largest distance in representable numbers between, for floating-point numbers."""
    note: str = ""
    """What differs besides the numbers, or instead: the shape, a plain value."""
    excess: float = math.inf
    """Largest amount by which an element exceeds the bound of the user; 0 or less if all elements keep to it."""

    def __str__(self) -> str:
        if self.max_abs is None:
            return self.note or "by an amount that is not known"
        parts = [f"{self.differing} of {counted(self.elements, 'elements')}", f"max abs {self.max_abs:.3g}"]
        parts += [f"max rel {self.max_rel:.3g}"] if self.max_rel is not None else []
        parts += [f"{self.max_ulp} ulp"] if self.max_ulp is not None else []
        return ", ".join([*parts, *([self.note] if self.note else [])])

    @property
    def is_within(self) -> bool:
        """True if every element keeps to the bound that the user gave, as `torch.allclose` reads it."""
        return self.excess <= 0.0


def measure(one: Any, two: Any, rtol: float = 0.0, atol: float = 0.0) -> Gap:
    """Return how far two different values are apart; `one` is the reference."""
    if not (issubclass(type(one), torch.Tensor) and issubclass(type(two), torch.Tensor)):
        return _measure_others(one, two, rtol, atol)
    if one.shape != two.shape or one.dtype != two.dtype:
        return Gap(0, one.numel(), note=f"{_form(one)} against {_form(two)}")
    one, two = one.detach().cpu(), two.detach().cpu()
    differs = (as_bits(one.contiguous()) != as_bits(two.contiguous())).reshape(-1)
    if one.element_size() not in _BITS:  # compared byte by byte
        return Gap(0, one.numel(), note=f"{int(differs.sum())} bytes differ")
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = (value.reshape(-1)[differs].to(wide) for value in (one, two))
    gap, size = (a - b).abs(), a.abs()
    excess = (gap - (atol + rtol * size)).nan_to_num(math.inf)
    relative = (gap / size).nan_to_num(math.inf)
    return Gap(
        differing=int(differs.sum()),
        elements=one.numel(),
        max_abs=_largest(gap.nan_to_num(math.inf)),
        max_rel=_largest(relative),
        max_ulp=_ulp(one.reshape(-1)[differs], two.reshape(-1)[differs]),
        excess=_largest(excess),
    )


def _measure_others(one: Any, two: Any, rtol: float, atol: float) -> Gap:
    if type(one) is type(two) is float:
        return measure(torch.tensor(one, dtype=torch.float64), torch.tensor(two, dtype=torch.float64), rtol, atol)
    if isinstance(one, Digest) or isinstance(two, Digest):
        return Gap(0, math.prod(one.shape) if isinstance(one, Digest) else 0)
    told = [_form(value) if isinstance(value, torch.Tensor) else f"{value!r:.60}" for value in (one, two)]
    return Gap(1, 1, note=f"{told[0]} against {told[1]}")


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _ulp(one: torch.Tensor, two: torch.Tensor) -> int | None:
    integers = _INTEGERS.get(one.dtype)
    if integers is None or not one.numel() or not bool((one.isfinite() & two.isfinite()).all()):
        return None
    a, b = (_in_order(value.view(integers).to(torch.int64), integers) for value in (one, two))
    return int((a - b).abs().max())


def _in_order(bits: torch.Tensor, integers: torch.dtype) -> torch.Tensor:
    """Number floating-point numbers in the order of their values."""
    return torch.where(bits < 0, torch.iinfo(integers).min - bits, bits)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
