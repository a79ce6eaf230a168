"""The first operation at which two logs of one program differ, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from stepgraph.errors import Location
from stepgraph.oplog.log import FIELDS, Log

_FORM = ("shape", "dtype", "device", "layout")
_BITS = ("storage offset", "strides", "conjugated", "negated")


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs first: where in the logs, at which line, and how."""

    index: int
    operation: str
    where: Location | None
    """The user's line, of the later log where it has one."""
    before: str
    now: str

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where is not None else ""
        return f"operation {self.index}, {self.operation}{at}: {self.before} -> {self.now}"


def first_difference(before: Log, now: Log) -> Difference | None:
    """The first difference of two logs that share a vocabulary, or None. Lines do not count: code may move."""
    assert before.vocabulary is now.vocabulary, "logs are compared by the numbers of one vocabulary"
    if before.notes == now.notes:
        return None
    for index in range(min(len(before), len(now))):
        start = index * FIELDS
        if before.notes[start : start + FIELDS - 1] != now.notes[start : start + FIELDS - 1]:
            return _difference(index, before[index], now[index])
    index = min(len(before), len(now))
    if len(before) == len(now):
        return None
    extra = (before if len(before) > index else now)[index]
    ends = "the call ends"
    told = (extra[0], ends) if len(before) > index else (ends, extra[0])
    return Difference(index, extra[0], _location(extra[3]), *told)


def _difference(index: int, before: tuple[Any, ...], now: tuple[Any, ...]) -> Difference:
    where = _location(now[3]) or _location(before[3])
    if before[0] != now[0]:
        return Difference(index, now[0], where, before[0], now[0])
    one, two = next(_changes(before, now), ("other arguments", "other arguments"))
    return Difference(index, now[0], where, one, two)


def _changes(before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """What differs between two notes of one operation, both sides in words."""
    for one, two in zip_longest(before[1], now[1], fillvalue=("nothing", "nothing")):
        if one != two:
            yield _value(one), _value(two)
    for position, (one, two) in enumerate(zip_longest(before[2], now[2])):
        if one != two:
            name = f"tensor {position}"
            if one is None or two is None:
                yield f"{len(before[2])} tensors", f"{len(now[2])} tensors"
            elif one[0] != two[0]:
                yield f"{name} is {_which(one[0])}", f"{name} is {_which(two[0])}"
            else:
                yield from _geometry(name, one, two)


def _geometry(name: str, one: tuple[Any, ...], two: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    for part, names in ((1, _FORM), (2, _BITS)):
        if len(one) > part and len(two) > part:
            for what, a, b in zip(names, one[part], two[part], strict=True):
                if a != b:
                    yield f"{name} has {what} {a}", f"{what} {b}"


def _value(plain: tuple[str, str]) -> str:
    kind, shown = plain
    return shown if kind in ("int", "float", "bool", "str") else f"{kind} {shown}".strip()


def _which(which: tuple[str, Any]) -> str:
    kind, number = which
    return {
        "made": f"what was made {number} results ago",
        "argument": f"argument {number}",
        "known": str(number),
        "outside": f"a tensor from outside the call (number {number})",
    }.get(kind, f"{kind} {number}")


def _location(line: Any) -> Location | None:
    return Location(*line) if line is not None and len(line) == 3 else None
