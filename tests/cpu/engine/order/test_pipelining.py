"""Orders read from torch's own schedules: built for every rank, and run to see that they do what the order says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepgraph import InvalidArgument
from stepgraph.engine.order import (
    Order,
    convert_schedule_table_to_order,
    get_schedule_table,
    num_warmup_microbatches,
    order_from_pipelining,
    plan_buffers,
    read_order,
)
from tests.cpu.engine.order.drawn import Drawn, clashes, most_live, spans
from tests.pipeline import SCHEDULES, actions_of, make_schedule, recorded_step

MULTI = [name for name, form in SCHEDULES.items() if form.stages > 1]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A pipeline group of so many ranks, of which this process is the first; torch's backend without peers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[None]:
    """A real gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def listed_actions(schedule: Any, rank: int) -> list[str]:
    """A schedule's own list as words such as `2F0`, overlapped actions taken apart by how torch prints them."""
    printed = " ".join(str(action) for action in schedule.pipeline_order[rank] if action is not None)
    return re.findall(r"\d+[FBIW]\d+", printed)


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("name", MULTI)
def test_order_is_the_schedules_list_of_each_rank(ranks: int, name: str) -> None:
    for num_microbatches in (2 * ranks, 4 * ranks):
        schedule = make_schedule(name, num_microbatches)
        for rank in range(ranks):
            order = order_from_pipelining(schedule, rank)
            assert actions_of(order, SCHEDULES[name].stages_of(rank, ranks)) == listed_actions(schedule, rank)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("ScheduleGPipe", 0, "1 1 1 1 -1 -1 -1 -1"),
        ("ScheduleGPipe", 1, "1 1 1 1 -1 -1 -1 -1"),
        ("Schedule1F1B", 0, "1 1 -1 1 -1 1 -1 -1"),
        ("Schedule1F1B", 1, "1 -1 1 -1 1 -1 1 -1"),
        ("ScheduleInterleaved1F1B", 0, "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"),
        ("ScheduleLoopedBFS", 1, "1 1 1 1 2 2 2 2 -2 -2 -2 -2 -1 -1 -1 -1"),
        (
            "ScheduleInterleavedZeroBubble",
            1,
            "1 1 2 -2 2 -2 -2.5 1 -1 -2.5 1 -1 -1.5 2 -2 -1.5 2 -2 -2.5 -1 -2.5 -1 -1.5 -1.5",
        ),
        (
            "ScheduleZBVZeroBubble",
            1,
            "1 2 1 2 -2 -2.5 1 -1 -1.5 2 -2 -2.5 1 -1 -1.5 2 -2 -2.5 -1 -2 -1 -1.5 -2.5 -1.5",
        ),
        ("ScheduleDualPipeV", 1, "1 2 1 2 1 -2 2 -1 1 -2 2 -1 -2 -1 -2 -1 -2.5 -1.5"),
    ],
)
def test_order_is_written_in_numbers(ranks: int, name: str, rank: int, expected: str) -> None:
    order = order_from_pipelining(make_schedule(name, 4), rank)
    assert order == [float(word) for word in expected.split()]


@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)
def test_order_of_1f1b_counts_microbatches_from_0_on_every_rank(ranks: int) -> None:
    """The list that torch keeps for it counts from 1 on the last rank, and is not what it runs."""
    for rank in range(ranks):
        order = order_from_pipelining(make_schedule("Schedule1F1B", 4), rank)
        assert sorted(zip(order, order.microbatches, strict=True)) == sorted((s, m) for s in (1, -1) for m in range(4))
        assert read_order(list(order)) == read_order(order)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_order_of_interleaved_1f1b_is_that_of_the_schedule_table(ranks: int) -> None:
    num_microbatches = 2 * ranks
    table = get_schedule_table(num_microbatches, 2, ranks)
    for rank in range(ranks):
        warmup = num_warmup_microbatches(num_microbatches, 2, ranks, ranks, rank)
        schedule = make_schedule("ScheduleInterleaved1F1B", num_microbatches)
        assert order_from_pipelining(schedule, rank) == convert_schedule_table_to_order(warmup, 2, table)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_order_names_microbatches_where_backwards_are_reversed(ranks: int) -> None:
    order = order_from_pipelining(make_schedule("ScheduleLoopedBFS", 3), 0)
    assert order.microbatches == (0, 1, 2, 0, 1, 2, 2, 1, 0, 2, 1, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("name", SCHEDULES)
def test_buffers_of_a_schedule_are_safe_and_as_many_as_are_live(ranks: int, name: str) -> None:
    form = SCHEDULES[name]
    for num_microbatches in (2 * ranks, 4 * ranks):
        for rank in range(ranks):
            order = order_from_pipelining(make_schedule(name, num_microbatches), rank)
            drawn = Drawn(order, [2, 1][: form.stages], num_microbatches)
            plan, live = plan_buffers(order, drawn.layers), spans(drawn)
            assert clashes(plan, live) == []
            assert len(set(plan)) == most_live(live, [None] * len(live))[None]


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("ScheduleGPipe", "ScheduleLoopedBFS")])
def test_buffers_of_a_schedule_do_not_grow_with_the_batch(ranks: int, name: str) -> None:
    """All but those that run every forward first."""
    layers = [2, 1][: SCHEDULES[name].stages]
    for rank in range(ranks):
        orders = [order_from_pipelining(make_schedule(name, count * ranks), rank) for count in (4, 8, 16)]
        counts = [len(set(plan_buffers(order, layers))) for order in orders]
        assert counts == counts[:1] * 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", SCHEDULES)
