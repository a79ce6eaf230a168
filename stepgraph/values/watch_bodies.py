"""What could come between a name and what it stands for: another class, a new attribute, another body of a function.

An attribute that is set on an instance hides that of its class; a module whose `__class__` or `forward` is another one
computes something else. So the classes of objects are noted, and the names that code looks for and that are not there.
Most objects get no new attributes, so that only the number of theirs is asked, and the names once it has changed.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepgraph.native.row import GuardRow
from stepgraph.values.watch_telling import Change, Label, tell, told
from stepgraph.values.watch_values import is_no_matter

_code = operator.attrgetter("__code__")
FORWARD = frozenset(("forward",))
_FEW = 16
"""Up to so many are asked one by one: it takes as long as the one question for all."""


class Classes:
    """Which class each object is of."""

    def __init__(self) -> None:
        self._labels: list[Label] = []
        self._objects: list[Any] = []
        self._kinds: list[type] = []

    def add(self, label: Label, value: Any) -> None:
        self._labels.append(label)
        self._objects.append(value)
        self._kinds.append(type(value))

    def __len__(self) -> int:
        return 0

    def changes(self) -> Iterator[Change]:
        for label, value, kind in zip(self._labels, self._objects, self._kinds, strict=True):
            if type(value) is not kind:
                yield tell(str(label.attribute("__class__")), kind, type(value))

    def renew(self) -> None:
        """Nothing: all is as it was."""

    def expect(self, row: GuardRow) -> None:
        if len(self._objects) > _FEW:
            row.ask(self._are_same)
        else:
            for value, kind in zip(self._objects, self._kinds, strict=True):
                row.class_of(value, kind)

    def _are_same(self) -> bool:
        return list(map(type, self._objects)) == self._kinds


class Absent:
    """Names that code looks for and that objects do not have."""

    def __init__(self) -> None:
        self._labels: list[Label] = []
        self._where: list[Mapping[str, Any]] = []
        self._names: list[frozenset[str]] = []
        self._sizes: list[int] = []
        self._behind: list[Sequence[type]] = []

    def add(self, label: Label, where: Mapping[str, Any], names: frozenset[str], behind: Sequence[type] = ()) -> None:
        """`behind` are the classes that are asked for what is not here."""
        if names:
            self._behind.append(behind)
            self._labels.append(label)
            self._where.append(where)
            self._names.append(names)
            self._sizes.append(len(where))

    def __len__(self) -> int:
        return 0

    def changes(self) -> Iterator[Change]:
        found = zip(self._labels, self._where, self._names, self._behind, strict=True)
        for label, where, names, behind in found:
            for name in sorted(name for name in names if name in where):
                if not is_no_matter(where[name]):
                    now = told(where[name])
                    before = next((told(vars(kind)[name]) for kind in behind if name in vars(kind)), "absent")
                    yield Change(str(label.attribute(name)), before if before != now else f"its class's {now}", now)

    def renew(self) -> None:
        self._sizes = list(map(len, self._where))

    def expect(self, row: GuardRow) -> None:
        """No attribute may be added. One that is there cannot go unnoticed in exchange: it is watched itself."""
        for where, size in zip(self._where, self._sizes, strict=True):
            row.length(where, size)


class Bodies:
    """The code of the functions that were followed: tools that reload code put another into the same function."""

    def __init__(self) -> None:
        self._functions: list[types.FunctionType] = []
        self._bodies: list[types.CodeType] = []

    def add(self, function: types.FunctionType) -> None:
        self._functions.append(function)
        self._bodies.append(function.__code__)

    def __len__(self) -> int:
        return 0

    def changes(self) -> Iterator[Change]:
        for function, body in zip(self._functions, self._bodies, strict=True):
            if function.__code__ != body:
                yield Change(f"{function.__qualname__}.__code__", "as captured", "another body")

    def renew(self) -> None:
        """Nothing: all is as it was."""

    def expect(self, row: GuardRow) -> None:
        if len(self._functions) > _FEW:
            row.ask(self._are_same)
        else:
            for function, body in zip(self._functions, self._bodies, strict=True):
                row.attribute(function, "__code__", body)

    def _are_same(self) -> bool:
        return list(map(_code, self._functions)) == self._bodies
