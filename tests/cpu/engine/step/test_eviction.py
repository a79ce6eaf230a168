"""What to do with a call: the table of situations."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.engine.call.limits import MAX_CHANGES, REPLAYS_THAT_PAY, Changes, weigh_changes
from stepgraph.engine.step.eviction import Action, Situation, decide

FRESH = Situation(warm_calls=0, warmup=3, num_graphs=0, num_warming=0, max_graphs=2, obstacle=None)


@pytest.mark.parametrize(
    ("changes", "action", "reason"),
    [
        ({}, Action.WARM_UP, "warm-up"),
        ({"warm_calls": 2}, Action.WARM_UP, "warm-up"),
        ({"warm_calls": 3}, Action.CAPTURE, "warmed up"),
        ({"warm_calls": 4}, Action.CAPTURE, "warmed up"),
        ({"warm_calls": 1, "warmup": 1}, Action.CAPTURE, "warmed up"),
        ({"num_graphs": 1}, Action.WARM_UP, "warm-up"),
        ({"num_graphs": 2}, Action.EAGER, "past max_graphs=2"),
        ({"num_graphs": 3}, Action.EAGER, "past max_graphs=2"),
        ({"num_graphs": 2, "warm_calls": 3}, Action.EAGER, "past max_graphs=2"),
        ({"num_warming": 1}, Action.WARM_UP, "warm-up"),
        ({"num_warming": 2}, Action.EAGER, "max_graphs=2 other signatures are warming up"),
        (
            *({"num_graphs": 1, "num_warming": 1}, Action.EAGER),
            "max_graphs=2 other signatures are captured or warming up",
        ),
        ({"num_graphs": 1, "num_warming": 1, "warm_calls": 1}, Action.WARM_UP, "warm-up"),
        ({"num_graphs": 1, "num_warming": 1, "warm_calls": 3}, Action.CAPTURE, "warmed up"),
        ({"obstacle": "capture failed: [host-read]"}, Action.EAGER, "capture failed: [host-read]"),
        ({"obstacle": "capture failed: [host-read]", "warm_calls": 3}, Action.EAGER, "capture failed: [host-read]"),
        ({"obstacle": "capture failed: [host-read]", "num_graphs": 9}, Action.EAGER, "capture failed: [host-read]"),
    ],
    ids=str,
)
def test_decide_table(changes: dict[str, object], action: Action, reason: str) -> None:
    decision = decide(dataclasses.replace(FRESH, **changes))
    assert (decision.action, decision.reason) == (action, reason)


COUNTS = st.integers(0, 5)
SITUATIONS = st.builds(
    Situation,
    COUNTS,
    st.integers(1, 4),
    COUNTS,
    COUNTS,
    st.integers(1, 4),
    st.one_of(st.none(), st.just("[host-read]")),
)


@settings(deadline=None, max_examples=100)
@given(SITUATIONS)
def test_decide_never_goes_past_its_limits(situation: Situation) -> None:
    action = decide(situation).action
    if action in (Action.CAPTURE, Action.WARM_UP):
        assert situation.num_graphs < situation.max_graphs
        assert situation.obstacle is None
        assert (action is Action.CAPTURE) == (situation.warm_calls >= situation.warmup)
    assert action is not Action.REPLAY, "a call that has a graph is not asked about"


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(0, 5), max_size=40))
def test_decide_admits_exactly_max_graphs_signatures(warmup: int, max_graphs: int, calls: list[int]) -> None:
    warm: dict[int, int] = {}
    graphs: set[int] = set()
    for signature in calls:
        if signature in graphs:
            continue
        warming = sum(s not in graphs and s != signature for s in warm)
        situation = Situation(warm.get(signature, 0), warmup, len(graphs), warming, max_graphs, None)
        action = decide(situation).action
        if action is Action.WARM_UP:
            warm[signature] = warm.get(signature, 0) + 1
        elif action is Action.CAPTURE:
            graphs.add(signature)
        else:
            assert len(graphs | set(warm)) == max_graphs
    assert len(graphs | set(warm)) <= max_graphs


@pytest.mark.parametrize(
    ("so_far", "replays", "often"),
    [
        (0, 0, False),
        (MAX_CHANGES - 1, 0, False),
        (MAX_CHANGES, 0, True),
        (MAX_CHANGES, REPLAYS_THAT_PAY - 1, True),
        (MAX_CHANGES, REPLAYS_THAT_PAY, False),
        (MAX_CHANGES + 5, REPLAYS_THAT_PAY, False),
    ],
)
def test_weigh_changes_counts_those_after_few_replays(so_far: int, replays: int, often: bool) -> None:
    before = Counter({"a": so_far, "b": 9})
    counted, given_up = weigh_changes(before, ["a"], replays)
    assert given_up == (["a"] if often else [])
    assert counted["a"] == so_far + (replays < REPLAYS_THAT_PAY)
    assert before == Counter({"a": so_far, "b": 9}), "nothing is changed in place"


def test_changes_pause_twice_as_long_each_time() -> None:
    changes, tries = Changes(), []
    for _ in range(MAX_CHANGES):
        assert not changes.weigh(["a"], 0)
        assert not changes.is_pause_over(), "there is none yet"
    assert changes.weigh(["a"], 0) == ["a"]
    for call in range(1, 100):
        if changes.is_pause_over():
            tries.append(call)
            assert changes.weigh(["a"], 0) == ["a"]
    assert tries == [8, 24, 56]
    assert not changes.weigh(["a"], REPLAYS_THAT_PAY), "the capture has paid off"
