"""`StaticBufferLoader` copies the microbatches of an iteration into static buffers before the iteration runs.

A graph of a whole iteration reads every microbatch at a fixed address. So the loader first reads all of them from the
data iterators and copies them into buffers. Each microbatch of each model chunk has its own buffers, found by its
layout: containers, shapes, dtypes, plain values. A different layout gets different buffers, so that a graph runs only
on data that it was recorded for.

The loader copies a microbatch before it asks for the next one, because an iterator may refill the memory that it handed
out. The copies are queued on a separate stream: they wait for the work that read the buffers last, but not for work
queued after that, such as an optimizer's step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from stepgraph.core.errors import CaptureError, InvalidArgument, StepgraphError
from stepgraph.core.plain_values import Described, is_compared_by_value
from stepgraph.core.storage import memory_of
from stepgraph.core.tensor_attributes import refuse_unlike_buffers
from stepgraph.core.tracebacks import entry_point, trim
from stepgraph.core.tree import Structure, flatten, paths, unflatten
from stepgraph.core.wording import counted, with_article
from stepgraph.engine.backends import Backend
from stepgraph.engine.call.session import Session
from stepgraph.engine.guards.signature import describe_leaf, leaf_key, leaf_keys
from stepgraph.engine.step.arguments import StepArguments

_READ_FIRST = "stepgraph reads all microbatches of an iteration into static buffers before the iteration runs."


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
        """Return the microbatch in new containers: a step may change those."""
        return unflatten(self._structure, self.inputs.leaves)

    def describe(self) -> str:
        parts = zip(paths(self._structure, "microbatch"), self.inputs.leaves, strict=True)
        return ", ".join(f"{path}={describe_leaf(leaf_key(leaf))}{_unusual_strides(leaf)}" for path, leaf in parts)


class _Written(NamedTuple):
    """An iteration's results, with the places that it wrote to: indices of slot and leaf."""

    results: Any
    places: tuple[tuple[int, int], ...]


class StaticMicrobatches(Described):
    """The microbatches of one iteration in static buffers. The next load of the same layout fills them again."""

    def __init__(self, chunks: Sequence[Sequence[_Slot] | None], *, one_a_chunk: bool) -> None:
        self._chunks = chunks
        self._one_a_chunk = one_a_chunk
        self.slots = [slot for chunk in chunks for slot in chunk or ()]
        self._storages = {memory_of(leaf) for slot in self.slots for leaf in slot.inputs.leaves} - {None}

    def data_iterator(self) -> Any:
        """Return a substitute for the data iterator: an iterator, or a list with one per chunk (None stays None)."""
        found = [None if chunk is None else iter([slot.tree() for slot in chunk]) for chunk in self._chunks]
        return found if self._one_a_chunk else found[0]

    def without_aliases(self, results: Any) -> Any:
        """Replace static buffers among the results by copies, since the next load overwrites the buffers."""
        leaves, structure = flatten(results)
        if not any(memory_of(leaf) in self._storages for leaf in leaves):
            return results
        return unflatten(structure, [leaf.clone() if memory_of(leaf) in self._storages else leaf for leaf in leaves])

    def noting_writes(self, results: Any) -> Any:
        """Return the results together with the places in the buffers that the iteration wrote to, if any.

        Python runs only in an eager or recorded iteration. The places returned by a recording are returned again by
        each replay of it, so they name the writes of the graph that ran.
        """
        places = [(number, index) for number, slot in enumerate(self.slots) for index in slot.inputs.written_now()]
        return _Written(results, tuple(sorted(places))) if places else results

    def write_back(self, results: Any) -> Any:
        """Copy what an iteration wrote to the buffers, and gradients, to the tensors that filled the buffers."""
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
        """Refuse writes to memory that microbatches share: in eager both see the write, in buffers only one does."""
        sharing: dict[int, dict[tuple[int, int], str]] = defaultdict(dict)
        written = set()
        for slot in self.slots:
            for index, (name, leaf) in enumerate(zip(slot.names, slot.sources, strict=True)):
                storage = memory_of(leaf)
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
                    why="stepgraph copies each microbatch into separate buffers, so the other would not see the write.",
                    fix="let the data iterator yield separate tensors (batch.clone()), or do not write to them.",
                )

    @property
    def num_bytes(self) -> int:
        return sum(slot.inputs.num_bytes for slot in self.slots)

    def __repr__(self) -> str:
        parts = []
        for index, chunk in enumerate(self._chunks):
            label = f"chunk {index}: " if self._one_a_chunk else ""
            parts.append(label + (_in_runs([slot.describe() for slot in chunk]) if chunk else "none"))
        return "; ".join(parts)


