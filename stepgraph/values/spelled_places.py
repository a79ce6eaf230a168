"""How a step's own code would spell the containers and objects that it can come to: `hist['l']`, `self.log.rows`.

Goes from the step's variables on, breadth first, so that the shortest spelling is the one that is found. A name that
two variables share is told apart by the function. It is for messages, and for the names that users type from them: what
is not found within a few steps has no name.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.values.watch_code import globals_in
from stepgraph.values.watch_notes import Notes
from stepgraph.values.watch_parts import in_cell, in_slot
from stepgraph.values.watch_telling import Label
from stepgraph.values.watch_values import attributes_of, is_engines, is_plain, is_users, items_of, slots_of

_MAX_DEPTH = 5
_MAX_VALUES = 20_000
_OWN_ATTRIBUTES = (torch.nn.Module, torch.optim.Optimizer)
_Entry = tuple[Label, Any]


@dataclass(frozen=True, slots=True)
class Spot:
    """A container, an object or a variable, and how it is spelled."""

    label: Label
    is_object: bool = False
    """Whether what it holds is its attributes."""
    is_models: bool = False
    """Whether it is a module or an optimizer, or an attribute of one."""

    def of(self, key: Any) -> Label:
        """How something in it is spelled."""
        return self.label.attribute(str(key)) if self.is_object else _item(self.label, key)


def spots_of(step: Any) -> dict[int, Spot]:
    """What a step can come to, by id."""
    found: dict[int, Spot] = {}
    notes, seen = Notes(()), set[int]()
    queue: deque[tuple[Label, Any, int, bool]] = deque([(Label(""), step, 0, False)])
    while queue and len(seen) < _MAX_VALUES:
        label, value, depth, is_models = queue.popleft()
        is_stand_in = issubclass(type(value), dict)  # a dictionary of the engine's is in the place of a user's
        if id(value) in seen or depth > _MAX_DEPTH or is_plain(value) or (is_engines(value) and not is_stand_in):
            continue
        seen.add(id(value))
        inner: Iterator[_Entry]
        kind = type(value)  # `isinstance` would ask the value
        owns = issubclass(kind, _OWN_ATTRIBUTES)
        if issubclass(kind, (types.FunctionType, types.MethodType, functools.partial)):
            inner = _variables(value, notes)
        elif issubclass(kind, (dict, list, tuple, set, frozenset, deque, types.CellType)):
            found[id(value)] = Spot(label, is_models=is_models)
            inner = _items(label, value)
        elif depth == 0 or owns or is_users(kind):
            label = label if label.spelling else notes.label("self", kind.__name__, id(value))
            found[id(value)] = found[id(attributes_of(value))] = Spot(label, is_object=True, is_models=owns)
            inner = _attributes(label, value)
        else:
            continue
        further = depth + (kind is not types.CellType)
        queue.extend((label, item, further, owns) for label, item in inner)
    return found


def _variables(function: Any, notes: Notes) -> Iterator[_Entry]:
    """What a function has in its variables, each under its name."""
    if isinstance(function, functools.partial):
        yield Label(""), function.func
        yield from ((Label(name), value) for name, value in function.keywords.items())
        return
    if isinstance(function, types.MethodType):
        owner = function.__self__
        yield notes.label("self", type(owner).__name__, id(owner)), owner
        yield Label(""), function.__func__
        return
    code, called, scope = function.__code__, function.__name__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield notes.label(name, called, id(cell)), cell
    for name in sorted(globals_in(code) & scope.keys()):
        yield notes.label(name, called, (id(scope), name)), scope[name]
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    for name, value in (defaults | (function.__kwdefaults__ or {})).items():
        yield notes.label(name, called, (id(function), name)), value


def _items(label: Label, value: Any) -> Iterator[_Entry]:
    if type(value) is types.CellType:
        yield label, in_cell(value)
    elif issubclass(type(value), dict):
        yield from ((_item(label, key), item) for key, item in dict.items(value))
    else:
        yield from ((_item(label, index), item) for index, item in enumerate(items_of(value)))


def _attributes(label: Label, value: Any) -> Iterator[_Entry]:
    yield from ((label.attribute(str(name)), item) for name, item in (attributes_of(value) or {}).items())
    for name, member in slots_of(type(value)).items():
        yield label.attribute(name), in_slot(value, member, None)


def _item(label: Label, key: Any) -> Label:
    """Keys that cannot be written, such as the parameters in an optimizer's state, are all spelled `...`."""
    return label.item(key) if issubclass(type(key), (str, int)) else Label(f"{label.spelling}[...]", label.apart)
