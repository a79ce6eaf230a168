"""One level into a container: its items, by identity, and how many they are; the bytes of a small array."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

from stepgraph.values.watch_behind import dict_behind
from stepgraph.values.watch_notes import Notes
from stepgraph.values.watch_parts import Items, Members, Reading, by_identity
from stepgraph.values.watch_telling import Label, told
from stepgraph.values.watch_values import is_numpy, is_plain, items_of

_MAX_ITEMS = 4096
"""Items that are watched one by one; of a larger container, which one it is and its length."""


def contents_of(label: Label, value: Any, notes: Notes) -> Iterator[tuple[Label, Any]]:
    """Watch what is in a container, and yield it."""
    value = value if (behind := dict_behind(value)) is None else behind
    kind = type(value)
    if issubclass(kind, dict):
        yield from _of_dict(label, value, notes)
    elif issubclass(kind, (list, deque)):
        entries = [(i, label.item(i), v) for i, v in enumerate(items_of(value))] if _fits(value) else []
        notes.put_all(value, entries, label.length)
        yield from ((inner, v) for _, inner, v in entries)
    elif issubclass(kind, tuple):
        yield from ((label.item(i), v) for i, v in enumerate(items_of(value)) if i < _MAX_ITEMS)
    elif issubclass(kind, set):
        if set.__len__(value) <= _MAX_ITEMS:
            notes.add(str(label), Members(str(label), value))
            yield from ((label, v) for v in items_of(value))
    elif kind is bytearray:
        notes.add(str(label), Reading(str(label), functools.partial(bytes, value), lambda: told(bytes(value))))
    elif is_numpy(kind, "ndarray") and value.size <= _MAX_ITEMS:
        read = functools.partial(_of_array, value)
        notes.add(str(label), Reading(str(label), read, functools.partial(_told_array, value)))


def _fits(value: Any) -> bool:
    return (list.__len__(value) if issubclass(type(value), list) else deque.__len__(value)) <= _MAX_ITEMS


def _of_dict(label: Label, value: dict[Any, Any], notes: Notes) -> Iterator[tuple[Label, Any]]:
    entries = [(k, label.item(k), v) for k, v in dict.items(value)] if dict.__len__(value) <= _MAX_ITEMS else []
    notes.put_all(value, [entry for entry in entries if is_plain(entry[0])], label.length)
    if entries:
        notes.order(label, value)
    odd = Items(value, by_identity)
    for key, inner, item in entries:
        if not is_plain(key):
            odd.add(key, str(inner), item)
        yield inner, item
    if len(odd):
        notes.add(str(label), odd)


def _of_array(array: Any) -> tuple[Any, ...]:
    return array.dtype.str, array.shape, array.tobytes()


def _told_array(array: Any) -> str:
    text = told(array)
    return text if not text.startswith("<") else f"an array of shape {list(array.shape)}"
