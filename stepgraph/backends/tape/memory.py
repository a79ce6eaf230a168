"""A model of a graph pool's addresses: who lives where, and who overwrote whom.

CUDA gives memory that died during a capture to the next tensor that is born, in this capture or a later one of the
same pool. That is what makes shared pools small, and what makes them dangerous: a graph that reads another graph's
output reads garbage once a third graph, whose capture was given that memory, has been replayed in between.

`AddressPool` plays the allocator: best fit, split, coalesce, 512-byte blocks. Addresses are numbers, so the hazard can
be seen without happening. `Ledger` plays time: it remembers at which replay each surviving block was last written, and
which address ranges each graph writes. A read is stale when a graph whose ranges overlap was replayed after the
block's last write. This is data flow, not sequence: any order of replays is right as long as nothing stale is read.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

GRANULE = 512


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
        """Whether any of the ranges shares an address with the block."""
        index = bisect.bisect_right(self._stops, block.start)
        return index < len(self._starts) and self._starts[index] < block.stop


@dataclass(slots=True, eq=False)
class GraphTrace:
    """What the ledger knows of one graph."""

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
        """A block that the graph would read although another graph has overwritten it since it was written."""
        for block in trace.reads:
            written = block.written_at
            if written is None:
                continue
            for other in (*self._traces, *self._freed):
                if other.replayed_at > written and other.footprint.overlaps(block):
                    return block
        return None

    def loaded(self, block: Block) -> None:
        """Note that eager code has written a block."""
        self._tick += 1
        block.written_at = self._tick

    def replayed(self, trace: GraphTrace) -> None:
        """Note that a graph has run."""
        self._tick += 1
        trace.replayed_at = self._tick
        for block in trace.writes:
            block.written_at = self._tick
