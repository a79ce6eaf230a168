"""Whose attribute a name is, as far as code shows it: `self.optimizer.step()` does not read `self.step`.

A loop counts in `trainer.step`, and every training step spells `step`. What stands before the dot tells the two apart
where it is a variable of the function's closure or a global, or an attribute that objects are known to have: then it
is known what it stands for. What it stands for is watched itself, so that this stays true. Anything else, a local
variable say, may be any object.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

from stepgraph.state.watch_code import asked_by_string
from stepgraph.state.watch_parts import in_cell
from stepgraph.state.watch_subject import Subject
from stepgraph.state.watch_values import MISSING

_LOOKUPS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_VARIABLES = frozenset(("LOAD_GLOBAL", "LOAD_DEREF"))
_FILLERS = ("EXTENDED_ARG", "PUSH_NULL")
_ANYTHING = ("", "")

Base = tuple[str, str]
"""How it stands before the dot, and its name: an attribute or a variable. Empty where that is not known."""


class Bases:
    """Answers for each name that code has, and each object, whether the code may mean the object's attribute."""

    def __init__(
        self,
        functions: Iterable[tuple[types.FunctionType, set[str]]],
        subjects: Collection[Subject],
        unread: Collection[str],
    ) -> None:
        """`unread` are names that are in no function's code."""
        self._subjects, self._unread = subjects, frozenset(unread)
        self._readers: dict[str, list[types.FunctionType]] = {}
        for function, names in functions:
            for name in names:
                self._readers.setdefault(name, []).append(function)
        self._found: dict[int, dict[str, set[Base]]] = {}
        self._holders: dict[str, set[int] | None] = {}

    def may_be_of(self, name: str, value: Any) -> bool:
        """Whether code that is followed may look for a name on this object."""
        readers = self._readers.get(name, ())
        if not readers or name in self._unread:
            return True
        return any(self._may_be(f, base, value) for f in readers for base in self._bases_in(f).get(name, (_ANYTHING,)))

    def _bases_in(self, function: types.FunctionType) -> dict[str, set[Base]]:
        found = self._found.get(id(function))
        if found is None:
            found = self._found[id(function)] = {}
            for name, base in _lookups_in(function.__code__):
                found.setdefault(name, set()).add(base)
            for name in asked_by_string(function.__code__):
                found.setdefault(name, set()).add(_ANYTHING)
        return found

    def _may_be(self, function: types.FunctionType, base: Base, value: Any) -> bool:
        kind, name = base
        if kind in _VARIABLES:
            found = _variable(function, kind, name)
            return found is MISSING or found is value
        holders = self._values_of(name) if kind in _LOOKUPS else None
        return holders is None or id(value) in holders

    def _values_of(self, name: str) -> set[int] | None:
        """What an attribute stands for on all objects that are known to have it, by id; None where that is unsure."""
        if name not in self._holders:
            subjects = [s for s in self._subjects if s.kind is not None]
            kinds = {s.kind.type for s in subjects if s.kind is not None}
            places = chain.from_iterable((s.attributes, s.attributes.get("_modules") or {}) for s in subjects)
            found = {id(place[name]) for place in places if name in place}
            is_sure = found and not any(name in vars(base) for kind in kinds for base in kind.__mro__)
            self._holders[name] = found if is_sure else None
        return self._holders[name]


def _lookups_in(code: types.CodeType) -> Iterator[tuple[str, Base]]:
    steps = [step for step in dis.get_instructions(code) if step.opname not in _FILLERS]
    for before, step in pairwise(steps):
        if step.opname in _LOOKUPS or step.opname.startswith("LOAD_SUPER"):
            is_known = step.opname in _LOOKUPS and before.opname in _LOOKUPS | _VARIABLES
            yield step.argval, (before.opname, before.argval) if is_known and not step.is_jump_target else _ANYTHING
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _lookups_in(constant)


def _variable(function: types.FunctionType, kind: str, name: str) -> Any:
    """What a variable from outside of a function stands for."""
    if kind == "LOAD_GLOBAL":
        return function.__globals__.get(name, MISSING)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return in_cell(cells[name]) if name in cells else MISSING
