"""Whose attribute a name is, as far as code shows it: `self.optimizer.step()` does not read `self.step`.

A loop counts in `trainer.step`, and every training step spells `step`. What stands before the dot tells the two apart
where it is a variable of the function's closure or a global, or an attribute of such a variable or of `self`: then it
is known what it stands for. What it stands for is watched itself, so that this stays true. Anything else may be any
object: a local variable, and an object whose class answers for another (`__getattr__` of a wrapper).
"""

from __future__ import annotations

import dis
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch

from stepgraph.values.watch_code import asked_by_string
from stepgraph.values.watch_parts import in_cell
from stepgraph.values.watch_subject import Subject
from stepgraph.values.watch_values import MISSING

_LOOKUPS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_VARIABLES = frozenset(("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
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
            return found is MISSING or found is value or _answers_for_others(found)
        holders = self._values_of(name) if kind in _LOOKUPS else None
        return holders is None or id(value) in holders

    def _values_of(self, name: str) -> set[int] | None:
        """What an attribute stands for on all objects that are known to have it, by id; None where that is unsure."""
        if name not in self._holders:
            subjects = [s for s in self._subjects if s.kind is not None]
            kinds = {s.kind.type for s in subjects if s.kind is not None}
            places = chain.from_iterable((s.attributes, s.attributes.get("_modules") or {}) for s in subjects)
            found = [place[name] for place in places if name in place]
            is_sure = found and not any(name in vars(base) for kind in kinds for base in kind.__mro__)
            self._holders[name] = set(map(id, found)) if is_sure and not any(map(_answers_for_others, found)) else None
        return self._holders[name]


def _lookups_in(code: types.CodeType) -> Iterator[tuple[str, Base]]:
    steps = _steps_of(code)
    for at, step in enumerate(steps):
        if step.opname in _LOOKUPS or step.opname.startswith("LOAD_SUPER"):
            yield step.argval, _base_of(steps[:at], step, code)
    for inner in _inner(code):
        yield from _lookups_in(inner)


def _base_of(before: Sequence[dis.Instruction], step: dis.Instruction, code: types.CodeType) -> Base:
    if not before or step.is_jump_target or step.opname not in _LOOKUPS:
        return _ANYTHING
    base = before[-1]
    if base.opname in _LOOKUPS:  # an attribute, of what?
        if len(before) < 2 or base.is_jump_target or not _is_known(before[-2], code):
            return _ANYTHING
    elif base.opname not in _VARIABLES:
        return _ANYTHING
    return base.opname, base.argval


def _is_known(step: dis.Instruction, code: types.CodeType) -> bool:
    """Whether a variable is loaded that is not the function's own, or its first argument."""
    is_first = step.opname == "LOAD_FAST" and code.co_argcount > 0 and step.argval == code.co_varnames[0]
    return is_first or step.opname in _VARIABLES


def _answers_for_others(value: Any) -> bool:
    """Whether an object may give what it does not have itself."""
    if issubclass(type(value), types.ModuleType):
        return "__getattr__" in vars(value)
    kinds = [kind for kind in type(value).__mro__ if kind not in (object, type, torch.nn.Module)]
    return any("__getattr__" in vars(kind) or "__getattribute__" in vars(kind) for kind in kinds)


def is_handed_on(code: types.CodeType, name: str) -> bool:
    """Whether code does more with a variable than to look up its attributes, inner functions included."""
    reads = ((step, after.opname) for step, after in pairwise(_steps_of(code)) if step.opname in _VARIABLES)
    if any(step.argval == name and after not in _LOOKUPS for step, after in reads):
        return True
    return any(is_handed_on(inner, name) for inner in _inner(code))


def _steps_of(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _FILLERS]


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if type(constant) is types.CodeType]


def _variable(function: types.FunctionType, kind: str, name: str) -> Any:
    """What a variable from outside of a function stands for."""
    if kind == "LOAD_GLOBAL":
        return function.__globals__.get(name, MISSING)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return in_cell(cells[name]) if name in cells else MISSING
