"""The pool's addresses and the order of writes, against models too simple to be wrong."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from stepgraph.engine.backends.tape.memory import GRANULE, AddressPool, Block, Footprint, GraphTrace, Ledger

SIZES = st.integers(0, 8 * GRANULE)


class PoolMachine(RuleBasedStateMachine):
    """Births and deaths in any order."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = AddressPool()
        self.living: list[Block] = []
        self.high_water = 0

    def free_ranges(self) -> list[tuple[int, int]]:
        """The gaps below the high-water mark, found the slow way."""
        edges = [
            0,
            *(e for b in sorted(self.living, key=lambda b: b.start) for e in (b.start, b.stop)),
            self.high_water,
        ]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    @rule(target=blocks, num_bytes=SIZES)
    def allocate(self, num_bytes: int) -> Block:
        gaps = self.free_ranges()
        block = self.pool.allocate(num_bytes)
        assert block.size >= max(num_bytes, 1)
        assert block.size - num_bytes < GRANULE or (num_bytes == 0 and block.size == GRANULE)
        assert block.start % GRANULE == 0
        fitting = [b - a for a, b in gaps if b - a >= block.size]
        if fitting:
            assert self.pool.high_water == self.high_water, "a free range was there"
            assert next(b - a for a, b in gaps if a <= block.start < b) == min(fitting), "the best fit"
        self.living.append(block)
        self.high_water = self.pool.high_water
        return block

    @rule(block=consumes(blocks))
    def release(self, block: Block) -> None:
        self.pool.release(block)
        self.living.remove(block)

    @invariant()
    def living_blocks_do_not_overlap(self) -> None:
        ordered = sorted(self.living, key=lambda b: b.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(ordered))
        assert not ordered or ordered[-1].stop <= self.pool.high_water

    @invariant()
    def high_water_never_falls(self) -> None:
        assert self.pool.high_water >= self.high_water

    def teardown(self) -> None:
        for block in self.living:
            self.pool.release(block)
        if self.high_water:
            whole = self.pool.allocate(self.high_water)
            assert (whole.start, whole.size) == (0, self.high_water), "all that was released is one range again"
            assert self.pool.high_water == self.high_water


PoolMachine.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase


def test_pool_reuses_a_released_range() -> None:
    pool = AddressPool()
    first, _second = pool.allocate(1000), pool.allocate(1000)
    pool.release(first)
    assert pool.allocate(1000).start == first.start
    assert pool.high_water == 4 * GRANULE


def test_pool_grows_from_a_free_end() -> None:
    pool = AddressPool()
    pool.allocate(GRANULE)
    last = pool.allocate(GRANULE)
    pool.release(last)
    assert pool.allocate(3 * GRANULE).start == last.start
    assert pool.high_water == 4 * GRANULE


# -- footprints

BLOCKS = st.lists(st.builds(Block, st.integers(0, 30), st.integers(1, 8)), max_size=6)


@settings(deadline=None, max_examples=100)
@given(BLOCKS, st.builds(Block, st.integers(0, 40), st.integers(1, 8)))
def test_footprint_overlaps_as_sets_do(blocks: list[Block], asked: Block) -> None:
    owned = {address for block in blocks for address in range(block.start, block.stop)}
    expected = not owned.isdisjoint(range(asked.start, asked.stop))
    assert Footprint(blocks).overlaps(asked) is expected


# -- the ledger

SPAN = 12


@dataclass(eq=False)
class Plan:
    """A graph as the simulation sees it: which addresses it scribbles on, which blocks it writes whole and reads."""

    scratch: list[Block]
    reads: list[Block]
    writes: list[Block]
    trace: GraphTrace


class ByteMap:
    """The pool as bytes, each with the block whose value it holds. The naive twin of the ledger."""

    def __init__(self) -> None:
        self._owner: list[object] = [None] * (2 * SPAN)
        self._ever: set[int] = set()

    def is_stale(self, plan: Plan) -> bool:
        return any(
            id(block) in self._ever and any(self._owner[i] is not block for i in range(block.start, block.stop))
            for block in plan.reads
        )

    def replay(self, plan: Plan) -> None:
        for block in plan.scratch:
            for address in range(block.start, block.stop):
                self._owner[address] = plan
        for block in plan.writes:
            self._ever.add(id(block))
            for address in range(block.start, block.stop):
                self._owner[address] = block


