"""`Writes` is the memory from before some calls that these calls write to, as the log of each call sees it.

The dispatcher's schemas say which arguments an operation writes to. Before the first write to memory that is not known
to be saved, its bytes are copied, so that they can be put back, and the user's line is noted. Compiled code and kernels
of Triton are given tensors without saying which ones they write: there it counts if the bytes have changed.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from stepgraph.core.errors import Location
from stepgraph.core.frames import caller_is_autograd
from stepgraph.core.storage import storage_of
from stepgraph.engine.oplog.log import OpLog, Vocabulary, location_of

__all__ = ["WriteLog", "Writes"]


@dataclass(slots=True)
class _Written:
    """Some memory that was written to."""

    storage: weakref.ref[torch.UntypedStorage]
    where: Location | None
    before: torch.UntypedStorage | None
    """Its bytes before the first write; None if a logged call has made it."""
    is_certain: bool


class Writes:
    """The memory that logged calls have written to, besides what is known to be saved."""

    def __init__(self, saved: Iterable[torch.UntypedStorage] = ()) -> None:
        self._saved = _Memory()
        self._made = _Memory()
        self._written: dict[int, _Written] = {}
        for storage in saved:
            self._saved.add(storage)

    def makes(self, storage: torch.UntypedStorage) -> None:
        """A call has made this memory."""
        self._made.add(storage)

    def writes(self, storage: torch.UntypedStorage, where: Location | None, *, is_certain: bool) -> None:
        """A call is about to write to memory that it has not made."""
        found = self._written.get(storage._cdata)
        if found is not None and found.storage() is storage:
            found.is_certain = found.is_certain or is_certain
        elif not self._saved.has(storage) and storage.device.type != "meta":
            before = None
            if not self._made.has(storage):
                with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
                    before = storage.clone()
            self._written[storage._cdata] = _Written(weakref.ref(storage), where, before, is_certain)

    def restore(self) -> None:
        """Put back the bytes of all that is there since before the calls."""
        for one in self._written.values():
            storage = one.storage()
            if storage is not None and one.before is not None and storage.nbytes() == one.before.nbytes():
                one.is_certain = one.is_certain or not _is_same(storage, one.before)
                storage.copy_(one.before)

    def unsaved(self) -> list[Location | None]:
        """After `restore`: the lines that wrote to memory which is still there, and which is not known to be saved."""
        if any(one.storage() is not None for one in self._written.values()):
            gc.collect()  # what a call has made may hold itself
        alive = [one for one in self._written.values() if one.storage() is not None and one.is_certain]
        return list(dict.fromkeys(one.where for one in alive))


class _Memory:
    """Memory by identity, as long as it lives."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        self._held[storage._cdata] = weakref.ref(storage)

    def has(self, storage: torch.UntypedStorage) -> bool:
        found = self._held.get(storage._cdata)
        return found is not None and found() is storage


class WriteLog(OpLog):
    """A log of one call that also reports which memory the call makes, and to which it writes."""

    def __init__(self, vocabulary: Vocabulary, arguments: Iterable[Any], writes: Writes) -> None:
        super().__init__(vocabulary, arguments)
        self._writes = writes

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_hiding:
            self._report(_written_by(func, args, kwargs or {}), is_certain=True)
        return super().__torch_dispatch__(func, kinds, args, kwargs)

    def note_call(self, name: Hashable, leaves: Sequence[Any], call: Callable[[], Any] = lambda: None) -> Any:
        """Also report that it may write to all its arguments."""
        self._report((leaf for leaf in leaves if issubclass(type(leaf), torch.Tensor)), is_certain=False)
        return super().note_call(name, leaves, call)

    def _report(self, tensors: Iterable[torch.Tensor], *, is_certain: bool) -> None:
        """Report memory that is about to be written, and that is no argument of the call and not made in it.

        Where autograd writes without Python between, it writes gradients, or DDP's buckets of them.
        """
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage is None or self.has_made(tensor) or self._given.has(storage):
                    continue
                if not (is_certain and _is_accumulating() and caller_is_autograd()):
                    where = location_of(self._vocabulary.parts[self._line()[0]])
                    self._writes.writes(storage, where, is_certain=is_certain)

    def _bear(self, known: set[int], out: Any, scope: str) -> None:
        super()._bear(known, out, scope)
        for tensor in out if issubclass(type(out), (list, tuple)) else (out,):
            storage = storage_of(tensor) if issubclass(type(tensor), torch.Tensor) else None
            if storage is not None and self.has_made(tensor):
                self._writes.makes(storage)


def _is_accumulating() -> bool:
    """Whether autograd is in no node, or in the one that adds up a gradient: the hooks of that one run in it."""
    node: Any = torch._C._current_autograd_node()
    return node is None or "AccumulateGrad" in node.name()


def _written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    for place, name in _written_arguments(func):
        value = kwargs[name] if name in kwargs else args[place] if place < len(args) else None
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


@functools.lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an operation writes to."""
    schema = getattr(func, "_schema", None)
    arguments = enumerate(schema.arguments) if schema is not None else ()
    return tuple(
        (place, one.name) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write
    )


def _is_same(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    empty = functools.partial(torch.empty, 0, dtype=torch.uint8, device=one.device)
    return torch.equal(empty().set_(one), empty().set_(other))
