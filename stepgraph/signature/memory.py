"""These checks find which tensors of a call share memory, and which ones the call wrote to.

torch counts the writes to a tensor (`_version`), but not those through `.data`, nor the running statistics of
`F.batch_norm`. So contents are compared bit for bit, before an eager call and after it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch

from stepgraph.errors import CaptureError
from stepgraph.storage import geometry_of, is_strided, memory_of, special_kind, storage_of


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, by torch's count; 0 for an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def overlap(one: Any, two: Any) -> bool:
    """Whether two tensors share bytes, gaps between their elements aside."""
    memory = memory_of(one)
    if memory is None or memory != memory_of(two):
        return False
    (begin, end), (other_begin, other_end) = _reach(one), _reach(two)
    return begin < other_end and other_begin < end


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()


def sharing(leaves: Sequence[Any], written: Collection[int]) -> list[tuple[int, int]]:
    """The leaves that are in the memory of one that the step writes to, each with that one."""
    if _lie_apart(leaves):
        return []
    targets = {memory_of(leaves[i]) for i in written} - {None}
    found = []
    for index, leaf in enumerate(leaves):
        if memory_of(leaf) in targets:
            found += [(index, i) for i in written if leaf is not leaves[i] and overlap(leaf, leaves[i])][:1]
    return found


def _lie_apart(leaves: Sequence[Any]) -> bool:
    """One fast check that each tensor has a memory of its own; False is inconclusive."""
    found = [storage_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = [storage._cdata for storage in found if storage is not None]
    return len(found) == len(set(known))


def keys_apart(
    keys: tuple[Hashable, ...], leaves: Sequence[Any], written: Collection[int]
) -> tuple[Hashable, ...] | None:
    """The keys of a call in which one leaf is in the memory of another that is written to; None for other calls."""
    shared = sharing(leaves, written)
    if not shared:
        return None
    marked: list[Any] = list(keys)
    for index, other in shared:
        marked[index] = (*marked[index], "memory", other)
    return tuple(marked)


def moved_argument(name: str) -> CaptureError:
    """Make the error for a step that changed the `geometry` of its copy of an argument."""
    return CaptureError(
        f"the step changes the memory or the shape of argument `{name}`",
        rule="argument-changed",
        why="the step gets a copy of the argument, and only values can be copied back: the caller's tensor would keep "
        "its old memory and shape.",
        fix=f"write the values in place ({name}.copy_(new), not {name}.data = new), use forms without an underscore "
        f"({name}.unsqueeze(0), {name}.t()), or return the new tensor.",
    )


def geometry(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """A tensor's address, shape, strides and dtype."""
    if not is_strided(tensor):
        return (geometry_of(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Contents:
    """A copy of tensors at one moment, to compare with later."""

    def __init__(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        seen: set[int] = set()
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for index, tensor in tensors:
                is_plain = type(tensor) is torch.Tensor and memory_of(tensor) is not None
                if is_plain and not special_kind(tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._copies.append((index, tensor, tensor.detach().clone()))

    def changed(self) -> set[int]:
        """The numbers of those that have changed. Asking waits for the device."""
        with torch.no_grad():
            return {index for index, tensor, copy in self._copies if not _same_bits(tensor.detach(), copy)}


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Compare bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
    return plain.as_strided((len(plain),), (1,)).view(torch.uint8)  # torch lets a single element keep any stride
