"""What has attributes that code looks up, and what of it is watched once it is known which names that code has.

Code that asks for attributes without spelling them may read every one of an object, and may call every method: those
of the class whose method asks so, and of what a function names that does.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.values.watch_bodies import FORWARD
from stepgraph.values.watch_code import code_behind, is_callable_by_name, is_users_code, may_call_anything
from stepgraph.values.watch_kinds import BOOKKEEPING, Kind, Kinds
from stepgraph.values.watch_notes import Notes
from stepgraph.values.watch_parts import Items, in_slot
from stepgraph.values.watch_telling import Label
from stepgraph.values.watch_values import MISSING, attributes_of, is_engines, is_plain


@dataclass(slots=True)
class Subject:
    """An object, class or Python module whose attributes are looked up by code that is followed."""

    label: Label
    value: Any
    kind: Kind | None
    """None for a Python module."""
    attributes: Mapping[str, Any]
    contexts: list[set[str]]
    """Names that are looked for on it, beside those in its own methods; they grow."""
    doubtful: tuple[set[str], ...] = ()
    """The same, in code that mostly has others in mind: code that they lead to counts if it was seen to run."""
    slots: Mapping[str, types.MemberDescriptorType] = field(default_factory=dict)
    is_self: bool = False
    """Whether what its own methods name is looked into, one level."""
    is_fixed: bool = False
    """Whether its code is taken for granted."""
    looked_at: set[str] = field(default_factory=set)
    looked_into: set[str] = field(default_factory=set)
    size: tuple[int, ...] = ()

    @property
    def own(self) -> set[str]:
        """The names in its own methods."""
        return self.kind.names if self.kind is not None else set()

    @property
    def names(self) -> set[str]:
        return self.own.union(*self.contexts)

    @property
    def doubted(self) -> set[str]:
        """Names that are only in code that mostly has others in mind."""
        return set().union(*self.doubtful) - self.names

    def direct(self, anyones: Collection[int]) -> set[str]:
        """The names in code that has it in mind; `anyones` are those, by the id of their set, of code about others."""
        return self.own.union(*(names for names in self.contexts if id(names) not in anyones))

    def callable_unspelled(self, anyones: Collection[int]) -> Iterator[str]:
        """Its methods or functions, if code that asks for them without spelling them may have it in mind."""
        if not may_call_anything(self.direct(anyones)):
            return
        places: list[Mapping[str, Any]] = [self.attributes]
        if self.kind is not None:
            places = [vars(base) for base in self.kind.type.__mro__ if base is not object]
        for place in places:
            for name, value in place.items():
                if not name.startswith("__") and any(map(_is_users, code_behind(value))):
                    yield name


def _is_users(function: Any) -> bool:
    return type(function) is types.FunctionType and is_users_code(function.__code__)


def note_attributes(
    subject: Subject, kind: Kind, notes: Notes, named: Collection[str] | None, is_meant: Callable[[str, Any], bool]
) -> None:
    """Watch the attributes and slots of an object that any code may read; `named` are the names in it, None for all.

    `is_meant` tells whether a name may be about this object.
    """
    label, value = subject.label, subject.value

    def is_read(name: str) -> bool:
        return named is None or (name in named and is_meant(name, value))

    for key in sorted(kind.watched_in(subject.attributes)):
        item = subject.attributes[key]
        if not is_read(key):
            continue
        if not kind.is_module or type(item) in SIMPLE or not is_engines(item):
            notes.put(subject.attributes, key, label.attribute(key), item)
            notes.place(label.attribute(key), item)
    part = Items(value, in_slot)
    for name, member in subject.slots.items():
        inner, item = label.attribute(name), in_slot(value, member, MISSING)
        if not notes.is_ignored(inner) and is_read(name):
            part.add(member, str(inner), item)
            notes.place(inner, item)
    if len(part):
        notes.parts.append(part)


def note_whole(subject: Subject, notes: Notes) -> None:
    """Watch which attributes an object has, and in which order: code goes through them (`vars(config).values()`)."""
    if type(subject.attributes) is dict and subject.attributes:
        whole = Label(f"vars({subject.label.spelling})", subject.label.apart)
        notes.put_all(subject.attributes, (), whole.length)
        notes.order(whole, subject.attributes)


def note_absent(subjects: Collection[Subject], kinds: Kinds, notes: Notes) -> None:
    """Watch that what code looks for and does not find stays away."""
    shared: dict[frozenset[str], frozenset[str]] = {}  # those of a hundred equal layers are one
    for subject in subjects:
        kind, names = subject.kind, subject.names | subject.doubted
        if attributes_of(subject.value) is None:  # a class is seen to below
            continue
        if kind is not None and kind.is_module and not subject.is_fixed:
            names |= FORWARD
        if kind is not None and not kind.is_users:  # a library's object: what would hide a method of its class
            names = {name for name in names if any(name in vars(base) for base in kind.type.__mro__)}
            names -= {"step"} if issubclass(kind.type, torch.optim.Optimizer) else set()  # live, or guarded
        missing = frozenset(names.difference(subject.attributes, subject.slots, BOOKKEEPING))
        missing = shared.setdefault(missing, missing)
        notes.absent(subject.label, subject.attributes, missing, type(subject.value).__mro__)
    for kind in kinds.users():
        for base in filter(kinds.is_users, kind.type.__mro__):
            label = notes.label(base.__name__, base.__module__, id(base))
            notes.absent(label, vars(base), kind.asked - vars(base).keys(), base.__mro__[1:])


SIMPLE = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device))
"""Types of values in which there is nothing to find."""


def is_telling(value: Any) -> bool:
    """Whether an attribute of a library's object is watched where code names it."""
    if issubclass(type(value), torch.Tensor) or is_plain(value):
        return True
    return is_callable_by_name(value) and not is_engines(value)
