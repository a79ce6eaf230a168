"""Calls that do not need their static tensors at the same time share them through a pool.

A call's arguments are needed from its forward to its backward, the gradients of its results during its backward. If the
order of all calls is fixed, that is known in advance: the graphs are captured in this order, each one takes its tensors
from the pool, and returns them at the point of the order that no longer needs them, for the next one of the same
geometry. The pool keeps every tensor alive, because a graph uses its address as long as the graph exists.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from stepgraph.buffers.inputs import ArgMetadata


class TensorReusePool:
    """Static tensors of any geometry."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, tuple[torch.Tensor, ArgMetadata]] = {}  # all tensors ever made, by storage
        self._free: dict[ArgMetadata, list[torch.Tensor]] = defaultdict(list)
        self._needed: set[int] = set()

    def get(self, meta: ArgMetadata) -> torch.Tensor:
        """Return an unused tensor of this geometry, or a new one."""
        geometry = replace(meta, requires_grad=False)
        unused = self._free[geometry]
        tensor = unused.pop() if unused else geometry.empty(self._device)
        memory = tensor.untyped_storage()._cdata
        self._tensors[memory] = (tensor, geometry)
        self._needed.add(memory)
        return tensor

    def insert(self, tensor: torch.Tensor) -> None:
        """Return a tensor to the pool, for other calls."""
        memory = tensor.untyped_storage()._cdata
        assert memory in self._needed, "the tensor was given back, or is not of this pool"
        self._needed.remove(memory)
        own, geometry = self._tensors[memory]
        self._free[geometry].append(own)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor, _ in self._tensors.values())
