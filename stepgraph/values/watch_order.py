"""The order of dicts: code that goes through one meets its items in it, and putting an item back puts it last.

Whether code goes through a dict or only looks things up is not known, so that another order is a change either way.
All orders are asked in one go. Keys are told by identity, so that no `__eq__` of theirs runs; where one was made anew,
it is compared as other values are.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from stepgraph.native.row import GuardRow
from stepgraph.values.watch_telling import Change, Label, told
from stepgraph.values.watch_values import same


class Orders:
    """In which order dicts have their keys."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[list[Any]] = []
        self._seen: set[int] = set()

    def add(self, label: Label, where: dict[Any, Any]) -> None:
        if id(where) not in self._seen and dict.__len__(where) > 1:
            self._seen.add(id(where))
            self._names.append(label.order)
            self._dicts.append(where)
            self._keys.append(list(_keys_of(where)))

    def __len__(self) -> int:
        return 0

    def changes(self) -> Iterator[Change]:
        for name, where, before in zip(self._names, self._dicts, self._keys, strict=True):
            now = list(_keys_of(where))
            if len(now) == len(before) and not all(map(same, before, now)) and _are_same_keys(before, now):
                yield Change(name, told(before), told(now))

    def renew(self) -> None:
        self._keys = [list(_keys_of(where)) for where in self._dicts]

    def expect(self, row: GuardRow) -> None:
        if self._dicts:
            row.ask(self._are_untouched)

    def _are_untouched(self) -> bool:
        return all(map(_is_in_order, self._dicts, self._keys))


def _keys_of(where: dict[Any, Any]) -> Iterator[Any]:
    """The keys as code meets them; what a class of the user makes of it is not asked."""
    base: Any = OrderedDict if issubclass(type(where), OrderedDict) else dict
    return iter(base.__iter__(where))


def _is_in_order(where: dict[Any, Any], keys: list[Any]) -> bool:
    return dict.__len__(where) == len(keys) and all(map(operator.is_, _keys_of(where), keys))


def _are_same_keys(before: list[Any], now: list[Any]) -> bool:
    """Whether only the order differs: a key that came or went is told by what lay there."""
    left = list(now)
    for key in before:
        at = next((index for index, other in enumerate(left) if same(key, other)), None)
        if at is None:
            return False
        del left[at]
    return True
