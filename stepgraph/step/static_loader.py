"""`StaticBufferLoader` copies the microbatches of an iteration into static buffers before the iteration runs.

A graph of a whole iteration reads every microbatch at a fixed address. So all of them are read from the data iterators
first and copied into buffers. Each microbatch of each model chunk has buffers of its own, found by what it looks like:
containers, shapes, dtypes, plain values. One that looks different has different buffers, so that no graph ever runs on
data that it was not recorded for.

A microbatch is copied as soon as it is read and before the next one is asked for, because an iterator may refill the
memory that it handed out. The copies are queued on a stream of their own: they wait for the work that read the buffers
last, not for what was queued after it, such as an optimizer's step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from stepgraph.backends import Backend
from stepgraph.errors import CaptureError, InvalidArgument, StepgraphError
from stepgraph.session.session import Session
from stepgraph.signature import Described, describe_leaf, is_plain, leaf_key, leaf_keys
from stepgraph.signature.attributes import refuse_unlike_buffers
from stepgraph.step.arguments import StepArguments
from stepgraph.tracebacks import entry_point, trim
from stepgraph.tree import Structure, flatten, paths, unflatten

_READ_FIRST = "all microbatches of an iteration are read into static buffers before it runs."


class _Slot:
    """The buffers of one microbatch, and the tensors that they were last filled from."""

    def __init__(self, structure: Structure, leaves: Sequence[Any], prefix: str, backend: Backend) -> None:
        self._structure = structure
        self.names = paths(structure, prefix)
        self.inputs = StepArguments(leaves, backend)
        self.sources: Sequence[Any] = ()

    def fill(self, leaves: Sequence[Any]) -> None:
        self.inputs.load(leaves)
        self.inputs.watch()
        self.sources = leaves

    def tree(self) -> Any:
        """The microbatch, in containers made anew: a step may change those."""
        return unflatten(self._structure, self.inputs.leaves)

    def describe(self) -> str:
        parts = zip(paths(self._structure, "microbatch"), self.inputs.leaves, strict=True)
        return ", ".join(f"{path}={describe_leaf(leaf_key(leaf))}{_unusual_strides(leaf)}" for path, leaf in parts)


class _Written(NamedTuple):
    """An iteration's results, with what it wrote to: which slot, which of its leaves."""

    results: Any
    places: tuple[tuple[int, int], ...]


class StaticMicrobatches(Described):
    """The microbatches of one iteration in their static buffers; the next load of the same layout fills them again."""

    def __init__(self, chunks: Sequence[Sequence[_Slot] | None], *, one_a_chunk: bool) -> None:
        self._chunks = chunks
        self._one_a_chunk = one_a_chunk
        self.slots = [slot for chunk in chunks for slot in chunk or ()]
        self._storages = {_storage(leaf) for slot in self.slots for leaf in slot.inputs.leaves} - {None}

    def data_iterator(self) -> Any:
        """What takes the place of the data iterator: an iterator, or a list with one a chunk (None where it was)."""
        found = [None if chunk is None else iter([slot.tree() for slot in chunk]) for chunk in self._chunks]
        return found if self._one_a_chunk else found[0]

    def without_aliases(self, results: Any) -> Any:
        """Results with copies in the place of static buffers, which the next load overwrites."""
        leaves, structure = flatten(results)
        if not any(_storage(leaf) in self._storages for leaf in leaves):
            return results
        return unflatten(structure, [leaf.clone() if _storage(leaf) in self._storages else leaf for leaf in leaves])

    def noting_writes(self, results: Any) -> Any:
        """Results, and with them, where there are any, the places in the buffers that the iteration wrote to.

        Python only runs while the iteration is eager or recorded. What is returned with a recording's results is handed
        out with those of each of its replays: so it is known which graph has run, and what that one writes.
        """
        places = [(number, index) for number, slot in enumerate(self.slots) for index in slot.inputs.written_now()]
        return _Written(results, tuple(sorted(places))) if places else results

    def write_back(self, results: Any) -> Any:
        """Give what an iteration wrote to the buffers, and gradients, to the tensors that they were filled from."""
        places: tuple[tuple[int, int], ...] = ()
        if isinstance(results, _Written):
            results, places = results
        for number, slot in enumerate(self.slots):
            written = [index for place, index in places if place == number]
            slot.inputs.note_use(slot.sources, slot.names, written)
        if places:
            self._refuse_shared()
        for slot in self.slots:
            slot.inputs.store(slot.sources)
        return results

    def _refuse_shared(self) -> None:
        """In eager a write to one microbatch is seen in another that shares its memory; between buffers it is not."""
        sharing: dict[int, dict[tuple[int, int], str]] = defaultdict(dict)
        written = set()
        for slot in self.slots:
            for index, (name, leaf) in enumerate(zip(slot.names, slot.sources, strict=True)):
                storage = _storage(leaf)
                if storage is not None:
                    sharing[storage].setdefault((id(slot), id(leaf)), name)
                    if index in slot.inputs.written:
                        written.add(storage)
        for storage in written:
            one, *others = sharing[storage].values()
            if others:
                raise CaptureError(
                    f"the step writes to memory that `{one}` and `{others[0]}` share",
                    rule="shared-input",
                    why="each microbatch is copied into buffers of its own, where the write would not be seen.",
                    fix="let the data iterator yield tensors of their own (batch.clone()), or do not write to them.",
                )

    @property
    def num_bytes(self) -> int:
        """The buffers' memory."""
        return sum(slot.inputs.num_bytes for slot in self.slots)

    def __repr__(self) -> str:
        parts = []
        for index, chunk in enumerate(self._chunks):
            label = f"chunk {index}: " if self._one_a_chunk else ""
            parts.append(label + (_in_runs([slot.describe() for slot in chunk]) if chunk else "none"))
        return "; ".join(parts)


