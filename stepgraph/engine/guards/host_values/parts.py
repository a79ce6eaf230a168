"""Watched values, and their checks: one row in C before each replay, and by name if something changed.

Every watched value is a `Place`: an object to read from, a key, a reader, and the value found. The length of a list,
the class of an object and the address of a tensor are places, too. Only new names need another class (`Names`). Reading
runs no user code: a dict is read as a plain dict, whatever its class does for a missing key.
"""

from __future__ import annotations

import functools
import operator
import os
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.frames import is_engines
from stepgraph.core.plain_values import (
    MISSING,
    attributes_of,
    is_numpy,
    is_plain,
    items_of,
    kept_by,
    results_of,
    same,
    token,
    told,
)
from stepgraph.core.storage import geometry_of, special_kind
from stepgraph.engine.backends.native.library import native_row
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.host_values.naming import Label, describe_change
from stepgraph.engine.guards.layout import Layouts, change_of, layout_of
from stepgraph.engine.guards.protocol import Change

_MAX_SINGLE = 16
"""Most items of one list that are compared one by one in Python; more are compared together."""
_DIRECT = (dict, list, types.MappingProxyType)
"""Containers whose own `[]` runs no user code."""
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, deque)
_requires_grad = operator.attrgetter("requires_grad")
_read_slot = types.MemberDescriptorType.__get__


# -- readers: each takes an object and a key, and returns MISSING if there is nothing


def item_at(where: Any, key: Any) -> Any:
    """Return the item of a dict, a list or a deque at a key."""
    kind = type(where)
    if kind is types.MappingProxyType:
        return where.get(key, MISSING)
    if issubclass(kind, dict):
        return dict.get(where, key, MISSING)
    try:
        return _base_of(where).__getitem__(where, key)
    except IndexError:
        return MISSING


def by_identity(where: dict[Any, Any], key: Any) -> Any:
    """Return the item of a dict at a key whose class may define `__hash__`, without calling it."""
    return next((value for other, value in dict.items(where) if other is key), MISSING)


def in_slot(where: Any, member: types.MemberDescriptorType) -> Any:
    """Return the value in a slot of an object."""
    try:
        return _read_slot(member, where)
    except AttributeError:
        return MISSING


def attribute_of(where: Any, name: str) -> Any:
    """Return the contents of a cell, or the code of a function."""
    try:
        return getattr(where, name)
    except ValueError:  # an empty cell
        return MISSING


def default_of(function: types.FunctionType, parameter: str) -> Any:
    """Return the default of a function's parameter."""
    return defaults_of(function).get(parameter, MISSING)


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return a function's parameters that have a default, with their defaults."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[max(code.co_argcount - len(values), 0) : code.co_argcount]
    return dict(zip(names, values, strict=False)) | (function.__kwdefaults__ or {})


def result_of(read: Callable[..., Any], _: Any) -> Any:
    """Return what a function reads: a number of an optimizer, a context variable."""
    try:
        return read()
    except (LookupError, AttributeError, ValueError):
        return MISSING


def results_in(cache: Any, results: frozenset[int]) -> Any:
    """Check whether a cache still holds these results, by id."""
    return "as captured" if results.issubset(map(id, results_of(cache))) else "other objects"


def length_of(where: Any, _: Any) -> Any:
    return _base_of(where).__len__(where)


def order_of(where: Any, _: Any) -> Any:
    """Return the keys of a dict in order."""
    return tuple(_base_of(where).__iter__(where))


def class_of(where: Any, _: Any) -> Any:
    return type(where)


def members_of(where: Any, _: Any) -> Any:
    return frozenset(items_of(where))


