"""What a tensor consists of. Most are one strided block of memory; some are several, or none that can be asked for.

Graphs are about addresses, so the whole engine asks tensors for storage, address and strides. A sparse or a nested
tensor, one of a library for CPUs, and one inside a transform of torch.func raise errors of torch's own when asked, or
give another answer than they mean. So the questions are asked here: `memory_of` and `storage_of` answer None,
`special_kind` says in words what a tensor is, and `geometry_of` describes any tensor by the blocks that it consists of.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from stepgraph.core.errors import CaptureError

_is_transformed: Any = torch._C._functorch.is_functorch_wrapped_tensor
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_coo: ("_indices", "_values"),
}


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor has strides and an address that mean what they say: no sparse, nested or transformed one.

    Nor is it a parameter of a lazy module that has no shape yet.
    """
    if isinstance(tensor, UninitializedTensorMixin):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not _is_transformed(tensor)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, if it has one block of its own."""
    if not is_strided(tensor) or tensor._is_zerotensor():
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper of other tensors, which are seen by themselves
        return None


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element; 0 of one without any."""
    return 0 if storage_of(tensor) is None else tensor.data_ptr()


def memory_of(tensor: Any) -> int | None:
    """The id of a tensor's memory; None of one without memory or elements, and of what is no tensor."""
    storage = storage_of(tensor) if issubclass(type(tensor), torch.Tensor) else None
    return None if storage is None or not tensor.numel() else int(storage._cdata)


def refuse_lazy(named: Iterable[tuple[str, Any]], whose: str) -> None:
    """Refuse parameters and buffers of lazy modules that were not called yet."""
    for name, tensor in named:
        if isinstance(tensor, UninitializedTensorMixin):
            raise CaptureError(f"{whose}: `{name}` has no shape yet", rule="lazy-module")


def told(tensor: torch.Tensor) -> str:
    """A tensor in a message."""
    if special := special_kind(tensor):
        return f"a {special}"
    return f"a tensor of shape {list(tensor.shape)}"


def special_kind(tensor: torch.Tensor) -> str:
    """Name a kind of tensor that a buffer of shape, strides and dtype cannot stand for; "" for all others."""
    if isinstance(tensor, UninitializedTensorMixin):
        return "tensor without a shape yet (of a lazy module)"
    if _is_transformed(tensor):
        return "tensor of a transform of torch.func"
    if tensor.layout is torch.strided and not tensor.is_nested:
        return "quantized tensor" if tensor.is_quantized else ""
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return f"nested tensor ({layout})"
    return f"sparse tensor ({layout})" if tensor.layout in _COMPRESSED else f"tensor of layout {layout}"


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape of a tensor; of a nested one, which has many, the number of its tensors."""
    if isinstance(tensor, UninitializedTensorMixin):
        return ("not known",)
    return ("nested", tensor.size(0)) if tensor.is_nested else tuple(tensor.shape)


def geometry_of(tensor: torch.Tensor) -> Hashable:
    """What a tensor is, and where and how each block lies that it consists of; its numbers are not read."""
    about = (type(tensor), tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad, shape_of(tensor))
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        blocks = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in _blocks(tensor))
    return (*about, blocks)


def numbers_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The numbers that a tensor of any kind holds, as strided tensors: to compare it with another."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if tensor.is_quantized:
            return tensor.int_repr(), tensor.dequantize()
        if special_kind(tensor) and tensor.layout not in _COMPRESSED and not tensor.is_nested:
            return (tensor.to_dense(),)
        return tuple(_blocks(tensor))


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a wrapper subclass is taken apart into; none for other tensors."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    for name in flatten(tensor)[0] if flatten is not None else ():
        inner = getattr(tensor, name)
        yield from inner_tensors(inner) if hasattr(type(inner), "__tensor_flatten__") else (inner,)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that a tensor consists of, as far as they can be asked for."""
    if _is_transformed(tensor) or isinstance(tensor, UninitializedTensorMixin):
        return
    if tensor.layout in _COMPRESSED:
        for name in _COMPRESSED[tensor.layout]:
            yield from _blocks(getattr(tensor, name)())
    elif (flatten := getattr(type(tensor), "__tensor_flatten__", None)) is not None:
        for name in flatten(tensor)[0]:
            yield from _blocks(getattr(tensor, name))
    elif tensor.is_nested:
        yield tensor.values()
    elif tensor.layout is torch.strided:
        yield tensor
