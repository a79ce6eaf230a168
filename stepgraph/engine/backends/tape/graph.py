"""A tape graph holds operators, with the addresses of their arguments, and the memory that a replay runs them in.

While it records, each operator is executed and noted (a collective is only noted), and what it is about to overwrite
outside the capture is saved first. At the end that is put back, and every noted address is bound to its final memory
before the first replay: a recording that is only compared with another one is never bound.
Tensors made in the recording keep their numbers until the whole capture is over, because a later graph of the same step
may read them, and CPU kernels look at their input (a probability, an index). Then they are filled with NaN until the
first replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import CaptureRefused, StaleMemoryError
from stepgraph.core.frames import user_location
from stepgraph.core.storage import special_kind
from stepgraph.core.tensor_memory import resize_as_before
from stepgraph.engine.backends.base import Graph, RandomUse
from stepgraph.engine.backends.tape.collectives import Waiting, is_collective, join_messages, silent
from stepgraph.engine.backends.tape.memory import Footprint, GraphTrace, PoolPlace, TapePool, arena_for, bytes_of
from stepgraph.engine.backends.tape.op import (
    Op,
    PythonKernel,
    Ref,
    Surroundings,
    calls_operators,
    has_memory,
    leaves_of,
    mapped,
    run,
)

_ALLOCATIONS = frozenset(
    f"aten::{n}" for n in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_OVERWRITES = frozenset(f"aten::{n}" for n in ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))
# operators that write to an argument although their schema does not say so
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::rrelu_with_noise": ("noise",),
}
unseen_by_modes = torch._C._DisableTorchDispatch
"""A block of the tape's own work, which no dispatch mode sees: neither the recording's own nor a log's."""
_SET = "a generator was seeded, or its state was set, by a method of its own, or another thread drew from it"


class Head:
    """The tape's recording head: the graph that records right now."""

    def __init__(self) -> None:
        self.graph: TapeGraph | None = None

    def refuse(self, error: CaptureRefused) -> None:
        """Break the recording, if one is under way."""
        if self.graph is not None:
            self.graph.refuse(error)


class _Generators:
    """The default generator and the given ones: where they were, and where the recording has left them.

    A generator's own methods (`generator.manual_seed`, `set_state`) are C++: no dispatcher sees them and they cannot be
    replaced. But they leave a state that no recorded work has left, which is noticed before the next operator runs, or
    at the end. So does another thread that draws from a generator. The collector is at rest for all of a recording, so
    states are read as they are.
    """

    def __init__(self, given: Sequence[torch.Generator]) -> None:
        self._known = (torch.default_generator, *given)
        self._before: list[torch.Tensor] = []
        self._now: list[torch.Tensor] = []

    def knows(self, generator: Any) -> bool:
        """Whether a generator is among them. Operators see one through a new Python object each time."""
        return any(_address(generator) == _address(known) for known in self._known)

    def begin(self) -> None:
        self._before = self._now = self._states()

    def note(self) -> None:
        """Take what was done to them just now as part of the recording."""
        self._now = self._states()

    def were_set(self) -> bool:
        """Whether one is elsewhere than recorded work has left it."""
        with unseen_by_modes():
            return not all(map(torch.equal, self._states(), self._now))

    def put_back(self) -> list[torch.Generator]:
        """At the end of the recording, restore all; returns those that a replay moves."""
        pairs = list(zip(self._known, self._before, strict=False))
        moved = [generator for generator, state in pairs if not torch.equal(generator.get_state(), state)]
        for generator, state in pairs:
            generator.set_state(state)
        self._before = []
        return moved

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._known]


def _address(generator: Any) -> int:
    return int(generator._cdata)


