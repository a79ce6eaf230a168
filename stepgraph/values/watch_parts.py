"""Watched values, grouped by where they lie.

A part knows what its values are called, what they were, and how to read them again. It can tell what changed, by name,
and it can say what that comes down to in a row of expectations, which is run through in C before each replay. Reading
runs no code of the user: a dict is read as a dict, whatever its class makes of a missing key.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, Protocol

import torch

from stepgraph.guards.layout import Layouts, change_of, layout_of
from stepgraph.native.row import GuardRow, Layout
from stepgraph.values.watch_telling import Change, tell
from stepgraph.values.watch_values import MISSING, contents_of_set, items_of, same

Find = Callable[[Any, Any, Any], Any]
"""Reads a container at a key; the third argument is for where there is nothing."""

_MAX_SINGLE = 16
"""Items of one container that are asked one by one; more are asked in one go."""
_GONE = (LookupError, AttributeError, ValueError)
_proxy_get: Find = types.MappingProxyType.get
_requires_grad = operator.attrgetter("requires_grad")
_member_get = types.MemberDescriptorType.__get__


class Part(Protocol):
    """Some watched values."""

    def __len__(self) -> int:
        """How many they are."""

    def changes(self) -> Iterator[Change]:
        """What is not as it was."""

    def expect(self, row: GuardRow) -> None:
        """What `changes` comes down to."""

    def renew(self) -> None:
        """Take what is there now, after `changes` had nothing to tell, for what was."""


class Items:
    """Values at some keys of one dict, list or deque, attributes of one object, or in its slots."""

    def __init__(self, where: Any, find: Find | None = None) -> None:
        self.where = where
        self.length_name: str | None = None
        """What the container's length is called, where it must stay."""
        self._find, self._direct = _find_in(where) if find is None else (find, False)
        self._keys: list[Any] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._size = _size(where)

    def add(self, key: Any, name: str, value: Any) -> None:
        self._keys.append(key)
        self._names.append(name)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._keys) + (self.length_name is not None)

    def changes(self) -> Iterator[Change]:
        gone = False
        for key, name, before in zip(self._keys, self._names, self._values, strict=True):
            now = self._find(self.where, key, MISSING)
            if now is not before and not same(before, now):
                if now is MISSING and issubclass(type(self.where), (list, deque)):
                    continue  # told by its length
                gone = gone or now is MISSING
                yield tell(name, before, now)
        if self.length_name is not None and not gone and _size(self.where) != self._size:
            yield tell(self.length_name, self._size, _size(self.where))

    def renew(self) -> None:
        self._values = [self._find(self.where, key, MISSING) for key in self._keys]
        self._size = _size(self.where)

    def expect(self, row: GuardRow) -> None:
        if not self._direct:
            row.ask(self._is_untouched)
            return
        if self.length_name is not None:
            row.length(self.where, self._size)
        if len(self._keys) <= _MAX_SINGLE:
            for key, value in zip(self._keys, self._values, strict=True):
                row.item(self.where, key, value)
        elif type(self.where) is list and len(self._keys) == self._size:
            row.ask(functools.partial(_are_same_items, self.where, tuple(self._values)))
        else:
            row.items(self.where, dict(zip(self._keys, self._values, strict=True)))

    def _is_untouched(self) -> bool:
        found = map(self._find, repeat(self.where), self._keys, repeat(MISSING))
        is_as_long = self.length_name is None or _size(self.where) == self._size
        return is_as_long and all(map(operator.is_, found, self._values))


def _are_same_items(items: list[Any], values: tuple[Any, ...]) -> bool:
    return all(map(operator.is_, items, values))


def _find_in(where: Any) -> tuple[Find, bool]:
    """How to read a container, and whether its own `[]` will do."""
    kind = type(where)
    if kind is types.MappingProxyType:
        return _proxy_get, True
    if issubclass(kind, dict):
        return dict.get, kind is dict
    return (
        (functools.partial(_at, list), kind is list)
        if issubclass(kind, list)
        else (functools.partial(_at, deque), False)
    )


def _at(base: Any, where: Any, index: int, default: Any) -> Any:
    try:
        return base.__getitem__(where, index)
    except IndexError:
        return default


def by_identity(where: dict[Any, Any], key: Any, default: Any) -> Any:
    """What a dict holds for a key of a class with a hash of its own, which is not asked."""
    return next((value for other, value in dict.items(where) if other is key), default)


def in_slot(where: Any, member: types.MemberDescriptorType, default: Any) -> Any:
    """What an object holds in a slot."""
    try:
        return _member_get(member, where)
    except AttributeError:
        return default


