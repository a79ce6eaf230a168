"""A graph reads its inputs from static tensors, at the addresses of its capture. The caller's tensors are copied there.

All copies of a call are one fused copy. A whole step copies all tensors of a call (`copy_all`). In a sequence of graphs
(`load`) a tensor is not copied if the graph before has already written it to its place. It is also not copied if
several graphs share its buffer, and it was copied for the first of them: a shared buffer remembers which tensor it
holds, at which version.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.storage import address_of, is_strided
from stepgraph.core.tensor_attributes import as_given
from stepgraph.core.tensor_memory import alignment_of
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.tree import Leaf


@dataclass(frozen=True, slots=True, init=False)
class ArgMetadata(Leaf):
    """What an argument is: of a tensor its geometry without its memory, of anything else its type and value.

    That is enough to make a tensor like it, and to compare it with others. Two tensors of one geometry are equal here,
    whatever they hold. What is not a tensor has None for a shape, and so on.

    Example:
        >>> ArgMetadata(torch.ones(2, 3)).zeros_like().shape
        torch.Size([2, 3])
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    offset: int
    """The number of elements by which a tensor begins past the alignment that new memory has."""
    value: Any = field(compare=False)
    """The value, or the address of a tensor."""
    type: type[Any] = field(compare=False)
    _plain: Hashable = field(repr=False)
    """The type and value of what is not a tensor, to compare by."""

    def __init__(self, arg: Any) -> None:
        found: dict[str, Any] = dict.fromkeys(ArgMetadata.__slots__) | {"type": arg.__class__, "value": arg}
        if issubclass(type(arg), torch.Tensor):
            found |= {
                "shape": torch.Size() if arg.is_nested else arg.shape,
                "dtype": arg.dtype,
                "device": arg.device,
                "requires_grad": arg.requires_grad,
            }
            found |= {"stride": arg.stride() if is_strided(arg) else None, "value": address_of(arg)}
            alignment = alignment_of(arg, arg.device.type)
            found["offset"] = alignment.rest // arg.element_size() if alignment is not None else 0
        else:
            found["_plain"] = (arg.__class__, arg)
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def is_tensor(self) -> bool:
        return issubclass(self.type, torch.Tensor)

    @property
    def layout(self) -> Hashable:
        """Shape, strides, dtype and alignment: a backward is recorded for each layout of gradients."""
        return (self.shape, self.stride, self.dtype, self.offset)

    def changed(self, **fields: Any) -> ArgMetadata:
        """Return the same with other values of some fields."""
        made = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def empty(self, device: torch.device) -> torch.Tensor:
        """Make an uninitialized tensor of this geometry."""
        strides: Any = self.stride
        if strides is None:
            what = "a tensor without strides" if self.is_tensor else f"an argument of type {self.type.__name__}"
            raise InvalidArgument(
                f"no tensor can be made like {what}",
                rule="option",
                why="this ArgMetadata has no shape, strides and dtype for a buffer.",
                fix="make it of a dense tensor: ArgMetadata(tensor).",
            )
        with torch.inference_mode(False):
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
            if self.offset and device.type == self.device.type:
                last = sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
                memory = torch.empty(self.offset + last + 1, dtype=self.dtype, device=device).untyped_storage()
                made.set_(memory, self.offset, self.shape, strides)
            return made.requires_grad_(self.requires_grad)

    @entry_point
    def zeros_like(self) -> torch.Tensor:
        """Make a tensor of zeros with this shape, strides, dtype, device and requires_grad."""
        made = self.empty(self.device)
        with torch.no_grad():
            _once(made).zero_()
        return made


def buffer_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make a buffer of a tensor's class and strides; for a tensor on the host with the strides of `.to(device)`."""
    if type(tensor) is torch.Tensor and tensor.device == device:
        return as_given(ArgMetadata(tensor).empty(device), tensor)
    return as_given(torch.empty_like(tensor, device=device), tensor).requires_grad_(tensor.requires_grad)


def is_copied_in(leaf: Any) -> bool:
    """Check whether a leaf of a call is data to copy in. A parameter passed as an argument is used itself."""
    return issubclass(type(leaf), torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)