def disjoint(blocks: list[Block]) -> list[Block]:
    kept: list[Block] = []
    for block in blocks:
        if all(block.stop <= other.start or other.stop <= block.start for other in kept):
            kept.append(block)
    return kept


@st.composite
def programs(draw: Any) -> tuple[list[Plan], list[int]]:
    """Graphs as captures make them: survivors of their own, scratch that died, reads of earlier survivors."""
    ranges = st.builds(Block, st.integers(0, SPAN - 1), st.integers(1, 4))
    survivors: list[Block] = []
    plans = []
    for _ in range(draw(st.integers(2, 5))):
        reads = [b for b in survivors if draw(st.booleans())]
        rewritten = [b for b in reads if draw(st.booleans())]
        born = disjoint(draw(st.lists(ranges, max_size=3)))
        # what a capture reads is alive meanwhile, so nothing of its own is born there
        busy = Footprint(reads)
        born = [block for block in born if not busy.overlaps(block)]
        own = [block for block in born if draw(st.booleans())]
        writes = [*own, *disjoint(rewritten)]
        plans.append(Plan(born, reads, writes, GraphTrace(Footprint([*born, *writes]), reads, writes)))
        survivors += own
    order = draw(st.lists(st.integers(0, len(plans) - 1), max_size=14))
    return plans, order


def compare(plans: list[Plan], order: list[int]) -> None:
    ledger, memory = Ledger(), ByteMap()
    for plan in plans:
        ledger.add(plan.trace)
    for index in order:
        plan = plans[index]
        assert (ledger.stale_read(plan.trace) is not None) == memory.is_stale(plan)
        ledger.replayed(plan.trace)
        memory.replay(plan)


@settings(deadline=None, max_examples=150)
@given(programs())
def test_ledger_agrees_with_a_map_of_bytes(program: tuple[list[Plan], list[int]]) -> None:
    compare(*program)


@settings(deadline=None, max_examples=50)
@given(programs())
def test_ledger_names_a_block_that_the_graph_reads(program: tuple[list[Plan], list[int]]) -> None:
    plans, order = program
    ledger = Ledger()
    for plan in plans:
        ledger.add(plan.trace)
    for index in order:
        found = ledger.stale_read(plans[index].trace)
        assert found is None or found in plans[index].reads
        ledger.replayed(plans[index].trace)


def trace(born: Sequence[Block], reads: Sequence[Block] = (), writes: Sequence[Block] = ()) -> GraphTrace:
    return GraphTrace(Footprint(born), list(reads), list(writes))


@pytest.mark.parametrize(
    ("order", "stale"),
    [("12", False), ("2", False), ("132", True), ("1312", False), ("312", False), ("1322", True), ("1132", True)],
)
def test_ledger_is_about_data_flow_not_sequence(order: str, stale: bool) -> None:
    y = Block(0, 512)
    graphs = {"1": trace([y], writes=[y]), "2": trace([Block(512, 512)], reads=[y]), "3": trace([Block(0, 1024)])}
    ledger = Ledger()
    for graph in graphs.values():
        ledger.add(graph)
    found = None
    for name in order:
        found = ledger.stale_read(graphs[name])
        ledger.replayed(graphs[name])
    assert (found is y) is stale


def test_ledger_remembers_what_a_freed_graph_overwrote() -> None:
    y = Block(0, 512)
    one, two, three = trace([y], writes=[y]), trace([], reads=[y]), trace([Block(0, 512)])
    ledger = Ledger()
    for graph in (one, two, three):
        ledger.add(graph)
    ledger.replayed(one)
    ledger.replayed(three)
    ledger.remove(three)
    assert ledger.stale_read(two) is y
