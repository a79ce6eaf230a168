"""Stand-ins for host values: they compute like numbers, and each answer that code gets from them is noted."""

from __future__ import annotations

import copy
import json
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.engine.guards.host_values.decisions import (
    Answers,
    Decisions,
    HostValues,
    Predicates,
    Trace,
    undecided,
    without_stand_ins,
)
from stepgraph.engine.guards.host_values.naming import Label, describe_change
from stepgraph.engine.guards.host_values.parts import Place, attribute_of


def place_of(holder: types.SimpleNamespace, name: str) -> Place:
    return Place(Label(f"holder.{name}"), vars(holder), name, vars(holder)[name], True)


def asked(run: Callable[[types.SimpleNamespace], Any], **values: Any) -> tuple[types.SimpleNamespace, Decisions]:
    """Run code with stand-ins for some values; return their holder, and what was asked."""
    holder = types.SimpleNamespace(**values)
    with Trace([place_of(holder, name) for name in values]) as trace:
        run(holder)
    return holder, trace.decisions()


def holds_for(run: Callable[[types.SimpleNamespace], Any], first: Any, others: list[Any]) -> list[Any]:
    """The values for which what was asked of the first has the same answers."""
    holder, decisions = asked(run, n=first)
    found = []
    for value in others:
        holder.n = value
        if decisions.hold():
            found.append(value)
    return found