def is_bytes(value: Any, most: int) -> bool:
    """Check for an object whose value is memory, with at most so many numbers: an array, a number of ctypes.

    The garbage collector does not see what it holds. Constants do not count.
    """
    if is_numpy(type(value), "ndarray"):
        return bool(value.size <= most)
    if is_plain(value) or any(type(vars(b).get("__buffer__")) is types.FunctionType for b in type(value).__mro__):
        return False  # the user's own `__buffer__` is code that must not run here
    try:
        with memoryview(value) as view:
            return view.nbytes <= most * max(view.itemsize, 1)
    except (TypeError, ValueError, BufferError):
        return False


def bytes_of(array: Any, _: Any) -> Any:
    """Return the contents of an object whose value is memory."""
    if is_numpy(type(array), "ndarray"):
        return array.dtype.str, array.shape, array.tobytes()
    try:
        with memoryview(array) as view:
            return view.format, view.shape, view.tobytes()
    except (ValueError, BufferError):  # it is closed
        return MISSING


def layout_at(tensor: torch.Tensor, _: Any) -> Any:
    """Return the layout of a tensor that has one, and its `requires_grad`."""
    return layout_of(tensor), tensor.requires_grad


def geometry_at(tensor: torch.Tensor, _: Any) -> Any:
    """Return what a tensor without a layout consists of (sparse, nested), and where its parts are."""
    return geometry_of(tensor)


def _base_of(where: Any) -> Any:
    """Return the base class that reads a container without methods of the user's class."""
    return next(base for base in _BASES if issubclass(type(where), base))


# -- watched values


@dataclass(slots=True)
class Place:
    """A value found at a key of an object."""

    label: Label
    where: Any
    key: Any
    value: Any
    is_users: bool
    """True if it belongs to the user's code, False for an installed library."""
    read: Callable[[Any, Any], Any] = item_at

    @property
    def spot(self) -> Hashable:
        """What distinguishes it from other places."""
        return id(self.where), self.key, self.read

    def change(self) -> Change | None:
        """Describe how the value changed, or return None."""
        now, name = self.read(self.where, self.key), str(self.label)
        if now is self.value or same(self.value, now) or self._is_reported_elsewhere(now):
            return None
        if self.read is layout_at:
            moved = change_of(self.value[0])
            if moved is None:
                return describe_change(f"{name}.requires_grad", self.value[1], now[1], self.is_users)
            return Change(name, "a tensor", f"the same tensor, which {moved}", is_users=self.is_users)
        if self.read is geometry_at:
            what = "the same tensor with other parts, or in other memory"
            return Change(name, f"a {special_kind(self.where)}", what, is_users=self.is_users)
        if self.read is bytes_of:
            kind = "array" if is_numpy(type(self.where), "ndarray") else type(self.where).__name__
            article = "an" if kind[0] in "aeio" else "a"
            return Change(name, f"{article} {kind}", f"the same {kind} with other contents", is_users=self.is_users)
        return describe_change(name, self.value, now, is_users=self.is_users)

    def _is_reported_elsewhere(self, now: Any) -> bool:
        """Check whether another place reports the change: the length of a list, or the removed key of a dict."""
        if self.read is order_of:
            return set(map(token, self.value)) != set(map(token, now))
        if self.read is length_of:
            return issubclass(type(self.where), dict) and bool(now < self.value)
        return now is MISSING and issubclass(type(self.where), (list, deque))