def test_step_of_a_schedule_runs_its_order(name: str) -> None:
    schedule = make_schedule(name, 4)
    stages = SCHEDULES[name].stages_of(0, 1)
    assert recorded_step(schedule, 4) == actions_of(order_from_pipelining(schedule), stages)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_eval_of_a_schedule_runs_its_order_of_forwards(name: str) -> None:
    """Those of one stage a rank: torch's `eval()` cannot run with neighbouring stages on one rank."""
    schedule = make_schedule(name, 4)
    order = order_from_pipelining(schedule, forward_only=True)
    assert min(order) > 0
    ran = [action for action in recorded_step(schedule, 4, training=False) if "F" in action]
    assert ran == actions_of(order, SCHEDULES[name].stages_of(0, 1))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_order_without_a_rank_is_that_of_this_process(ranks: int) -> None:
    for name in ("Schedule1F1B", "ScheduleInterleaved1F1B"):
        schedule = make_schedule(name, 4)
        assert order_from_pipelining(schedule) == order_from_pipelining(schedule, 0)
        assert order_from_pipelining(schedule) != order_from_pipelining(schedule, 1)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
@pytest.mark.parametrize("rank", [2, -1, "0"])
def test_order_of_a_rank_that_is_not_there_is_an_error(ranks: int, name: str, rank: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        order_from_pipelining(make_schedule(name, 4), rank)
    assert caught.value.what == f"{name} has no rank {rank!r}"
    assert caught.value.details == ("expected  one of 0, 1",)


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_order_comes_from_the_list_with_communication(ranks: int) -> None:
    """A schedule loaded with its communication keeps no other list, and it is this one that runs."""
    schedule = make_schedule("ScheduleInterleaved1F1B", 2)
    expected = order_from_pipelining(schedule)
    schedule.pipeline_order = {}
    assert order_from_pipelining(schedule) == expected


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_order_of_a_schedule_with_its_own_loop_is_not_guessed(ranks: int) -> None:
    class Backwards(torch_schedules.ScheduleGPipe):
        def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

        def _get_pipeline_order(self) -> None:
            return None

    stage = make_schedule("ScheduleGPipe", 2)._stage
    with pytest.raises(InvalidArgument, match="Backwards is not a schedule that stepgraph can read an order from"):
        order_from_pipelining(Backwards(stage, 2))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_order_of_torchs_forward_only_schedule_has_no_backwards(ranks: int) -> None:
    stage = make_schedule("ScheduleGPipe", 3)._stage
    schedule = torch_schedules._ScheduleForwardOnly(stage, 3)
    assert order_from_pipelining(schedule) == Order([1, 1, 1], microbatches=[0, 1, 2])


@pytest.mark.parametrize("text", ["0F0 0X0", "0F0 0B", "0F0 ()OVERLAP_F_B"])
def test_order_of_an_unknown_action_is_an_error_that_shows_it(text: str) -> None:
    actions = [
        SimpleNamespace(stage_index=0, computation_type=t, microbatch_index=m, sub_actions=None)
        for t, m in _parse(text)
    ]
    with pytest.raises(InvalidArgument, match="an action that stepgraph does not know"):
        order_from_pipelining(SimpleNamespace(pipeline_order={0: actions}), 0)


@pytest.mark.parametrize("waits", [["0WAIT_SEND_F0", "0WAIT_SEND_B0", "0WAIT_REDUCE_GRAD"], None])
def test_order_leaves_out_communication_and_waits_for_it(waits: list[str] | None) -> None:
    """Those of each torch, and all that this torch has."""
    computing = ("F", "I", "B", "W", "OVERLAP_F_B")
    words = waits or [f"0{kind.value}0" for kind in torch_schedules._ComputationType if kind.value not in computing]
    actions = [
        SimpleNamespace(stage_index=0, computation_type=kind, microbatch_index=index, sub_actions=None)
        for kind, index in _parse(" ".join(["0F0", *words, "0B0"]))
    ]
    assert order_from_pipelining(SimpleNamespace(pipeline_order={0: actions}), 0) == [1, -1]


def _parse(text: str) -> list[tuple[str, int | None]]:
    found = []
    for word in text.split():
        kind, number = re.fullmatch(r"(?:\d+|\(\))([A-Z_]+)(\d*)", word).groups()  # type: ignore[union-attr]
        found.append((kind, int(number) if number else None))
    return found


def test_order_of_an_impossible_schedule_points_at_the_action() -> None:
    action = torch_schedules._Action
    kinds = torch_schedules._ComputationType
    listed = [action(0, kinds.FORWARD, 0), action(0, kinds.BACKWARD_WEIGHT, 0), action(0, kinds.BACKWARD_INPUT, 0)]
    with pytest.raises(InvalidArgument, match="entry 1 of the order is a weight gradient of chunk 1, microbatch 0,"):
        order_from_pipelining(SimpleNamespace(pipeline_order={0: listed}), 0)


def test_order_of_what_is_no_schedule_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="Linear is not a schedule"):
        order_from_pipelining(torch.nn.Linear(1, 1), 0)
