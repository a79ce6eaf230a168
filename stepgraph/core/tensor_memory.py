"""These checks find which tensors of a call share memory, and which ones the call wrote to.

torch counts the writes to a tensor (`_version`), but not those through `.data`, nor the running statistics of
`F.batch_norm`. So contents are compared bit for bit, before an eager call and after it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.storage import geometry_of, is_strided, memory_of, special_kind, storage_of


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage holds all of it: one that was resized to less frees memory under tensors."""
    return tensor.numel() == 0 or _reach(tensor)[1] <= tensor.untyped_storage().nbytes()


class Alignment(NamedTuple):
    """Where a tensor begins, past the last multiple of some power of two."""

    modulus: int
    rest: int

    def __str__(self) -> str:
        return f"{self.rest} bytes past a multiple of {self.modulus}"


def alignment_of(tensor: torch.Tensor, device: str) -> Alignment | None:
    """What kernels on a device see of a tensor's address. It decides which elements they add up together.

    None where it does not matter: for integers, which are exact in any order, for single numbers, and for a tensor on
    another device, which is moved first. Kernels of the CPU begin at the next multiple of a vector or of a line of the
    cache. Those of CUDA begin at one of 16 bytes, and are chosen by the power of two that divides the address, up to
    256.
    """
    if tensor.device.type != device or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() < 2:
        return None
    if memory_of(tensor) is None:
        return None
    address = tensor.data_ptr()
    if device == "cpu":
        return Alignment(_LINE, address % _LINE)
    rest = address % _LARGEST
    if rest % _VECTOR:
        return Alignment(_VECTOR, rest % _VECTOR)
    power = rest & -rest
    return Alignment(2 * power, power) if power else Alignment(_LARGEST, 0)


_LINE, _VECTOR, _LARGEST = 64, 16, 256


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
    found = [storage_of(leaf) for leaf in leaves if issubclass(type(leaf), torch.Tensor)]
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
                if is_plain and not special_kind(tensor) and id(tensor) not in seen and has_memory(tensor):
                    seen.add(id(tensor))
                    self._copies.append((index, tensor, tensor.detach().clone()))

    def changed(self) -> set[int]:
        """The numbers of those that have changed. Asking waits for the device."""
        with torch.no_grad():
            return {
                index
                for index, tensor, copy in self._copies
                if not has_memory(tensor) or not _same_bits(tensor.detach(), copy)
            }


def resize_as_before(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Give a storage the size that it had, before its bytes are written back."""
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)


class SavedContents:
    """The contents of tensors at one moment, to be put back: of each storage first the size, then the bytes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for tensor in tensors:
                if memory_of(tensor) is not None:
                    storage = tensor.untyped_storage()
                    self._sizes.setdefault(storage._cdata, (storage, storage.nbytes()))
                    if not has_memory(tensor):
                        continue
                self._copies.append((tensor, tensor.detach().clone()))

    def put_back(self) -> None:
        """Write the contents back, in place."""
        for storage, num_bytes in self._sizes.values():
            resize_as_before(storage, num_bytes)
        with torch.no_grad():
            for tensor, content in self._copies:
                (tensor.data if is_strided(tensor) else tensor).copy_(content)  # `data` of others has parts of its own


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Compare bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
    return plain.as_strided((len(plain),), (1,)).view(torch.uint8)  # torch lets a single element keep any stride