QUESTIONS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "every fourth": (lambda h: h.n % 4 == 3, [3, 7, 11]),
    "limit": (lambda h: "a" if h.n < 6 else "b", [0, 1, 2, 3, 4, 5]),
    "truth": (lambda h: not h.n, list(range(1, 12))),
    "index": (lambda h: [1, 2][h.n % 2], [1, 3, 5, 7, 9, 11]),
    "other side": (lambda h: 10 - h.n > 4, [0, 1, 2, 3, 4, 5]),
    "two": (lambda h: h.n > 2 and h.n < 9, [3, 4, 5, 6, 7, 8]),
    "length of a range": (lambda h: range(h.n // 4), [0, 1, 2, 3]),
    "nothing": (lambda h: None, list(range(12))),
    "the number": (lambda h: str(h.n), [3]),
    "next number": (lambda h: [0] * (h.n + 1), [3]),
    "in a set": (lambda h: h.n in {3, 4}, [3]),
    "power": (lambda h: h.n**2 > 20, [0, 1, 2, 3, 4]),
    "bits": (lambda h: h.n & 1, list(range(12))),
    "dictionary": (lambda h: {1: "a", 3: "b"}.get(h.n % 4), [3, 7, 11]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_decisions_hold_where_the_answers_are_the_same(question: str) -> None:
    run, expected = QUESTIONS[question]
    assert holds_for(run, 3 if 3 in expected else expected[0], list(range(12))) == expected


def test_decisions_of_another_type_do_not_hold() -> None:
    assert holds_for(lambda h: h.n > 2, 3, [4, 4.0, True, None, "4"]) == [4]


OPERATORS = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.xor)
COMPARISONS = (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)


@given(
    st.lists(st.tuples(st.sampled_from(OPERATORS), st.integers(-3, 5), st.booleans()), max_size=4),
    st.sampled_from(COMPARISONS),
    st.integers(-5, 5),
    st.integers(-10, 40),
    st.integers(-10, 40),
)
def test_decisions_never_hold_with_another_answer(
    operations: Any, compare: Any, limit: int, first: int, second: int
) -> None:
    """Any expression of a number, and a comparison: if the decisions hold, plain code has the same outcome."""

    def outcome(n: Any) -> Any:
        for operation, number, is_left in operations:
            n = operation(number, n) if is_left else operation(n, number)
        return bool(compare(n, limit))

    def run(n: Any) -> Any:
        try:
            return outcome(n)
        except ZeroDivisionError:
            return "division by zero"

    seen: list[Any] = []
    holder, decisions = asked(lambda h: seen.append(run(h.n)), n=first)
    assert seen == [run(first)]
    assert decisions.hold()
    holder.n = second
    if decisions.hold():
        assert run(second) == run(first)


@pytest.mark.parametrize(
    "use",
    [
        *(str, int, float, hash, repr, math.sqrt, json.dumps, copy.copy, copy.deepcopy, lambda n: f"{n:d}"),
        *(
            lambda n: n.bit_length(),
            lambda n: torch.ones(2) * n,
            lambda n: torch.full((2,), float(n)),
            lambda n: n + 0.5,
        ),
    ],
)
def test_use_that_leaves_python_makes_the_value_exact_or_fails(use: Callable[[Any], Any]) -> None:
    """Code in C asks for the number itself, or refuses the stand-in; it never reads past the notes."""
    failed = False

    def run(holder: types.SimpleNamespace) -> None:
        nonlocal failed
        try:
            bool(use(holder.n) is None)
            str(use(holder.n))
        except TypeError:
            failed = True

    _, decisions = asked(run, n=3)
    assert failed or decisions.exact


def test_stand_in_is_of_the_numbers_class() -> None:
    def run(holder: types.SimpleNamespace) -> None:
        assert isinstance(holder.n, int)
        assert not isinstance(holder.n, str | torch.Tensor)
        assert isinstance(holder.flag, bool)
        assert holder.n != None  # noqa: E711 (the comparison is what is tested)

    assert asked(run, n=3, flag=True)[1].checks == {}


def test_trace_leaves_no_stand_in_behind() -> None:
    kept: list[Any] = []

    def run(holder: types.SimpleNamespace) -> None:
        holder.n += 1
        holder.other = holder.n * 2
        kept.append(holder.n)
        kept.append({"deep": [holder.n]})

    holder, _ = asked(run, n=3)
    assert [type(value) for value in (holder.n, holder.other, kept[0], kept[1]["deep"][0])] == [int] * 4
    assert (holder.n, holder.other, kept[0]) == (4, 8, 4)


def test_trace_ends_after_an_error() -> None:
    holder = types.SimpleNamespace(n=3)
    with pytest.raises(ValueError, match="failed"), Trace([place_of(holder, "n")]):
        raise ValueError("failed")
    assert type(holder.n) is int


def test_trace_puts_stand_ins_into_cells_and_lists() -> None:
    number, items = 3, [5]

    def read() -> bool:
        return number > 1 and items[0] > 2

    (cell,) = [c for c in read.__closure__ or () if c.cell_contents == 3]
    places = [
        Place(Label("number"), cell, "cell_contents", 3, True, attribute_of),
        Place(Label("items"), items, 0, 5, True),
    ]
    with Trace(places) as trace:
        assert read()
    assert len(trace.decisions().checks) == 2
    assert (number, items) == (3, [5])


def test_result_holds_numbers() -> None:
    holder = types.SimpleNamespace(n=3)
    with Trace([place_of(holder, "n")]):
        made = without_stand_ins({"a": (holder.n, [holder.n + 1])})
    assert made == {"a": (3, [4])}
    assert type(made["a"][1][0]) is int


def test_changes_of_decided_values_are_told_from_others() -> None:
    holder = types.SimpleNamespace(n=3, weight=0.5)
    with Trace([place_of(holder, "n"), place_of(holder, "weight")]) as trace:
        assert holder.n > 1
        str(holder.weight)
    changes = [describe_change("holder.n", 3, 4), describe_change("holder.weight", 0.5, 0.6)]
    assert [change.name for change in undecided(changes, trace)] == ["holder.weight"]
    assert undecided(changes, None) == changes


def test_answers_add_up() -> None:
    """A graph is right for all answers that it was compared with, and wrong for those that were refused."""

    def ask(n: int) -> Decisions:
        holder.n = n
        with Trace([place_of(holder, "n")]) as trace:
            if holder.n >= 5:
                holder.odd = bool(holder.n % 2)
        return trace.decisions()

    holder = types.SimpleNamespace(n=0)
    answers = Answers()
    answers.agree(ask(3), lambda place: 2)
    answers.agree(ask(8), lambda place: 2)
    answers.refuse(ask(7))
    right, wrong = [], []
    for holder.n in range(12):
        right += [holder.n] if answers.hold() else []
        wrong += [holder.n] if answers.are_refused() else []
    assert right == [0, 1, 2, 3, 4, 6, 8, 10]
    assert wrong == [5, 7, 9, 11]


def test_answers_keep_values_that_a_later_trace_leaves_out() -> None:
    """A value that is not traced any more counts as it was when the later answers were given."""
    holder = types.SimpleNamespace(n=3, m=1)
    answers = Answers()
    with Trace([place_of(holder, "n"), place_of(holder, "m")]) as first:
        assert holder.n > 2
        assert holder.m < 2
    answers.agree(first.decisions(), lambda place: {"n": 3, "m": 1}[place.key])
    holder.n, holder.m = 1, 5
    with Trace([place_of(holder, "m")]) as second:
        assert not holder.m < 2
    answers.agree(second.decisions(), lambda place: {"n": 1, "m": 5}[place.key])
    outcomes = {}
    for values in ((4, 1), (1, 7), (2, 5), (4, 5)):
        holder.n, holder.m = values
        outcomes[values] = answers.hold()
    assert outcomes == {(4, 1): True, (1, 7): True, (2, 5): False, (4, 5): False}


def test_answers_hold_only_with_the_other_values_as_they_were() -> None:
    """A value that is traced later counts as it was when the earlier answers were given."""
    holder = types.SimpleNamespace(n=3, m=1)
    answers = Answers()
    with Trace([place_of(holder, "n")]) as first:
        assert holder.n > 0
    answers.agree(first.decisions(), lambda place: 3)
    holder.n, holder.m = 0, 5
    with Trace([place_of(holder, "n"), place_of(holder, "m")]) as second:
        assert not holder.n > 0
        assert holder.m > 4
    answers.agree(second.decisions(), lambda place: {"n": 3, "m": 1}[place.key])
    outcomes = {}
    for values in ((1, 1), (1, 5), (0, 6), (0, 1)):
        holder.n, holder.m = values
        outcomes[values] = answers.hold()
    assert outcomes == {(1, 1): True, (1, 5): False, (0, 6): True, (0, 1): False}


def test_predicates_learn_questions_and_not_values() -> None:
    predicates = Predicates()
    holder, decisions = asked(lambda h: (h.n % 3 == 2, str(h.n)), n=4)
    assert predicates.learn(decisions)
    assert not predicates.learn(decisions)
    answers = []
    for holder.n in range(4):
        answers.append(predicates.answers())
    assert answers == [(False,), (False,), (True,), (False,)]


def test_trace_with_too_many_questions_takes_the_value() -> None:
    assert holds_for(lambda h: [h.n > limit for limit in range(200)], 500, [500, 501]) == [500]


def test_host_values_are_put_back() -> None:
    history = [1]
    holder = types.SimpleNamespace(n=3, name="a", history=history)
    places = [place_of(holder, "n"), place_of(holder, "name"), Place(Label("history"), history, 0, 1, True)]
    before = HostValues(places)
    holder.n, holder.name = 4, "b"
    history.append(2)
    assert [change.name for change in before.changed()] == ["holder.n", "holder.name"]
    before.restore()
    assert (holder.n, holder.name, history) == (3, "a", [1])