class StaticBufferLoader:
    """Reads the microbatches of an iteration into static buffers, on a separate stream.

    Example:
        >>> loader = stepgraph.StaticBufferLoader()
        >>> microbatches = loader.load(data_iterator, num_microbatches=4)
        >>> losses = forward_backward_func(data_iterator=microbatches.data_iterator(), ...)

    Tensors may be in host memory, pinned or not, or on the device. Loads of the same layout (structure, shapes, dtypes,
    plain values) fill the same buffers. The buffers of `max_layouts` layouts are kept; buffers of further layouts live
    as long as the caller holds the result.
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
        """Read `num_microbatches` microbatches from an iterator, or from each of a list with one per model chunk."""
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
        key = (place, structure, leaf_keys(leaves, on=self._backend.device.type))
        slot = self._slots.get(key)
        # new memory, and tensors already on the device, may depend on work queued on the caller's stream
        wait = slot is None or not self._all_use_is_marked
        wait = wait or any(issubclass(type(leaf), torch.Tensor) and self._backend.owns(leaf) for leaf in leaves)
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
        """Mark that all work that reads the buffers is queued: the next load waits for it, but not for later work."""
        for slot in microbatches.slots:
            slot.sources = ()
        self._stream.mark_used()
        self._all_use_is_marked = True

    @property
    def num_bytes(self) -> int:
        """Memory of all kept buffers."""
        return sum(slot.inputs.num_bytes for slot in self._slots.values())

    def reset(self, kept: Sequence[StaticMicrobatches] = ()) -> None:
        """Wait for the device, then drop all buffers but the kept ones. Later loads make new ones."""
        self._backend.synchronize()
        self._layouts = {key: layout for key, layout in self._layouts.items() if layout in kept}
        slots = [slot for layout in self._layouts.values() for slot in layout.slots]
        self._slots = {key: slot for key, slot in self._slots.items() if slot in slots}

    def _check(self, num_microbatches: int) -> None:
        if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
            raise InvalidArgument(
                f"num_microbatches={num_microbatches!r} is not a whole number of at least 1",
                rule="microbatches",
                why=_READ_FIRST,
                fix="pass the number of microbatches to read from each data iterator.",
            )
        if self._backend.is_capturing():
            raise CaptureError(
                "microbatches are loaded from a data iterator during the capture of a step",
                rule="host-data",
                why="Python reads the iterator, and a replay runs no Python: every replay would use the data of the "
                "capture.",
                fix="capture only the iteration (FullCudaGraphWrapper), not a step around it.",
            )


def _unusual_strides(leaf: Any) -> str:
    return "" if not issubclass(type(leaf), torch.Tensor) or leaf.is_contiguous() else f" strides {list(leaf.stride())}"


def _checked(iterators: list[Any]) -> list[Any]:
    present = [iterator for iterator in iterators if iterator is not None]
    for iterator in present:
        if not hasattr(iterator, "__next__"):
            raise InvalidArgument(
                f"the data iterator is {with_article(type(iterator))}, which is not an iterator",
                rule="microbatches",
                why="stepgraph calls next(data_iterator). A list is read as one iterator per model chunk.",
                fix="call iter(loader) once, keep the iterator, and pass it: a new one would start from the beginning.",
            )
    if len({id(iterator) for iterator in present}) < len(present):
        raise InvalidArgument(
            "two model chunks got the same data iterator",
            rule="microbatches",
            why=f"{_READ_FIRST} It reads chunk by chunk: each would get other microbatches than in eager.",
            fix="give each chunk its own iterator (itertools.tee(data_iterator, num_chunks)).",
        )
    return iterators


def _refuse_opaque(leaves: Sequence[Any], names: Sequence[str]) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if not issubclass(type(leaf), torch.Tensor) and not is_compared_by_value(leaf):
            raise InvalidArgument(
                f"`{name}` is {with_article(type(leaf))}, whose contents stepgraph cannot read",
                rule="opaque-argument",
                why="stepgraph copies only tensors into static buffers; values inside such an object would be frozen.",
                fix="yield dataclasses, dicts, tuples, tensors and plain values, or register the class with "
                "torch.utils._pytree.",
            )


def _ended(chunk: int, num_read: int, num_microbatches: int) -> InvalidArgument:
    return InvalidArgument(
        f"the data iterator of chunk {chunk} ended after {num_read} of {counted(num_microbatches, 'microbatches')}",
        rule="microbatches",
        why=_READ_FIRST,
        fix="make the iterator endless, or stop before it ends; a last, shorter iteration needs its own "
        "num_microbatches.",
    )


def _in_runs(descriptions: Sequence[str]) -> str:
    """Join equal neighbours: `4 x (a), 1 x (b)`."""
    runs: list[tuple[str, int]] = []
    for one in descriptions:
        if runs and runs[-1][0] == one:
            runs[-1] = (one, runs[-1][1] + 1)
        else:
            runs.append((one, 1))
    return ", ".join(f"{count} x ({one})" for one, count in runs)
