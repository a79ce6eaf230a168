"""The layout check compares addresses and forms of tensors with those that a graph's kernels were recorded with.

torch has no event for new data in a tensor (`.data = ...`), which may be a part of the old data. So address and form of
all tensors are read before each replay, in bulk.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from stepgraph.core.storage import is_strided
from stepgraph.engine.backends.native.row import GuardRow, Layout
from stepgraph.engine.guards.protocol import Change, Remedy

_data_ptr = torch.Tensor.data_ptr
_stride = torch.Tensor.stride
_form = operator.attrgetter("shape", "dtype")


def _compare_addresses(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    return list(map(_data_ptr, tensors)) == addresses


# torch's builds for CUDA have this in C++
_same_addresses: Callable[[list[torch.Tensor], list[int], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _compare_addresses
)


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the address and form of a tensor, or None if it has no block of memory (sparse, nested, lazy)."""
    if not is_strided(tensor):
        return None
    return tensor, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), _keys_of(tensor)


def layouts_of(tensors: Iterable[torch.Tensor]) -> list[Layout]:
    """Return the layouts of these tensors, without those that have none."""
    return [layout for tensor in tensors if (layout := layout_of(tensor)) is not None]


def asks_addresses(layouts: Sequence[Layout]) -> Callable[[], bool]:
    """Return a function that checks that all these tensors are where they were."""
    tensors, addresses = [layout[0] for layout in layouts], [layout[1] for layout in layouts]
    return functools.partial(_same_addresses, tensors, addresses, list(range(len(tensors))))


def change_of(layout: Layout) -> str | None:
    """Describe how a tensor's address or form changed, or return None."""
    tensor, address, dtype, shape, stride, keys = layout
    if tensor.shape != shape:
        return f"has the shape {list(tensor.shape)}, not {list(shape)}"
    if tensor.data_ptr() != address:
        return "moved to another address"
    if tensor.stride() != stride:
        return "has other strides"
    if tensor.dtype != dtype:
        return f"has the dtype {tensor.dtype}, not {dtype}"
    return "is conjugated, negated or of another kind" if _keys_of(tensor) != keys else None


def _keys_of(tensor: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


class Layouts:
    """The layouts of some tensors, compared in bulk."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = list(layouts)
        self._tensors = [layout[0] for layout in layouts]
        self._addresses = [layout[1] for layout in layouts]
        self._forms = [(shape, dtype) for _, _, dtype, shape, *_ in layouts]
        self._complex = [layout for layout in layouts if layout[2].is_complex]
        self._strides = [layout[4] for layout in layouts]
        self._indices = list(range(len(layouts)))
        row = GuardRow()
        row.layouts(self._layouts, [self._are_held])
        self.hold: Callable[[], bool] = row.question()
        """Check that all have the same address and form."""

    def changed(self) -> tuple[torch.Tensor, str] | None:
        """Return the first tensor that changed, and how, or None."""
        if self.hold():
            return None
        found = ((layout[0], change_of(layout)) for layout in self._layouts)
        return next(((tensor, what) for tensor, what in found if what is not None), None)

    def expect(self, row: GuardRow, seen: Collection[int] = ()) -> None:
        """Add the check of `hold` to a row. `seen` are the ids of tensors whose form the row has elsewhere."""
        if not seen:
            row.layouts(self._layouts, [self._are_held])
            return
        same_addresses = functools.partial(_same_addresses, self._tensors, self._addresses, self._indices)
        forms = (functools.partial(_has_form, layout) for layout in self._layouts if id(layout[0]) not in seen)
        row.layouts(self._layouts, [same_addresses, *forms])

    def _are_held(self) -> bool:
        return (
            _same_addresses(self._tensors, self._addresses, self._indices)
            and list(map(_stride, self._tensors)) == self._strides
            and list(map(_form, self._tensors)) == self._forms
            and all(map(_has_form, self._complex))
        )


class GradientLayoutGuard:
    """The gradients that a graph reads or leaves: they must keep their addresses."""

    def __init__(self, grads: Iterable[torch.Tensor], seen: Iterable[torch.Tensor | None]) -> None:
        """`seen` are gradients whose form the row has elsewhere."""
        self._layouts = Layouts(layouts_of({id(grad): grad for grad in grads}.values()))
        self._seen = set(map(id, seen))

    def changed(self) -> Sequence[Change]:
        moved = self._layouts.changed()
        if moved is None:
            return ()
        name, what = f"a gradient of shape {list(moved[0].shape)}", f"{moved[1]} (`.grad.data = ...`)"
        return (Change(name, "", what, Remedy.START_OVER),)

    def expect(self, row: GuardRow) -> None:
        self._layouts.expect(row, self._seen)


def _has_form(layout: Layout) -> bool:
    tensor, _, dtype, shape, stride, keys = layout
    is_same = tensor.shape == shape and tensor.stride() == stride and tensor.dtype == dtype
    return is_same and (not dtype.is_complex or _keys_of(tensor) == keys)