def in_cell(cell: types.CellType) -> Any:
    """What a closure's cell holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _size(where: Any) -> int:
    for base in (dict, list, deque):
        if issubclass(type(where), base):
            return base.__len__(where)
    return 0


class Cell:
    """The variable in a closure's cell."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        self._name, self._cell, self._value = name, cell, in_cell(cell)

    def __len__(self) -> int:
        return 1

    def changes(self) -> Iterator[Change]:
        now = in_cell(self._cell)
        if not same(self._value, now):
            yield tell(self._name, self._value, now)

    def renew(self) -> None:
        self._value = in_cell(self._cell)

    def expect(self, row: GuardRow) -> None:
        if self._value is MISSING:
            row.ask(functools.partial(operator.eq, self._cell, types.CellType()))  # equal if both are empty
        else:
            row.attribute(self._cell, "cell_contents", self._value)


class Members:
    """What is in a set."""

    def __init__(self, name: str, where: Any) -> None:
        self._name, self._where = name, where
        self.renew()

    def __len__(self) -> int:
        return 1

    def changes(self) -> Iterator[Change]:
        if contents_of_set(self._where) != contents_of_set(self._kept):
            yield tell(self._name, self._kept, set(items_of(self._where)))

    def renew(self) -> None:
        self._kept = set(items_of(self._where))
        self._ids = set(map(id, self._kept))

    def expect(self, row: GuardRow) -> None:
        row.ask(self._is_untouched)

    def _is_untouched(self) -> bool:
        return set(map(id, items_of(self._where))) == self._ids


class Reading:
    """Something that a function reads: an optimizer's number, the bytes of an array, the state of a generator."""

    def __init__(self, name: str, read: Callable[[], Any], told: Callable[[], str]) -> None:
        """What is read can be compared; `told` is how it is told."""
        self._name, self._read, self._told = name, read, told
        self._value, self._text = read(), told()

    def __len__(self) -> int:
        return 1

    def changes(self) -> Iterator[Change]:
        try:
            if self._read() != self._value:
                yield Change(self._name, self._text, self._told())
        except _GONE:
            yield Change(self._name, self._text, "gone")

    def renew(self) -> None:
        """Nothing: what is read is compared by value."""

    def expect(self, row: GuardRow) -> None:
        row.ask(self._is_untouched)

    def _is_untouched(self) -> bool:
        return bool(self._read() == self._value)


class Defaults:
    """What a function's parameters stand for by default."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self.names: dict[str, str] = {}
        """What the parameters that are watched are called."""
        self.renew()

    def __len__(self) -> int:
        return len(self.names)

    def changes(self) -> Iterator[Change]:
        now = defaults_of(self._function)
        for parameter, name in self.names.items():
            if not same(self.values[parameter], now.get(parameter, MISSING)):
                yield tell(name, self.values[parameter], now.get(parameter, MISSING))

    def renew(self) -> None:
        self.values = defaults_of(self._function)
        self._by_place, self._by_keyword = self._function.__defaults__, self._function.__kwdefaults__
        self._keywords = list(self._by_keyword or ())

    def expect(self, row: GuardRow) -> None:
        row.attribute(self._function, "__defaults__", self._by_place)
        row.attribute(self._function, "__kwdefaults__", self._by_keyword)
        if self._by_keyword:
            row.items(self._by_keyword, {k: self.values[k] for k in self._keywords})


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """A function's parameters with a default, and what they stand for."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[max(code.co_argcount - len(values), 0) : code.co_argcount]
    return dict(zip(names, values, strict=False)) | (function.__kwdefaults__ or {})


class Tensors:
    """How tensors lie, and whether they take a gradient; which ones they are is for others to see."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._tensors: list[torch.Tensor] = []
        self._layouts: list[Layout] = []
        self._flags: list[bool] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._names:
            try:
                self._layouts.append(layout_of(tensor))
            except RuntimeError:  # no memory of its own: sparse, nested
                return
            self._names[id(tensor)] = name
            self._tensors.append(tensor)
            self._flags.append(tensor.requires_grad)

    def __len__(self) -> int:
        return 0

    def changes(self) -> Iterator[Change]:
        for tensor, layout, flag in zip(self._tensors, self._layouts, self._flags, strict=True):
            name, change = self._names[id(tensor)], change_of(layout)
            if change is not None:
                yield Change(name, "a tensor", f"the same tensor, which {change}")
            elif tensor.requires_grad != flag:
                yield Change(f"{name}.requires_grad", str(flag), str(tensor.requires_grad))

    def renew(self) -> None:
        """Nothing: all is as it was."""

    def expect(self, row: GuardRow) -> None:
        if self._tensors:
            Layouts(self._layouts).expect(row)
            row.ask(self._have_their_flags)

    def _have_their_flags(self) -> bool:
        return list(map(_requires_grad, self._tensors)) == self._flags
