"""The order in which code meets the items of a dict is watched; that of keys made anew is the same."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest

from stepgraph.engine.guards.host_values.watch import Watch


def put_last(values: dict[Any, Any], key: Any) -> None:
    values[key] = values.pop(key)


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, lambda **values: collections.Counter(values)])
def test_watch_sees_another_order_of_a_dict(make: Callable[..., Any]) -> None:
    values = make(one=1, two=2)
    watch = Watch(lambda x: x * next(iter(values.values())))
    assert watch.changed() == []
    put_last(values, "one")
    assert list(map(str, watch.changed())) == ["list(values): ('one', 'two') -> ('two', 'one')"]


def test_watch_sees_what_only_an_ordered_dict_knows() -> None:
    values = collections.OrderedDict(one=1, two=2)
    watch = Watch(lambda x: x * next(iter(values.values())))
    values.move_to_end("one")
    assert list(map(str, watch.changed())) == ["list(values): ('one', 'two') -> ('two', 'one')"]


def test_watch_takes_a_dict_refilled_in_its_order_for_the_same() -> None:
    values = {("one", 1): 1, ("two", 2): 2}
    watch = Watch(lambda x: x * values["one", 1])
    values.clear()
    for number, name in enumerate(("one", "two"), start=1):
        values[name, number] = number
    assert watch.changed() == []
    put_last(values, ("one", 1))
    assert len(watch.changed()) == 1


def test_watch_ignores_an_order_by_name() -> None:
    values = {"one": 1, "two": 2}
    watch = Watch(lambda x: x * values["one"], ignore=["list(values)"])
    put_last(values, "one")
    assert watch.changed() == []
    values["one"] = 3
    assert list(map(str, watch.changed())) == ["values['one']: 1 -> 3"]


def test_watch_compares_no_keys_by_code_of_the_user() -> None:
    class Key:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        def __hash__(self) -> int:
            return id(self)

    one, two = Key(), Key()
    values = {one: 1, two: 2}
    watch = Watch(lambda x: list(values.values()))
    put_last(values, one)
    assert [change.name for change in watch.changed()] == ["list(values)"]
