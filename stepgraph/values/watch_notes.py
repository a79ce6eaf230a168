"""Where what is found is noted: each place once, under a name that no other has, unless it is to be ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.values.watch_bodies import Absent, Bodies, Classes
from stepgraph.values.watch_order import Orders
from stepgraph.values.watch_parts import Items, Part, Tensors
from stepgraph.values.watch_telling import Label


class Notes:
    """What is to be watched, so far."""

    def __init__(self, ignore: Collection[str]) -> None:
        self.ignore = frozenset(ignore)
        self.classes, self.bodies, self.tensors = Classes(), Bodies(), Tensors()
        self._absent, self._orders = Absent(), Orders()
        self.parts: list[Part] = [self.classes, self._absent, self.bodies, self.tensors, self._orders]
        self._items: dict[int, Items] = {}
        self._spots: set[tuple[int, Any]] = set()
        self._owners: dict[str, Any] = {}

    def label(self, spelling: str, apart: str, owner: Any) -> Label:
        """A label for something that is spelled so; `apart` tells it from an earlier one of the same spelling."""
        suffix, count = "", 1
        while self._owners.setdefault(spelling + suffix, owner) != owner:
            suffix = f" ({apart})" if count == 1 else f" ({apart}#{count})"
            count += 1
        return Label(spelling, suffix)

    def is_ignored(self, label: Label) -> bool:
        return str(label) in self.ignore

    def add(self, name: str, part: Part) -> None:
        """Watch a part of its own."""
        if name not in self.ignore:
            self.parts.append(part)

    def put(self, where: Any, key: Any, label: Label, value: Any) -> None:
        """Watch what lies at a key of a container."""
        spot = (id(where), key)
        if spot not in self._spots:
            self._spots.add(spot)
            if str(label) not in self.ignore:
                self._items_at(where).add(key, str(label), value)

    def put_all(self, where: Any, entries: Iterable[tuple[Any, Label, Any]], length: str) -> None:
        """Watch what lies in a container, and its length."""
        for key, label, value in entries:
            self.put(where, key, label, value)
        if length not in self.ignore:
            self._items_at(where).length_name = length

    def _items_at(self, where: Any) -> Items:
        found = self._items.get(id(where))
        if found is None:
            found = self._items[id(where)] = Items(where)
            self.parts.append(found)
        return found

    def order(self, label: Label, where: dict[Any, Any]) -> None:
        """Watch in which order a dict has its keys."""
        if not self.ignore.intersection((label.order, label.length, str(label))):
            self._orders.add(label, where)

    def place(self, label: Label, value: Any) -> None:
        """Watch where a tensor lies, or the tensors in a tuple."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            self.tensors.add(str(label), value)
        elif issubclass(kind, tuple):
            for index, item in enumerate(tuple.__iter__(value)):
                if issubclass(type(item), torch.Tensor):
                    self.tensors.add(str(label.item(index)), item)

    def absent(
        self, label: Label, where: Mapping[str, Any], names: Collection[str], behind: Sequence[type] = ()
    ) -> None:
        """Watch that these names do not come into being; `behind` are the classes that have them, where any has."""
        if any(ignored.startswith(label.spelling) for ignored in self.ignore):
            names = [name for name in names if str(label.attribute(name)) not in self.ignore]
        self._absent.add(label, where, frozenset(names), behind)
