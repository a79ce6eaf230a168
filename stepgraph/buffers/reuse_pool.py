"""Calls that do not need their static tensors at the same time share them through a pool.

A call's arguments are needed from its forward to its backward, the gradients of its results during its backward. Where
the order of all calls is fixed, that is known beforehand: while the graphs are captured in this order, each one takes
its tensors from the pool, and gives them back where the order is done with them, for the next one of the same geometry.
A tensor that several calls need is given back by the last of them. The pool keeps every tensor alive, because a graph
knows its address whether or not someone holds it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from stepgraph.buffers.inputs import ArgMetadata


class TensorReusePool:
    """Static tensors of any geometry, with a count of those who need each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, tuple[torch.Tensor, ArgMetadata]] = {}  # all that were ever made, by their memory
        self._free: dict[ArgMetadata, list[torch.Tensor]] = defaultdict(list)
        self._needed: dict[int, int] = {}

    def get(self, meta: ArgMetadata) -> torch.Tensor:
        """A tensor of this geometry that nobody needs, or a new one; needed once from now on."""
        geometry = replace(meta, requires_grad=False)
        unused = self._free[geometry]
        tensor = unused.pop() if unused else geometry.empty(self._device)
        self._tensors[_memory(tensor)] = (tensor, geometry)
        self._needed[_memory(tensor)] = 1
        return tensor

    def retain(self, tensor: torch.Tensor) -> None:
        """One more call needs a tensor of the pool."""
        assert self._needed.get(_memory(tensor), 0) > 0, "the tensor was given back, or is not of this pool"
        self._needed[_memory(tensor)] += 1

    def insert(self, tensor: torch.Tensor) -> None:
        """A call is done with a tensor; after the last one it is free for others."""
        memory = _memory(tensor)
        assert self._needed.get(memory, 0) > 0, "the tensor was given back, or is not of this pool"
        self._needed[memory] -= 1
        if not self._needed[memory]:
            own, geometry = self._tensors[memory]
            self._free[geometry].append(own)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made here."""
        return _memory(tensor) in self._tensors

    @property
    def num_tensors(self) -> int:
        """How many tensors there are, free or needed."""
        return len(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor, _ in self._tensors.values())


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
