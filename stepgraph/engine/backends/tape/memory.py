"""The tape models the memory of a graph pool: the address of each tensor, when it dies, and who overwrites whom.

CUDA gives memory that died during a capture to the next new tensor, in this capture or a later one of the same pool.
That makes shared pools small, and dangerous: a graph that reads another graph's output reads garbage once a third
graph, whose capture was given that memory, has been replayed in between.

`AddressPool` is the allocator: best fit, split, coalesce, 512-byte blocks. `Ledger` keeps time: at which replay each
surviving block was last written, and which address ranges each graph writes. A read is stale when a graph whose ranges
overlap was replayed after the block's last write. Any order of replays is right as long as nothing stale is read.

`TapePool` has the storages at these addresses. While the tape records it holds them weakly: a weak reference's callback
is the moment of death, and gives the block back. When the recording ends, what is still alive (outputs, gradients) is
bound to its own storage, and all that died is laid out in one arena at its modelled addresses, so that a replay takes
the memory a pool would. Survivors are watched by their reference count: once only graphs hold one, it is dead too.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

GRANULE = 512
_LANE_SHIFT = 44
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


@dataclass(slots=True, eq=False)
class Block:
    """A range of the pool's addresses, owned by one storage from birth to death."""

    start: int
    size: int
    written_at: int | None = None
    """The tick of the last replay that wrote it."""

    @property
    def stop(self) -> int:
        return self.start + self.size


class AddressPool:
    """Best-fit allocation over a growing range of numbers."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.high_water = start
        self._free: list[tuple[int, int]] = []  # (start, stop), sorted, never adjacent

    def allocate(self, num_bytes: int) -> Block:
        """Take the smallest free range that fits, or new addresses at the end."""
        size = max(GRANULE, -(-num_bytes // GRANULE) * GRANULE)
        fitting = [(stop - start, start) for start, stop in self._free if stop - start >= size]
        if not fitting:
            start = self._free.pop()[0] if self._free and self._free[-1][1] == self.high_water else self.high_water
            self.high_water = start + size
            return Block(start, size)
        length, start = min(fitting)
        index = bisect.bisect_left(self._free, (start, start))
        self._free[index : index + 1] = [(start + size, start + length)] if length > size else []
        return Block(start, size)

    def release(self, block: Block) -> None:
        """Give a range back, joined with its free neighbours."""
        start, stop = block.start, block.stop
        index = bisect.bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))


class Footprint:
    """The merged address ranges that one graph writes."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for block in sorted(blocks, key=lambda b: b.start):
            if self._stops and block.start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], block.stop)
            else:
                self._starts.append(block.start)
                self._stops.append(block.stop)

    def overlaps(self, block: Block) -> bool:
        index = bisect.bisect_right(self._stops, block.start)
        return index < len(self._starts) and self._starts[index] < block.stop


@dataclass(slots=True, eq=False)
class GraphTrace:
    """One graph, as the ledger knows it."""

    footprint: Footprint
    reads: list[Block]
    """Blocks of other graphs that this one reads before it writes them itself."""
    writes: list[Block]
    """Blocks that outlive the capture and that this graph writes."""
    replayed_at: int = field(default=-1)


class Ledger:
    """The order of writes, by replay."""

    def __init__(self) -> None:
        self._tick = 0
        self._traces: list[GraphTrace] = []
        self._freed: list[GraphTrace] = []

    def add(self, trace: GraphTrace) -> None:
        self._traces.append(trace)

    def remove(self, trace: GraphTrace) -> None:
        """Forget a graph, but not what it overwrote while someone may still read what was there before."""
        self._traces.remove(trace)
        self._freed.append(trace)
        written = [b.written_at for t in self._traces for b in t.reads if b.written_at is not None]
        oldest = min(written, default=self._tick)
        self._freed = [t for t in self._freed if t.replayed_at > oldest]

    def stale_read(self, trace: GraphTrace) -> Block | None:
        """A block that the graph would read although another graph has overwritten it since its last write."""
        for block in trace.reads:
            written = block.written_at
            if written is None:
                continue
            for other in (*self._traces, *self._freed):
                if other.replayed_at > written and other.footprint.overlaps(block):
                    return block
        return None

    def loaded(self, block: Block) -> None:
        self._tick += 1
        block.written_at = self._tick

    def replayed(self, trace: GraphTrace) -> None:
        self._tick += 1
        trace.replayed_at = self._tick
        for block in trace.writes:
            block.written_at = self._tick


class PoolPlace:
    """One storage of the tape. `block` is its address in the pool; a storage from outside has none."""

    __slots__ = ("aliases", "block", "holds_floats", "num_bytes", "storage", "watch", "writers")

    def __init__(self, num_bytes: int, storage: torch.UntypedStorage | None, block: Block | None) -> None:
        self.num_bytes = num_bytes
        self.storage = storage
        self.block = block
        self.aliases = 0
        self.holds_floats = True
        self.watch: weakref.ref[torch.UntypedStorage] | None = None
        self.writers: list[GraphTrace] | None = None
        """For memory that Python can reach between calls: the graphs that may write anywhere in it."""


class _Overwritten(NamedTuple):
    """Survivors of other graphs in memory that one graph writes."""

    places: list[PoolPlace]
    named: list[tuple[int, PoolPlace]]
    """Those that Python can reach, and whose graphs do not include this one, each with its key."""


