"""GPUs by the names that benchmark scripts use: peak of dense bf16 matrix products, memory, compute capability.

The figures are those of the vendor's data sheets, without sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepgraph.core.errors import InvalidArgument, nearest


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a prediction knows about a GPU."""

    name: str
    peak_tflops: float
    """Dense bf16, TFLOP/s."""
    memory_bytes: int
    compute_capability: tuple[int, int]


_GB = 10**9
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("a100", 312.0, 80 * _GB, (8, 0)),
            Gpu("l40s", 362.0, 48 * _GB, (8, 9)),
            Gpu("h100", 989.0, 80 * _GB, (9, 0)),
            Gpu("h200", 989.0, 141 * _GB, (9, 0)),
            Gpu("b200", 2250.0, 180 * _GB, (10, 0)),
            Gpu("gb200", 2500.0, 186 * _GB, (10, 0)),
            Gpu("b300", 2250.0, 270 * _GB, (10, 3)),
            Gpu("gb300", 2500.0, 278 * _GB, (10, 3)),
        )
    }
)
CPU = "cpu"
"""The word for a run on the tape, which shows that everything works and says nothing about speed."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name.

    Example:
        >>> find_gpu("h200").peak_tflops
        989.0
    """
    found = GPUS.get(name.lower())
    if found is None:
        near = nearest(name.lower(), [*GPUS, CPU])
        listed = ", ".join([*GPUS, CPU])
        raise InvalidArgument(
            f"`{name}` is not a known GPU",
            rule="option",
            why="its peak and its memory are needed for MFU and predictions.",
            fix=f"did you mean {near}?" if near else f"use one of {listed}.",
        )
    return found


def gpu_of(device_name: str) -> Gpu | None:
    """Return the GPU that torch calls by this name, or None.

    Example:
        >>> gpu_of("NVIDIA H200").name
        'h200'
    """
    words = device_name.lower().replace("-", " ").split()
    return next((gpu for gpu in GPUS.values() if gpu.name in words), None)