class StaticBufferLoader:
    """Reads the microbatches of an iteration into static buffers, on a stream of its own.

    Example:
        >>> loader = stepgraph.StaticBufferLoader()
        >>> microbatches = loader.load(data_iterator, num_microbatches=4)
        >>> losses = forward_backward_func(data_iterator=microbatches.data_iterator(), ...)

    Tensors may live in host memory, pinned or not, or on the device. Loads that look alike (structure, shapes, dtypes,
    plain values) fill the same buffers. Of `max_layouts` different ones the buffers are kept; further ones get
    buffers that live as long as the caller holds the result.
    """

    @entry_point
    def __init__(self, backend: Backend | Session | str | None = None, *, max_layouts: int = 8) -> None:
        session = backend if isinstance(backend, Session) else Session(backend)
        self._backend = session.backend
        self._stream = self._backend.copy_stream()
        self._max_layouts = max_layouts
        self._slots: dict[Hashable, _Slot] = {}
        self._layouts: dict[Hashable, StaticMicrobatches] = {}
        self._all_use_is_marked = False

    def load(self, data_iterator: Any, num_microbatches: int) -> StaticMicrobatches:
        """Read that many microbatches from an iterator, or from each of a list of them with one a model chunk."""
        try:
            self._check(num_microbatches)
            one_a_chunk = isinstance(data_iterator, (list, tuple))
            iterators = _checked(list(data_iterator) if one_a_chunk else [data_iterator])
            made: dict[Hashable, _Slot] = {}
            chunks: list[tuple[_Slot, ...] | None] = []
            for chunk, iterator in enumerate(iterators):
                prefix = f"microbatches[{chunk}]" if one_a_chunk else "microbatches"
                slots: list[_Slot] = []
                while iterator is not None and len(slots) < num_microbatches:
                    try:
                        microbatch = next(iterator)
                    except StopIteration:
                        raise _ended(chunk, len(slots), num_microbatches) from None
                    slots.append(self._fill(f"{prefix}[{len(slots)}]", microbatch, made))
                chunks.append(None if iterator is None else tuple(slots))
            self._all_use_is_marked = False
            return self._layout((one_a_chunk, *chunks), made)
        except StepgraphError as error:
            trim(error)
            raise

    def _fill(self, place: str, microbatch: Any, made: dict[Hashable, _Slot]) -> _Slot:
        leaves, structure = flatten(microbatch)
        key = (place, structure, leaf_keys(leaves))
        slot = self._slots.get(key)
        # new memory, and what is on the device already, may be waiting for work on the caller's stream
        wait = slot is None or not self._all_use_is_marked
        wait = wait or any(isinstance(leaf, torch.Tensor) and self._backend.owns(leaf) for leaf in leaves)
        if slot is None:
            _refuse_opaque(leaves, paths(structure, place))
            refuse_unlike_buffers(leaves, paths(structure, place))
            made[key] = slot = _Slot(structure, leaves, place, self._backend)
        with self._stream.copying(after_caller=wait):
            slot.fill(leaves)
        return slot

    def _layout(self, key: tuple[Any, ...], made: dict[Hashable, _Slot]) -> StaticMicrobatches:
        one_a_chunk, *chunks = key
        found = self._layouts.get(key)
        if found is None:
            found = StaticMicrobatches(chunks, one_a_chunk=one_a_chunk)
            if len(self._layouts) < self._max_layouts:
                self._layouts[key] = found
                self._slots.update(made)
        return found

    def release(self, microbatches: StaticMicrobatches) -> None:
        """The work that reads the buffers is queued: the next load waits for that, and for nothing queued later."""
        for slot in microbatches.slots:
            slot.sources = ()
        self._stream.mark_used()
        self._all_use_is_marked = True

    @property
    def num_bytes(self) -> int:
        """The memory of all buffers that are kept."""
        return sum(slot.inputs.num_bytes for slot in self._slots.values())

    def reset(self) -> None:
        """Let go of all buffers, once nothing reads them any more; later loads make new ones."""
        self._backend.synchronize()
        self._layouts.clear()
        self._slots.clear()

    def _check(self, num_microbatches: int) -> None:
        if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
            raise InvalidArgument(
                f"num_microbatches={num_microbatches!r} is not a whole number of at least 1",
                rule="microbatches",
                why=_READ_FIRST,
                fix="pass how many microbatches each data iterator is to be read for.",
            )
        if self._backend.is_capturing():
            raise CaptureError(
                "microbatches are read from a data iterator while a step is captured",
                rule="host-data",
                why="an iterator is read by Python: its data would be those of the capture for ever.",
                fix="capture the iteration alone (FullCudaGraphWrapper), not a step around it.",
            )


