"""The boundary of a module's graph brings a caller's tensors to static ones.

A tensor that is already at its place, because the graph before wrote it there, is not copied. Neither is one that
several graphs share and that was brought to its buffer for the first of them: a shared buffer remembers which tensor,
at which version, it holds. What remains goes in with one fused copy, unless the place holds what others still need.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepgraph.tree import Leaf


@dataclass(frozen=True, slots=True)
class ArgMetadata(Leaf):
    """A tensor's geometry without its memory: what is needed to make a buffer like it, and to tell it from others."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ArgMetadata:
        """The geometry of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def layout(self) -> Hashable:
        """Shape, strides and dtype: a backward is recorded for each layout of gradients."""
        return (self.shape, self.stride, self.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A new tensor of this geometry, with nothing in it."""
        with torch.inference_mode(False):
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
            return made.requires_grad_(self.requires_grad)


class SharedBuffer:
    """A static tensor that several graphs read, and what it holds."""

    __slots__ = ("_source", "_version", "fills", "num_holders", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.fills = 0
        """How often something was copied in."""
        self.num_holders = 0
        """Calls under way that were given what it holds."""
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version = -1

    def holds(self, source: torch.Tensor) -> bool:
        """Whether this very tensor, unchanged since, was copied in last."""
        return self._source is not None and self._source() is source and source._version == self._version

    def note(self, source: torch.Tensor) -> None:
        """Remember what is being copied in."""
        known = not source.is_inference()  # else nothing would tell of a change
        self._source, self._version = (weakref.ref(source), source._version) if known else (None, -1)
        self.fills += 1


class Boundary:
    """Static tensors on one side of a graph, by their index among the leaves of a call."""

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        shared: Mapping[int, SharedBuffer] | None = None,
        in_use: Mapping[int, Callable[[], bool]] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self._shared = dict(shared or {})
        self._in_use = {i: (self.tensors[i].data_ptr(), asked) for i, asked in (in_use or {}).items()}
        """Tensors that are another graph's results: whether somebody still needs those."""
        self._used = dict.fromkeys(self._shared, 0)
        """Which filling of a shared buffer was used last: each is good for one call, since not every change is told."""
        self.note_loaded: Callable[[torch.Tensor], None] | None = None
        self._edges = []
        for index, tensor in self.tensors.items():
            repeated = tuple(d for d, s in enumerate(tensor.stride()) if s == 0 and tensor.shape[d] > 1)
            target = _once(tensor.data, repeated)  # autograd is not to see what is copied in
            self._edges.append((index, target, target.data_ptr(), repeated, self._shared.get(index)))
        self.has_shared = bool(self._shared)
        self.has_conditions = bool(self._shared or self._in_use)
        """Whether `is_free_for` has anything to ask."""
        self._only: tuple[int, torch.Tensor, int, tuple[torch.Size, tuple[int, ...]] | None] | None = None
        if len(self._edges) == 1 and not self.has_shared:
            index, target, address, repeated, _ = self._edges[0]
            self._only = (index, target, address, (target.shape, target.stride()) if repeated else None)

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def is_free_for(self, leaves: Sequence[Any]) -> bool:
        """Whether a call's tensors can be brought here without overwriting what others need."""
        for index, (address, in_use) in self._in_use.items():
            if leaves[index].data_ptr() != address and in_use():
                return False
        return all(not buffer.num_holders or buffer.holds(leaves[i]) for i, buffer in self._shared.items())

    def hold(self) -> None:
        """A call is under way: shared buffers must stay as they are."""
        for buffer in self._shared.values():
            buffer.num_holders += 1

    def release(self) -> None:
        """The call is over."""
        for buffer in self._shared.values():
            buffer.num_holders -= 1

    def load(self, leaves: Sequence[Any] | Mapping[int, Any]) -> None:
        """Bring a call's tensors here."""
        if self._only is not None:
            index, target, address, geometry = self._only
            source = leaves[index]
            if source.data_ptr() != address:
                if self.note_loaded is not None:
                    self.note_loaded(target)
                if source.requires_grad and torch.is_grad_enabled():
                    source = source.detach()  # costs less than a no_grad block around the copy
                target.copy_(source.as_strided(*geometry) if geometry is not None else source)
            return
        targets, sources = [], []
        for index, target, address, repeated, shared in self._edges:
            source = leaves[index]
            if source.data_ptr() == address:
                continue
            if shared is not None:
                is_there = shared.holds(source) and self._used[index] != shared.fills
                if not is_there:
                    shared.note(source)
                self._used[index] = shared.fills
                if is_there:
                    continue
            if source.requires_grad and torch.is_grad_enabled():
                source = source.detach()
            targets.append(target)
            sources.append(source.as_strided(target.shape, target.stride()) if repeated else source)
        if targets:
            if self.note_loaded is not None:
                for target in targets:
                    self.note_loaded(target)
            if len(targets) == 1:
                targets[0].copy_(sources[0])
            else:
                torch._foreach_copy_(targets, sources)


def _once(tensor: torch.Tensor, repeated: Sequence[int]) -> torch.Tensor:
    """The tensor without the repetitions that expand() made, which cannot be copied into."""
    for dim in repeated:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry with the same values."""
    made = replace(ArgMetadata.of(tensor), requires_grad=False).empty(tensor.device)
    Boundary({0: made}).load([tensor])
    return made
