"""A borrowed tensor is static memory lent to callers; it knows whether they still hold it.

It is fastest to return a graph's tensor without a copy. But a caller may keep it, or a view of it, and the next replay
would overwrite it. To notice that in time, the tensor is returned with a separate storage object over the same memory.
Only callers hold references to that one; graphs and buffers of stepgraph use the original. DLPack makes such a storage,
and it keeps the original alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.dlpack import from_dlpack

from stepgraph.core.storage import memory_of

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class BorrowedTensor:
    """One static tensor that is lent to callers."""

    __slots__ = ("_alias", "_key", "_own")

    def __init__(self, alias: torch.Tensor) -> None:
        self._alias = alias
        self._key = alias.untyped_storage()._cdata
        self._own = 0

    @property
    def tensor(self) -> torch.Tensor:
        """The static memory."""
        return self._alias

    def settle(self) -> BorrowedTensor:
        """Count stepgraph's own references, before the tensor is lent."""
        self._own = _use_count(self._key)
        return self

    def lend(self) -> torch.Tensor:
        """Return the tensor, without autograd history."""
        return self._alias.data  # not a view: a caller may change it in place, like any result

    def copy(self, *, goes_on: bool = True) -> torch.Tensor:
        """Return a copy in new memory. `goes_on`: the copy may go straight to another graph."""
        return self._alias.clone()

    def is_held(self) -> bool:
        """Check whether a caller holds the tensor, a view of it, or another tensor in the same memory."""
        return _use_count(self._key) > self._own


def any_held(lent: Iterable[BorrowedTensor]) -> bool:
    for one in lent:  # noqa: SIM110 (a generator would cost more than the check)
        if _use_count(one._key) > one._own:
            return True
    return False


def lend_out(tensors: Sequence[torch.Tensor]) -> list[BorrowedTensor]:
    """Prepare static tensors to be lent. Tensors that share a storage also share one for the callers."""
    storages: dict[int, torch.UntypedStorage] = {}
    made = []
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                storages[storage._cdata] = from_dlpack(torch._C._to_dlpack(whole)).untyped_storage()
            alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            alias.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
            made.append(BorrowedTensor(_with_bits(alias, tensor)))
    storages.clear()
    return [lent.settle() for lent in made]


def sharing_memory(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indices of tensors that lie in one memory, for each memory with more than one."""
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        memory = memory_of(tensor)
        if memory is not None:
            groups.setdefault(memory, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def copied_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors in one memory that share the memory of the copy in the same way."""
    spans = [(tensor.storage_offset() * tensor.element_size(), _end(tensor)) for tensor in tensors]
    begin = min(start for start, _ in spans) // _APART * _APART
    with torch.inference_mode(False), torch.no_grad():
        storage = tensors[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        whole.set_(storage, begin, (max(end for _, end in spans) - begin,), (1,))
        memory, made = whole.clone().untyped_storage(), []
        for tensor, (start, _) in zip(tensors, spans, strict=True):
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy.set_(memory, (start - begin) // tensor.element_size(), tensor.shape, tensor.stride())
            made.append(_with_bits(copy, tensor))
        return made


_APART = 512
"""Where the copy begins: at an address like that of the original, so that both have the same alignment."""


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + max(last, 0) + 1) * tensor.element_size()


def lend_by_address(tensors: Sequence[torch.Tensor]) -> list[BorrowedTensor]:
    """Like `lend_out`, without keeping the tensors alive: others may use their memory meanwhile. For copies only."""
    with torch.inference_mode(False), torch.no_grad():
        return [BorrowedTensor(_with_bits(_over_address(tensor), tensor)).settle() for tensor in tensors]


def _over_address(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _with_bits(alias: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias
