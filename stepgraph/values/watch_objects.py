"""What code finds: the values of variables, objects, classes, and which of their attributes are looked at.

A function that is found is followed, which is for others to do (`watch_find`). An object, a dict, a list or a tuple is
looked into, one level; on objects, classes and Python modules the names are looked for that code has for them.
"""

from __future__ import annotations

import enum
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import torch

from stepgraph.ran import ExecutedCode
from stepgraph.values.watch_code import code_behind, is_callable_by_name, is_installed_class
from stepgraph.values.watch_contents import contents_of
from stepgraph.values.watch_followed import Followed
from stepgraph.values.watch_kinds import BOOKKEEPING, RUN_BY, Kind, Kinds, runs_when_called
from stepgraph.values.watch_names import Names
from stepgraph.values.watch_notes import Notes
from stepgraph.values.watch_parts import in_slot
from stepgraph.values.watch_source import Source, source_of
from stepgraph.values.watch_subject import SIMPLE, Subject, is_telling
from stepgraph.values.watch_telling import Label
from stepgraph.values.watch_values import MISSING, attributes_of, is_engines, is_users_module, slots_of


class Objects(ABC):
    """Looks at what is found, and notes what is to be watched of it."""

    def __init__(self, ignore: Collection[str], eager: Collection[int], ran: ExecutedCode) -> None:
        """`eager` are objects, by id, that run between graphs: what they do is done at each replay."""
        self._followed = Followed(ran)
        self.notes = Notes(ignore)
        self._eager = frozenset(eager)
        self.sources: list[Source] = []
        self._seen: dict[int, Any] = {}
        """Cells and containers, by id; kept, so that no other takes the id of one."""
        self._subjects: dict[Hashable, Subject] = {}
        self._kinds = Kinds(self._add_class_attribute)
        self._names = Names()
        self._doubtful = (self._names.in_all, self._names.in_modules)

    # -- code

    @abstractmethod
    def _call(self, value: Any) -> None:
        """Find what a callable of any kind can name."""

    @abstractmethod
    def _follow(self, value: Any) -> None:
        """Find what a function, or something around one, can name."""

    @abstractmethod
    def _run(self, attribute: Any, kind: Kind) -> None:
        """Follow what runs for an attribute of a class."""

    # -- values

    def _visit(self, label: Label, value: Any, names: set[str], *, is_handed_on: bool = True) -> None:
        """Look one level into what a variable stands for; `is_handed_on`: other code may have it, by another name."""
        kind = type(value)
        if kind in SIMPLE or self.notes.is_ignored(label):
            return
        if issubclass(kind, enum.Enum):
            self._add_code(kind, self._names.in_all, names)
            return
        self.notes.place(label, value)
        if issubclass(kind, type):
            self._add_class(value, names)
        elif issubclass(kind, types.ModuleType):
            if is_users_module(value):
                if not self._is_known(value, names):
                    self._subjects[id(value)] = Subject(label, value, None, vars(value), [names])
                    self._call(vars(value).get("__getattr__"))
                if is_handed_on:
                    self._subjects[id(value)].doubtful = self._doubtful
        elif kind in (weakref.ref, weakref.WeakMethod):
            self._visit(Label(f"{label.spelling}()", label.apart), value(), names)
        elif issubclass(kind, torch.Tensor):
            self._add_tensor(label, value, names)
        elif not self._touch(label, value):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                for inner, item in contents_of(label, value, self.notes):
                    self.notes.place(inner, item)
                    self._touch_inner(inner, item)
            if attributes_of(value) is not None or slots_of(kind):
                self._add_object(label, value, [self._names.in_all, names])
            else:
                self._add_code(kind, self._names.in_all, names)

    def _touch(self, label: Label, value: Any) -> bool:
        """Follow a value that is code, and note one that may be drawn from; whether there is no more to it."""
        if type(value) in SIMPLE:
            return True
        if is_callable_by_name(value):
            self._follow(value)
            return True
        if id(value) in self._seen or self.notes.is_ignored(label):
            return False
        source = source_of(str(label), value)
        if source is None:
            return False
        self.sources.append(source)
        self._seen[id(value)] = value
        return True

    def _touch_inner(self, label: Label, value: Any) -> None:
        """The same for a value that is not looked into: of an object the code of its class, and of a class its own."""
        if self._touch(label, value) or self.notes.is_ignored(label):
            return
        kind = value if issubclass(type(value), type) else type(value)
        if is_installed_class(kind):  # much code, and little about values of the user's
            return
        if kind is value:
            self._add_class(kind, self._names.in_all)
        elif not issubclass(kind, (torch.Tensor, torch.nn.Module)):
            self._add_code(kind, self._names.in_all)

    # -- objects and classes

    def _is_known(self, value: Any, names: set[str]) -> bool:
        """Whether a value is looked at already; if so, these names are looked for, too."""
        subject = self._subjects.get(id(value))
        if subject is None:
            return False
        if not any(names is other for other in subject.contexts):
            subject.contexts.append(names)
        return True

    def _add_class(self, value: type, names: set[str]) -> None:
        """Look for what is named of a class, and at what runs when it is called."""
        self._add_code(value, names)
        kind = self._kinds.of(value)
        for name in runs_when_called(value) if kind.is_users else ():
            if name not in kind.asked:
                self._add_class_attribute(kind, name)

    def _add_code(self, value: type, *contexts: set[str]) -> None:
        """Look for what is named of a class of the user, and of the class that it is of."""
        if not self._kinds.is_users(value) or [names for names in contexts if self._is_known(value, names)]:
            return
        label = self.notes.label(value.__name__, value.__module__, id(value))
        kind, meta = self._kinds.of(value), type(value)
        self._subjects[id(value)] = Subject(label, value, kind, {}, list(contexts), self._doubtful)
        if self._kinds.is_users(meta):
            by_class = self._kinds.of(meta)
            as_object = Subject(label, value, by_class, {}, list(contexts), self._doubtful)
            self._subjects[id(value), "as an object"] = as_object
            self._subjects[id(value)].contexts.append(by_class.names)

    def _add_tensor(self, label: Label, value: torch.Tensor, names: set[str]) -> None:
        """What hangs on a tensor (`p.scale = 2.0`) is watched where code names it."""
        if attributes_of(value):
            self._add_object(label, value, [self._names.in_all, names])

    def _add_object(self, label: Label, value: Any, contexts: list[set[str]], *, is_inner: bool = False) -> None:
        """`is_inner`: of the layers of torch's own inside a model there are hundreds, and their code is as it is."""
        if [names for names in contexts if self._is_known(value, names)]:
            return
        kind = self._kinds.of(type(value), is_eager=id(value) in self._eager)
        found = attributes_of(value)
        slots = slots_of(kind.type) if kind.is_users and not kind.is_module else {}
        attributes = found if found is not None else {}
        doubtful = self._doubtful if kind.is_users else ()
        subject = Subject(label, value, kind, attributes, contexts, doubtful, slots, is_self=kind.runs)
        self._subjects[id(value)] = subject
        subject.is_fixed = is_inner and not kind.is_users
        if not subject.is_fixed:
            self.notes.classes.add(label, value)

    def _look(self, subject: Subject) -> bool:
        """Look for the names that have come up since the last look; whether there were any."""
        names, own, kind, doubted = subject.names, subject.own, subject.kind, subject.doubted
        size = (len(names), len(own), len(doubted))
        if size == subject.size:
            return False
        subject.size = size
        names |= set(subject.callable_unspelled(self._names.anyones))
        if kind is not None and kind.is_users:
            names |= {RUN_BY[name] for name in subject.direct(self._names.anyones) & RUN_BY.keys()}
            names |= {name for name in doubted - kind.asked if self._followed.may_run(_code_of(kind, name))}
            for name in sorted(names - kind.asked):
                self._add_class_attribute(kind, name)
        places = (subject.attributes, subject.slots)
        names |= {n for n in doubted if any(n in p and self._followed.may_run(code_behind(p[n])) for p in places)}
        found: dict[str, Any] = {name: subject.attributes[name] for name in names & subject.attributes.keys()}
        found |= {n: in_slot(subject.value, subject.slots[n], MISSING) for n in names & subject.slots.keys()}
        for name in sorted(found.keys() - BOOKKEEPING if kind is not None and kind.is_module else found):
            value, label = found[name], subject.label.attribute(name)
            if kind is None or ((kind.is_eager or not kind.is_users) and is_telling(value)):
                self.notes.put(subject.attributes, name, label, value)
                self.notes.place(label, value)
            if name in subject.looked_into:
                continue
            if kind is None or ((subject.is_self or kind.is_users) and name in own):
                subject.looked_into.add(name)
                self._visit(label, value, own if kind is not None else names)
            elif name not in subject.looked_at:
                self._touch_inner(label, value)
            subject.looked_at.add(name)
        return True

    def _add_class_attribute(self, kind: Kind, name: str) -> None:
        """Watch what a name stands for on a class, and follow it where it is code, also where a base has its own."""
        kind.asked.add(name)
        for base in kind.type.__mro__:
            if name not in vars(base):
                continue
            value, users = vars(base)[name], self._kinds.is_users(base)
            label = self.notes.label(base.__name__, base.__module__, id(base)).attribute(name)
            if users or name == "forward":
                self.notes.put(vars(base), name, label, value)
            if not code_behind(value):
                if users and not is_engines(value):
                    self._visit(label, value, kind.names)
                return
            if not users:
                return
            self._run(value, kind)

    def _add_children(self) -> bool:
        """Look at what is in modules that are not called themselves (`net.encoder.encode(x)`); whether any is new."""
        inside = [(s.label.attribute(key), m) for s in self._subjects.values() for key, m in _inside(s)]
        new = [(label, module) for label, module in inside if module is not None and id(module) not in self._subjects]
        for label, module in new:
            self._add_object(label, module, [], is_inner=True)
        return bool(new)


def _code_of(kind: Kind, name: str) -> list[Any]:
    """The functions that a name stands for on a class and on those that it is derived from."""
    found = (vars(base)[name] for base in kind.type.__mro__ if name in vars(base))
    return [function for value in found for function in code_behind(value)]


def _inside(subject: Subject) -> Iterable[tuple[str, Any]]:
    """What is in a module, by name."""
    found = subject.attributes.get("_modules") if subject.kind is not None and subject.kind.is_module else None
    return found.items() if found else ()