class TapePool:
    """The storages born in one workspace's captures, with their addresses and the ledger of their writes."""

    def __init__(self) -> None:
        self._lanes: dict[int, AddressPool] = {}
        self.ledger = Ledger()
        self._live: dict[int, PoolPlace] = {}
        self._survivors: list[tuple[int, PoolPlace]] = []
        self._unplayed: list[PoolPlace] = []
        """Survivors of recordings of this capture; they still hold the numbers of the recording."""
        self._overwritten: dict[GraphTrace, _Overwritten] = {}
        """By graph; empty after each change of survivors, and of who may write them. Their addresses never change."""
        unused = torch.UntypedStorage(1)
        self._idle_count = _use_count(unused._cdata)  # what Python's own handle counts for

    def find(self, key: int) -> PoolPlace | None:
        return self._live.get(key)

    @property
    def num_bytes(self) -> int:
        return sum(lane.high_water - lane.start for lane in self._lanes.values())

    def birth(self, storage: torch.UntypedStorage, lane: int = 0) -> PoolPlace:
        """Register a storage made while recording in a lane."""
        self.reap()
        key = storage._cdata
        if lane not in self._lanes:
            self._lanes[lane] = AddressPool(lane << _LANE_SHIFT)  # far enough from the others never to meet them
        place = PoolPlace(storage.nbytes(), None, self._lanes[lane].allocate(storage.nbytes()))
        place.watch = weakref.ref(storage, lambda _: self._death(key, place))
        self._live[key] = place
        return place

    def _death(self, key: int, place: PoolPlace) -> None:
        if self._live.get(key) is place:
            del self._live[key]
        assert place.block is not None
        self._lane_of(place.block).release(place.block)

    def _lane_of(self, block: Block) -> AddressPool:
        return self._lanes[block.start >> _LANE_SHIFT]

    def grow(self, place: PoolPlace, num_bytes: int) -> None:
        """Move a storage that was resized to a block that holds it."""
        assert place.block is not None
        lane = self._lane_of(place.block)
        lane.release(place.block)
        place.block, place.num_bytes = lane.allocate(num_bytes), num_bytes

    def settle(self, place: PoolPlace) -> bool:
        """At the end of a recording, also of a failed one: bind a storage that is still alive; False if it has died."""
        if place.storage is not None:
            return True
        storage = place.watch() if place.watch is not None else None
        if storage is None:
            return False
        place.storage, place.watch = storage, None
        self._survivors.append((storage._cdata, place))
        self._overwritten.clear()
        self._unplayed.append(place)
        return True

    def poison_unplayed(self) -> None:
        """At the end of the capture: no number of the recording is a result."""
        unplayed, self._unplayed = self._unplayed, []
        for place in unplayed:
            poison(place)

    def poison_overwritten(self, trace: GraphTrace) -> None:
        """After a replay: poison what other graphs had left at its addresses and somebody still holds."""
        for place in self._overwritten_by(trace).places:
            poison(place)

    def note_named(self, key: int, writers: list[GraphTrace]) -> None:
        """Note that Python can reach a storage between calls, and which graphs may write anywhere in it."""
        self._live[key].writers = writers
        self._overwritten.clear()

    def named_in_the_way(self, trace: GraphTrace) -> PoolPlace | None:
        """Before a replay: a place that Python can reach, and that the graph would overwrite with something else."""
        for key, place in self._overwritten_by(trace).named:
            if self._is_held(key, place):
                return place
        return None

    def _overwritten_by(self, trace: GraphTrace) -> _Overwritten:
        """What is in memory that the graph writes. Replays change nothing of it, so it is looked up once."""
        known = self._overwritten.get(trace)
        if known is None:
            own = set(map(id, trace.writes))
            found = [
                (key, place)
                for key, place in self._survivors
                if place.block is not None and id(place.block) not in own and trace.footprint.overlaps(place.block)
            ]
            named = [one for one in found if one[1].writers is not None and trace not in one[1].writers]
            known = self._overwritten[trace] = _Overwritten([place for _, place in found], named)
        return known

    def _is_held(self, key: int, place: PoolPlace) -> bool:
        return _use_count(key) - self._idle_count > place.aliases

    def reap(self) -> None:
        """Find survivors that only graphs hold by now, and free their addresses."""
        gone = [one for one in self._survivors if not self._is_held(*one)]
        if not gone:  # almost always
            return
        for key, place in gone:
            self._death(key, place)
        self._overwritten.clear()
        dead = {id(place) for _, place in gone}
        self._survivors = [one for one in self._survivors if id(one[1]) not in dead]


def poison(place: PoolPlace) -> None:
    """Fill a storage with NaN; indices are kept, since an operator must be able to work with them."""
    if place.holds_floats and place.storage is not None:
        place.storage.fill_(0xFF)  # type: ignore[attr-defined]  # NaN in every floating type


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def arena_for(places: list[PoolPlace]) -> tuple[torch.UntypedStorage, int]:
    """One storage over the address range of dead places, and the range's start."""
    blocks = [place.block for place in places if place.block is not None]
    if not blocks:
        return torch.UntypedStorage(0), 0
    start, stop = min(b.start for b in blocks), max(b.stop for b in blocks)
    # storages start at 64-byte boundaries; blocks at multiples of GRANULE keep every tensor at one too
    assert start % GRANULE == 0
    return torch.UntypedStorage(stop - start), start