def expect_places(found: Iterable[Place], row: GuardRow) -> None:
    """Add the expectation to a row that no place has changed."""
    groups: dict[tuple[int, Any], list[Place]] = {}
    for place in found:
        groups.setdefault((id(place.where) if place.read is item_at else 0, place.read), []).append(place)
    for (_, read), places in groups.items():
        where, values = [place.where for place in places], [place.value for place in places]
        if read is item_at:
            _expect_items(places, row)
        elif read is attribute_of and all(value is not MISSING for value in values):
            for place in places:
                row.attribute(place.where, place.key, place.value)
        elif read is default_of:
            for function in {id(one): one for one in where}.values():
                row.attribute(function, "__defaults__", function.__defaults__)
                row.attribute(function, "__kwdefaults__", function.__kwdefaults__)
                row.items(function.__kwdefaults__, dict(function.__kwdefaults__ or {}))
        elif read is length_of and all(type(one) in (dict, list, deque) for one in where):
            for container, length in zip(where, values, strict=True):
                row.length(container, length)
        elif read is layout_at:
            Layouts([layout for layout, _ in values]).expect(row)
            row.ask(functools.partial(_are_equal, _requires_grad, where, [flag for _, flag in values]))
        elif read is class_of:
            for value, kind in zip(where, values, strict=True):
                row.class_of(value, kind)
        elif read is in_slot and all(value is not MISSING for value in values):
            row.ask(functools.partial(_are_in_slots, [place.key for place in places], where, values))
        elif read is results_in:
            for kept in map(kept_by, where):
                row.ask(functools.partial(_are_kept, kept, list(kept), list(map(id, kept.values()))))
        elif read is members_of:
            row.ask(functools.partial(_are_equal, _ids_of, where, list(map(_ids_of, values))))
        elif read is order_of:
            row.ask(functools.partial(_are_equal, _ids_in_order, where, list(map(_ids_in_order, where))))
        else:
            row.ask(functools.partial(_are_read, read, where, [place.key for place in places], values))


def _expect_items(places: list[Place], row: GuardRow) -> None:
    where, values = places[0].where, {place.key: place.value for place in places}
    if type(where) not in _DIRECT:
        row.ask(functools.partial(_are_read, item_at, [where] * len(values), [*values], [*values.values()]))
    elif type(where) is not list:
        row.held(where, values)
    elif len(values) <= _MAX_SINGLE or native_row() is not None:
        for key, value in values.items():
            row.item(where, key, value)
    else:
        row.items(where, values)


def _are_equal(read: Callable[[Any], Any], where: list[Any], values: list[Any]) -> bool:
    return list(map(read, where)) == values


def _are_read(read: Callable[[Any, Any], Any], where: list[Any], keys: list[Any], values: list[Any]) -> bool:
    found = list(map(read, where, keys))
    return all(map(operator.is_, values, found)) or all(map(same, values, found))


def _are_in_slots(members: list[Any], where: list[Any], values: list[Any]) -> bool:
    return all(map(operator.is_, map(_read_slot, members, where), values))


def _are_kept(kept: dict[Any, Any], keys: list[Any], values: list[int]) -> bool:
    return len(kept) == len(keys) and all(map(operator.is_, kept, keys)) and list(map(id, kept.values())) == values


def _ids_of(values: Any) -> frozenset[int]:
    return frozenset(map(id, items_of(values)))


def _ids_in_order(where: Any) -> tuple[int, ...]:
    keys: Any = OrderedDict if issubclass(type(where), OrderedDict) else dict
    return tuple(map(id, keys.__iter__(where)))


@dataclass(slots=True)
class Names:
    """The names in a dict of attributes or globals. A new name may hide a value that code has found so far."""

    label: Label
    where: Mapping[Any, Any]
    wants: Callable[[Any], bool]
    """Checks whether code looks for a name."""
    behind: tuple[type, ...]
    """The classes that Python searches next for a missing name."""
    is_users: bool
    known: frozenset[Any]

    def changes(self) -> Iterator[Change]:
        for key in [key for key in self.where if key not in self.known and self.wants(key)]:
            value = self.where[key]
            function = value.__func__ if type(value) is types.MethodType else value
            if is_engines(value) or "_wrapped_by_lr_sched" in (attributes_of(function) or ()):
                continue  # it does the same as the method: a graphed forward, a scheduler's count of steps
            label = self.label.attribute(key) if type(key) is str else self.label.item(os.fsdecode(key))
            now = told(value)
            before = next((told(vars(kind)[key]) for kind in self.behind if key in vars(kind)), "absent")
            yield Change(str(label), before if before != now else f"its class's {now}", now, is_users=self.is_users)