class TapeGraph(Graph):
    """One recording: a list of operators and the memory they use."""

    def __init__(self, head: Head, pool: TapePool, generators: Sequence[torch.Generator], lane: int = 0) -> None:
        self._head = head
        self._pool = pool
        self._lane = lane
        self._generators = _Generators(generators)
        self._ops: list[Op] = []
        self._outside: dict[int, PoolPlace] = {}
        self._born: dict[int, PoolPlace] = {}
        self._backups: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        """The storages that the recording has overwritten, and their bytes before."""
        self._reads: dict[int, PoolPlace] = {}
        self._writes: dict[int, PoolPlace] = {}
        self.trace: GraphTrace | None = None
        """What the pool knows of it, between `end` and `free`."""
        self.random = RandomUse()
        self._refused: CaptureRefused | None = None
        self._counted: list[PoolPlace] | None = None
        """The memory that operators are bound to, once for each tensor over it; None before the first replay."""

    # -- the life of a graph

    def begin(self) -> None:
        self._pool.reap()
        self._generators.begin()
        self._head.graph = self

    def end(self) -> None:
        if self._refused is not None:  # the step caught it; CUDA's capture would be broken all the same
            raise self._refused
        if self._generators.were_set():
            raise CaptureRefused(entry("reseed"), _SET, None)
        self._stop()
        born = list(self._born.values())
        survivors = [place for place in born if self._pool.settle(place)]
        join_messages(self._ops)
        blocks = [place.block for place in (*born, *self._writes.values()) if place.block is not None]
        written = [p.block for p in (*survivors, *self._writes.values()) if p.block is not None]
        read = [place.block for place in self._reads.values() if place.block is not None]
        self.trace = GraphTrace(Footprint(blocks), read, written)
        self._pool.ledger.add(self.trace)

    def abort(self) -> None:
        self._stop()
        for place in self._born.values():
            self._pool.settle(place)  # on CUDA, too, what is still held stays in the pool, and nobody computed it
        self.free()

    def free(self) -> None:
        if self.trace is not None:
            self._pool.ledger.remove(self.trace)
            self.trace = None
        for place in self._counted or ():
            place.aliases -= 1
        self._counted = None
        for held in (self._ops, self._born, self._outside, self._reads, self._writes):
            held.clear()

    def __del__(self) -> None:
        self.free()  # a graph that is dropped holds its memory no more than one that is freed

    def replay(self) -> None:
        assert self.trace is not None, "replay of a graph that was not recorded"
        if self._pool.ledger.stale_read(self.trace) is not None:
            raise StaleMemoryError(
                "a graph was about to read memory that another graph's replay has overwritten",
                rule="stale-memory",
            )
        if self._pool.named_in_the_way(self.trace) is not None:
            raise StaleMemoryError(
                "a graph was about to overwrite memory of another graph that the program can still reach",
                rule="stale-memory",
                why="a gradient or a result lies where a graph that was captured before keeps its intermediates.",
                fix="this is an error of stepgraph: please report it. Give each step a session of its own until then.",
            )
        if self._counted is None:
            self._counted = self._bind()
        run(self._ops)
        self._pool.ledger.replayed(self.trace)
        self._pool.poison_overwritten(self.trace)

    def note_loaded(self, tensor: torch.Tensor) -> None:
        place = self._pool.find(tensor.untyped_storage()._cdata)
        if place is not None and place.block is not None:
            self._pool.ledger.loaded(place.block)

    @property
    def recorded_anything(self) -> bool:
        return bool(self._ops)

    @property
    def nodes(self) -> int:
        return len(self._ops)

    def _stop(self) -> None:
        """Stop recording, and restore memory and random state."""
        if self._head.graph is self:
            self._head.graph = None
        with torch.no_grad(), unseen_by_modes():
            for storage, saved in self._backups.values():
                resize_as_before(storage, saved.nbytes)
                bytes_of(storage).copy_(saved)
            self.random.moved += self._generators.put_back()
        self._backups.clear()

    # -- recording

    def refuse(self, error: CaptureRefused) -> None:
        self._refused = self._refused or error
        raise error

    def knows(self, generator: torch.Generator) -> bool:
        """Whether a generator is one whose state the recording puts back and replays advance."""
        return self._generators.knows(generator)

    @contextlib.contextmanager
    def moving_generators(self, may_draw: bool = True) -> Iterator[None]:
        """A block of recorded work that may move generators. Refuses moves since the last such block."""
        if self._generators.were_set():
            self.refuse(CaptureRefused(entry("reseed"), _SET, user_location()))
        yield
        if may_draw:
            self._generators.note()

    def call(self, action: Callable[[], Any]) -> None:
        """Note a host call that must happen at each replay."""
        self._ops.append(Op(action, (), {}, [], Surroundings(torch.is_grad_enabled(), None)))

    def record(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inside: PythonKernel | None = None,
    ) -> Any:
        """Execute one operator and note it.

        `inside` is its kernel, if that is a Python function: what it calls is recorded, too, and stands for it if that
        accounts for all that it makes and writes. Else it has bypassed the dispatcher, and is noted as one.
        """
        kind = _kind_of(func)
        name = kind.name
        leaves = leaves_of((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf._is_zerotensor()]
        self._check(name, tensors, leaves)
        known = {t.untyped_storage()._cdata for t in tensors}
        known |= {leaf._cdata for leaf in leaves if isinstance(leaf, torch.UntypedStorage)}
        written = tensors if kind.is_collective else kind.written_among(args, kwargs)
        written_keys = {t.untyped_storage()._cdata for t in written}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
            if not (is_whole and name in _OVERWRITES and storage._cdata in written_keys):
                self._note_read(tensor)
        for tensor in written:
            self._note_write(tensor)
        noted = [self._ref(leaf) if isinstance(leaf, torch.Tensor) and _has_numbers(leaf) else leaf for leaf in leaves]
        around = Surroundings.of(calls_operators=kind.calls_operators)
        called = inside or (func if kind.is_torchs else silent(func, self.refuse))
        begin, outside = len(self._ops), set(self._outside)
        with self.moving_generators(kind.may_draw):
            out = around.call(called, args, kwargs)
        if inside is not None:
            if not inside.reads and self._accounts_for(begin, outside, written, out, known):
                return out
            del self._ops[begin:]
        self._note_resizing(name, written)
        for index, leaf in enumerate(leaves):  # an `out=` argument may have been resized
            if isinstance(leaf, torch.Tensor) and leaf.shape != noted[index].shape and not kind.changes_metadata:
                noted[index] = self._ref(leaf)
        results = self._results(name, out, known)
        if name in _ALLOCATIONS and results:
            out.data.zero_()  # a collective that fills it at replays leaves what is there, and kernels look at numbers
        is_view = not written and not results
        if name not in _ALLOCATIONS and not kind.changes_metadata and not is_view:
            runner = Waiting(func) if kind.is_collective else func
            addresses = iter(noted)
            noted_args, noted_kwargs = mapped(lambda _: next(addresses), (args, kwargs))
            self._ops.append(Op(runner, noted_args, noted_kwargs, results, around))
        return out

    def _accounts_for(
        self, begin: int, outside: Collection[int], written: Sequence[torch.Tensor], out: Any, known: Collection[int]
    ) -> bool:
        """Whether the operators noted since `begin` have made all these results, and have written to these tensors.

        They must have used no other memory from outside than was known before: it may have been made on the way.
        """
        if self._outside.keys() - outside:
            return False
        changed: set[int] = set()
        for op in self._ops[begin:]:
            given = leaves_of((op.args, op.kwargs))
            if isinstance(op.func, torch._ops.OpOverload):
                given = _kind_of(op.func).given_to_write(op.args, op.kwargs)
            changed.update(id(leaf.place) for leaf in given if type(leaf) is Ref)
        if any(id(self._place(tensor)) not in changed for tensor in written):
            return False
        made = (leaf.untyped_storage()._cdata for leaf in leaves_of(out) if isinstance(leaf, torch.Tensor))
        return all(storage in known or self._pool.find(storage) is not None for storage in made)

    def _check(self, name: str, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> None:
        if (special := next(filter(None, map(special_kind, tensors)), None)) is not None:
            self.refuse(CaptureRefused(entry("tape-limit"), f"{name} on a {special}", user_location()))
        if any(isinstance(leaf, torch.Generator) and not self.knows(leaf) for leaf in leaves):
            self.refuse(CaptureRefused(entry("generator"), name, user_location()))

    def _results(self, name: str, out: Any, known: set[int]) -> list[tuple[Ref, int]]:
        """Results in memory that is not an argument's; new memory is registered."""
        found = []
        for index, result in enumerate(leaves_of(out)):
            if not isinstance(result, torch.Tensor) or not has_memory(type(result)):
                continue
            if not _has_numbers(result):
                continue
            if special := special_kind(result):
                self.refuse(CaptureRefused(entry("tape-limit"), f"{name} makes a {special}", user_location()))
            storage = result.untyped_storage()
            if storage._cdata in known:
                continue
            if self._pool.find(storage._cdata) is None and storage._cdata not in self._outside:
                place = self._pool.birth(storage, self._lane)
                place.holds_floats = result.is_floating_point() or result.is_complex()
                self._born[id(place)] = place
            found.append((self._ref(result), index))
        return found

    def _note_resizing(self, name: str, written: Sequence[torch.Tensor]) -> None:
        """Memory that an operator has resized moves to a larger block if it was made here; else it is refused."""
        for tensor in written:
            storage = tensor.untyped_storage()
            place = self._place(tensor)
            if storage.nbytes() == place.num_bytes:
                continue
            if id(place) not in self._born:
                self.refuse(CaptureRefused(entry("storage-resize"), name, user_location()))
            if storage.nbytes() > place.num_bytes:
                self._pool.grow(place, storage.nbytes())

    def adopt(self, tensor: torch.Tensor) -> None:
        """Bake a constant of torch's own code into the graph."""
        self._place(tensor)

    def _place(self, tensor: torch.Tensor) -> PoolPlace:
        storage = tensor.untyped_storage()
        place = self._pool.find(storage._cdata) or self._outside.get(storage._cdata)
        if place is None:
            place = self._outside[storage._cdata] = PoolPlace(storage.nbytes(), storage, None)
        return place

    def _ref(self, tensor: torch.Tensor) -> Ref:
        return Ref(
            self._place(tensor),
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _note_read(self, tensor: torch.Tensor) -> None:
        place = self._pool.find(tensor.untyped_storage()._cdata)
        if place is not None and id(place) not in self._writes and id(place) not in self._born:
            self._reads.setdefault(id(place), place)

    def _note_write(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = self._place(tensor)
        if id(place) in self._born:
            return
        self._writes.setdefault(id(place), place)
        if storage._cdata not in self._backups:
            self._backups[storage._cdata] = (storage, bytes_of(storage).clone())

    # -- binding addresses to memory

    def _bind(self) -> list[PoolPlace]:
        """Turn every noted address into a tensor over its final memory, and return the memory of each.

        All take their place at once: a Ctrl-C in the middle leaves the notes.
        """
        arena, start = arena_for([place for place in self._born.values() if place.storage is None])
        made: dict[Ref, torch.Tensor] = {}
        counted: list[PoolPlace] = []

        def alias(ref: Any) -> Any:
            if type(ref) is not Ref:
                return ref
            tensor = made.get(ref)
            if tensor is None:
                storage, shift = ref.place.storage, 0
                if storage is None:
                    assert ref.place.block is not None
                    storage, shift = arena, (ref.place.block.start - start) // ref.dtype.itemsize
                else:
                    counted.append(ref.place)
                tensor = torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset + shift, ref.shape, ref.stride)
                tensor = tensor.conj() if ref.conj else tensor
                tensor = torch._neg_view(tensor) if ref.neg else tensor
                made[ref] = tensor
            return tensor

        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            arena.fill_(0xFF)  # type: ignore[attr-defined]
            bound = []
            for op in self._ops:
                args, kwargs = mapped(alias, (op.args, op.kwargs))
                results = [(alias(ref), index) for ref, index in op.results]
                bound.append(dataclasses.replace(op, args=args, kwargs=kwargs, results=results))
        for place in counted:
            place.aliases += 1
        self._ops[:] = bound
        return counted


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers in memory: a meta tensor has none, nor has a symbolic zero.

    Forward-mode AD makes both: to learn a result's geometry, and as the tangent of what is no input.
    """
    return not (tensor.is_meta or tensor._is_zerotensor())


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of an operator. Its own properties are slow: they take its name or schema apart at each look."""

    name: str
    is_torchs: bool
    is_collective: bool
    calls_operators: bool
    may_draw: bool
    """Whether it may move a generator. A custom operator may call whatever draws."""
    changes_metadata: bool
    written: tuple[tuple[int | None, str], ...]
    """The arguments that it writes to: their positions, where they have one, and names."""

    def written_among(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        return [leaf for leaf in self.given_to_write(args, kwargs) if isinstance(leaf, torch.Tensor)]

    def given_to_write(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of those arguments: tensors, or their addresses."""
        found = []
        for index, name in self.written:
            found += leaves_of(args[index] if index is not None and index < len(args) else kwargs.get(name))
        return found


@functools.lru_cache(maxsize=4096)
def _kind_of(func: torch._ops.OpOverload) -> _Kind:
    schema = func._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    return _Kind(
        schema.name,
        func.namespace == "aten",
        is_collective(func),
        calls_operators(func),
        func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags,
        torch.Tag.inplace_view in func.tags and not schema.name.startswith("aten::resize"),
        tuple(
            (None if argument.kwarg_only else index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in undeclared
        ),
    )