def _storage(leaf: Any) -> int | None:
    is_memory = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return int(leaf.untyped_storage()._cdata) if is_memory else None


def _unusual_strides(leaf: Any) -> str:
    return "" if not isinstance(leaf, torch.Tensor) or leaf.is_contiguous() else f" strides {list(leaf.stride())}"


def _checked(iterators: list[Any]) -> list[Any]:
    present = [iterator for iterator in iterators if iterator is not None]
    for iterator in present:
        if not hasattr(iterator, "__next__"):
            raise InvalidArgument(
                f"the data iterator is a {type(iterator).__name__}, which is no iterator",
                rule="microbatches",
                why="microbatches are taken with next(data_iterator); a list is one iterator for each model chunk.",
                fix="pass iter(loader), made once and kept: a new one would begin again.",
            )
    if len({id(iterator) for iterator in present}) < len(present):
        raise InvalidArgument(
            "two model chunks were given one data iterator",
            rule="microbatches",
            why=f"{_READ_FIRST} Chunk after chunk: each would get other microbatches than in eager.",
            fix="give each chunk an iterator of its own (itertools.tee(data_iterator, num_chunks)).",
        )
    return iterators


def _refuse_opaque(leaves: Sequence[Any], names: Sequence[str]) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) and not is_plain(leaf):
            raise InvalidArgument(
                f"`{name}` is a {type(leaf).__name__}, which stepgraph cannot look into",
                rule="opaque-argument",
                why="only tensors are copied into static buffers; what such an object holds would be frozen.",
                fix="yield dataclasses, dicts, tuples, tensors and plain values, or register the class with "
                "torch.utils._pytree.",
            )


def _ended(chunk: int, num_read: int, num_microbatches: int) -> InvalidArgument:
    return InvalidArgument(
        f"the data iterator of chunk {chunk} ended after {num_read} of {num_microbatches} microbatches",
        rule="microbatches",
        why=_READ_FIRST,
        fix="make the iterator endless, or stop before it ends; a last, shorter iteration needs its own "
        "num_microbatches.",
    )


def _in_runs(descriptions: Sequence[str]) -> str:
    """`4 x (a), 1 x (b)` for neighbours that are alike."""
    runs: list[tuple[str, int]] = []
    for one in descriptions:
        if runs and runs[-1][0] == one:
            runs[-1] = (one, runs[-1][1] + 1)
        else:
            runs.append((one, 1))
    return ", ".join(f"{count} x ({one})" for one, count in runs)
