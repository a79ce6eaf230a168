"""Calls that do not need their static tensors at the same time share them through a pool.

A call's arguments are needed from its forward to its backward, the gradients of its results during its backward. If the
order of all calls is fixed, that is known in advance: the graphs are captured in this order, each one takes its tensors
from the pool, and returns them at the point of the order that no longer needs them, for the next one of the same
geometry. The pool keeps every tensor alive, because a graph uses its address as long as the graph exists.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.memory.inputs import ArgMetadata


class TensorReusePool:
    """Static tensors of any geometry, lent to calls that do not need them at the same time.

    `get` lends a tensor without gradients and with any contents; `insert` takes it back. The tensors are on one
    device, or without one on that of the metadata.

    Example:
        >>> pool = TensorReusePool()
        >>> buffer = pool.get(ArgMetadata(x))
        >>> pool.insert(buffer)
        >>> pool.get(ArgMetadata(x)) is buffer
        True
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._tensors: dict[int, tuple[torch.Tensor, ArgMetadata]] = {}  # all tensors ever made, by storage
        self._free: dict[ArgMetadata, list[torch.Tensor]] = defaultdict(list)
        self._needed: set[int] = set()

    @property
    def tensor_strong_refs(self) -> list[torch.Tensor]:
        """All tensors that the pool has made and keeps alive."""
        return [tensor for tensor, _ in self._tensors.values()]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or the one that it is a view of, was made by this pool."""
        return tensor.untyped_storage()._cdata in self._tensors

    @entry_point
    def get(self, meta: ArgMetadata) -> torch.Tensor:
        """Return an unused tensor of this geometry, or a new one."""
        geometry = meta.changed(requires_grad=False)
        unused = self._free[geometry]
        tensor = unused.pop() if unused else geometry.empty(self._device or meta.device)
        memory = tensor.untyped_storage()._cdata
        self._tensors[memory] = (tensor, geometry)
        self._needed.add(memory)
        return tensor

    @entry_point
    def insert(self, tensor: torch.Tensor) -> None:
        """Return a tensor to the pool, for other calls."""
        memory = tensor.untyped_storage()._cdata
        if memory not in self._needed:
            known = "was given back already" if memory in self._tensors else "is not of this pool"
            raise InvalidArgument(
                f"a tensor was given to a TensorReusePool that {known}",
                rule="option",
                why="two calls would get the same memory, or memory that others use.",
                fix="insert each tensor once after get() has lent it; owns(tensor) is True for the pool's own.",
            )
        self._needed.remove(memory)
        own, geometry = self._tensors[memory]
        self._free[geometry].append(own)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor, _ in self._tensors.values())