def tensors_among(leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the tensors of a call to copy in, by the index of the first leaf that is this tensor."""
    found = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves))) if is_copied_in(leaf)}
    return {index: leaves[index] for index in sorted(found.values())}


class SharedBuffer:
    """A static tensor that several graphs read, with a record of what it holds."""

    __slots__ = ("_source", "_version", "fills", "num_holders", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.fills = 0
        """Number of copies into it."""
        self.num_holders = 0
        """Calls in progress that use what it holds."""
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version = -1

    def holds(self, source: torch.Tensor) -> bool:
        """Check whether the last copy was of this tensor, and the tensor is unchanged since."""
        return self._source is not None and self._source() is source and source._version == self._version

    def note(self, source: torch.Tensor) -> None:
        """Remember the tensor that is being copied in."""
        known = not source.is_inference()  # inference tensors have no version to notice a change by
        self._source, self._version = (weakref.ref(source), source._version) if known else (None, -1)
        self.fills += 1


class StaticInputs:
    """Static tensors that a graph reads, by their index among the leaves of a call."""

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        shared: Mapping[int, SharedBuffer] | None = None,
        in_use: Mapping[int, Callable[[], bool]] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self._shared = dict(shared or {})
        self._in_use = {i: (self.tensors[i].data_ptr(), asked) for i, asked in (in_use or {}).items()}
        """For tensors that are another graph's results: a check whether those are still needed."""
        self._used = dict.fromkeys(self._shared, 0)
        """The last used fill of each shared buffer. A fill serves one call, since not every change can be noticed."""
        self.note_loaded: Callable[[torch.Tensor], None] | None = None
        self.targets: list[torch.Tensor] = []
        """The tensors to copy into, hidden from autograd."""
        self._edges = []
        for index, tensor in self.tensors.items():
            target = _once(tensor.data)
            view = (target.shape, target.stride()) if target.shape != tensor.shape else None
            self.targets.append(target)
            self._edges.append((index, target, target.data_ptr(), view, self._shared.get(index)))
        self.has_repeated = any(view is not None for _, _, _, view, _ in self._edges)
        """True if a tensor was expanded, so that only one repetition is copied."""
        self.has_shared = bool(self._shared)
        self.has_conditions = bool(self._shared or self._in_use)
        """True if `is_free_for` has anything to check."""
        self._only = self._edges[0] if len(self._edges) == 1 and not self.has_shared else None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def is_free_for(self, leaves: Sequence[Any]) -> bool:
        """Check whether a call's tensors can be copied here without overwriting values that others need."""
        for index, (address, in_use) in self._in_use.items():
            if leaves[index].data_ptr() != address and in_use():
                return False
        return all(not buffer.num_holders or buffer.holds(leaves[i]) for i, buffer in self._shared.items())

    def hold(self) -> None:
        """Keep shared buffers unchanged while a call is in progress."""
        for buffer in self._shared.values():
            buffer.num_holders += 1

    def release(self) -> None:
        """End the `hold` of a call."""
        for buffer in self._shared.values():
            buffer.num_holders -= 1

    def copy_all(self, leaves: Sequence[Any]) -> None:
        """Copy all tensors of a call here. Call it under no_grad if one requires a gradient."""
        sources = [leaves[index] for index in self.tensors]
        if self.has_repeated:
            views = [view for _, _, _, view, _ in self._edges]
            sources = [s if v is None else s.as_strided(*v) for s, v in zip(sources, views, strict=True)]
        if len(sources) == 1:
            self.targets[0].copy_(sources[0], non_blocking=True)
        elif sources:
            torch._foreach_copy_(self.targets, sources, non_blocking=True)

    def load(self, leaves: Sequence[Any] | Mapping[int, Any]) -> None:
        """Copy those tensors of a call here that are not here already."""
        if self._only is not None:
            index, target, address, view, _ = self._only
            source = leaves[index]
            if source.data_ptr() != address:
                if self.note_loaded is not None:
                    self.note_loaded(target)
                if source.requires_grad and torch.is_grad_enabled():
                    source = source.detach()  # costs less than a no_grad block around the copy
                target.copy_(source.as_strided(*view) if view is not None else source)
            return
        targets, sources = [], []
        for index, target, address, view, shared in self._edges:
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
            sources.append(source.as_strided(*view) if view is not None else source)
        if targets:
            if self.note_loaded is not None:
                for target in targets:
                    self.note_loaded(target)
            if len(targets) == 1:
                targets[0].copy_(sources[0])
            else:
                torch._foreach_copy_(targets, sources)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without the repetitions of expand(), which cannot be copied into."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same geometry."""
    made = ArgMetadata(tensor).changed(requires_grad=False).empty(tensor.device)
    StaticInputs({0: made}).load([tensor])
    return made
