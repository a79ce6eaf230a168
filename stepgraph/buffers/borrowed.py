"""A borrowed tensor is static memory in a caller's hands, and knows if they still hold it.

A graph's tensor is best handed out as it lies, without a copy. Then somebody may keep it, or a view of it, and the next
replay would change it under their eyes. To see that in time, it is handed out over a storage of its own: the same
memory, another storage object, whose references are the callers' alone, whatever graphs and buffers of ours know the
first one. DLPack makes such a storage; it keeps the first one alive for as long as anybody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.dlpack import from_dlpack

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class BorrowedTensor:
    """One static tensor that is handed out."""

    __slots__ = ("_alias", "_key", "_own")

    def __init__(self, alias: torch.Tensor) -> None:
        self._alias = alias
        self._key = alias.untyped_storage()._cdata
        self._own = 0

    def settle(self) -> BorrowedTensor:
        """Nothing is handed out yet: the references that there are now are our own."""
        self._own = _use_count(self._key)
        return self

    def lend(self) -> torch.Tensor:
        """The tensor, free of history."""
        return self._alias.data  # no view: a caller may change it in place, as they may any result

    def copy(self, *, goes_on: bool = True) -> torch.Tensor:
        """A copy of the tensor, in memory of its own. `goes_on`: whether it may go straight to another graph."""
        return self._alias.clone()

    def is_held(self) -> bool:
        """Whether anybody holds the tensor, a view of it, or another one in the same memory."""
        return _use_count(self._key) > self._own


def any_held(lent: Iterable[BorrowedTensor]) -> bool:
    """Whether anybody holds one of these."""
    for one in lent:  # noqa: SIM110 (a generator would cost more than the question)
        if _use_count(one._key) > one._own:
            return True
    return False


def lend_out(tensors: Sequence[torch.Tensor]) -> list[BorrowedTensor]:
    """Get static tensors ready to be handed out. Those in one storage are in one storage for the callers, too."""
    storages: dict[int, torch.UntypedStorage] = {}
    made = []
    with torch.inference_mode(False), torch.no_grad():
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


def lend_by_address(tensors: Sequence[torch.Tensor]) -> list[BorrowedTensor]:
    """The same for memory that others may be given meanwhile: the tensors are not kept alive. For copies only."""
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
