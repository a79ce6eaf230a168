"""Finding what a step's code can name, from its function on.

Looks where Python looks: the cells of closures, the globals that the code names, defaults, the bound object. A function
that is found there is followed; an object, a dict, a list or a tuple is looked into, one level. What the code of a
method names is looked for on its object, and one level into that; what is not there is noted as absent. Which names
count for which object: for `self`, those in its own methods and in plain functions, which may be handed it; for other
objects, those in all code that is followed; for classes and Python modules, those in the functions that name them.
An attribute that no code at all names (`self.global_step`, counted in the loop) is nobody's business, unless there is
code that asks for attributes without spelling them (`getattr(x, name)`, `vars`).
"""

from __future__ import annotations

import builtins
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch

from stepgraph.ran import Ran
from stepgraph.state.watch_behind import (
    cached_by,
    holds_cached,
    implementations_of,
    is_getter,
    names_of_getter,
)
from stepgraph.state.watch_code import (
    aliases_in,
    attributes_in,
    code_behind,
    globals_in,
    imported,
    imports_in,
    is_callable_by_name,
    is_installed,
    is_installed_class,
    layers_of,
    may_name_all,
    may_name_anything,
)
from stepgraph.state.watch_contents import contents_of
from stepgraph.state.watch_followed import Followed
from stepgraph.state.watch_kinds import BOOKKEEPING, RUN_BY, Kind, Kinds, runs_when_called
from stepgraph.state.watch_notes import Notes
from stepgraph.state.watch_parts import Cell, Defaults, Reading, in_cell, in_slot
from stepgraph.state.watch_source import Source, is_iterator, source_of
from stepgraph.state.watch_subject import SIMPLE, Subject, is_telling, note_absent, note_attributes, note_whole
from stepgraph.state.watch_telling import Label
from stepgraph.state.watch_values import MISSING, attributes_of, is_engines, is_users_module, slots_of


class Finder:
    """Looks through what a step can name, and has noted what is to be watched."""

    def __init__(self, ignore: Collection[str], eager: Collection[int], ran: Ran) -> None:
        """`eager` are objects, by id, that run between graphs: what they do is done at each replay."""
        self._followed = Followed(ran)
        self.notes = Notes(ignore)
        self._eager = frozenset(eager)
        self.sources: list[Source] = []
        self._seen: dict[int, Any] = {}
        """Cells and containers, by id; kept, so that no other takes the id of one."""
        self._functions: dict[int, tuple[types.FunctionType, set[str]]] = {}
        self._todo: deque[types.FunctionType] = deque()
        self._subjects: dict[Hashable, Subject] = {}
        self._kinds = Kinds(self._add_class_attribute)
        self._in_functions: set[str] = set()
        self._in_all: set[str] = set()
        """Names in all code but that of modules, which mostly name their own."""
        self._anyones = (id(self._in_all), id(self._in_functions))
        self._elsewhere: set[int] = set()
        """Names, by the id of their set, in code that runs where nobody looks on."""
        self._anywhere: set[str] = set()
        """Names in all code that is followed, that of libraries included."""

    def find(self, function: Any, modules: Mapping[str, torch.nn.Module]) -> None:
        """Look through a callable and the modules that it is known to call."""
        self._followed.see(*modules.values())
        self._call(function)
        self._settle()
        for path, module in modules.items():
            if id(module) not in self._subjects:
                self._add_object(Label(path), module, [], is_inner="." in path)
            for name, tensor in module.named_parameters(recurse=False):
                self._add_tensor(Label(path).attribute(name), tensor, self._kinds.of(type(module)).names)
        self._settle()
        for subject in self._subjects.values():
            if (kind := subject.kind) is not None:
                may_be_any = not kind.is_users or may_name_anything(self._in_all | self._in_functions | kind.names)
                note_attributes(subject, kind, self.notes, None if may_be_any else self._anywhere)
                if kind.is_users and not kind.is_module and may_name_all(subject.direct(self._anyones)):
                    note_whole(subject, self.notes)
        note_absent(self._subjects.values(), self._kinds, self.notes)

    def _settle(self) -> None:
        """Go on until no new names come up."""
        grown = True
        while grown or self._todo:
            grown = False
            while self._todo:
                function = self._todo.popleft()
                with self._followed.reached_from(function):
                    self._scan(function)
            for subject in list(self._subjects.values()):
                contexts = {id(subject.own), *map(id, subject.contexts)}
                with self._followed.elsewhere(not contexts.isdisjoint(self._elsewhere)):
                    grown = self._look(subject) or grown

    # -- functions

    def _call(self, value: Any) -> None:
        """Find what a callable of any kind can name; the modules that run are known."""
        if is_callable_by_name(value):
            self._follow(value)
        elif self._kinds.is_users(type(value)) and not issubclass(type(value), torch.nn.Module):
            self._visit(self.notes.label("self", type(value).__name__, id(value)), value, self._in_functions)

    def _follow(self, value: Any) -> None:
        """Find what a callable can name."""
        for layer in layers_of(value):
            if issubclass(type(layer), functools.partial):
                self._add_partial(layer)
            elif type(layer) is types.MethodType:
                self._add_method(layer)
            else:
                self._read(layer, self._in_functions, self._in_all)
                self._add_cached(layer)

    def _add_partial(self, partial: functools.partial[Any]) -> None:
        arguments = partial.keywords
        self._call(partial.func)
        for key, value in arguments.items():
            self.notes.put(arguments, key, Label("partial argument").item(key), value)
            with self._followed.elsewhere(is_callable_by_name(value)):  # a hook, maybe, that runs in a backward
                self._visit(Label(key), value, self._in_all)
        for index, value in enumerate(partial.args):
            self._visit(Label(f"argument {index}"), value, self._in_all)

    def _add_cached(self, function: Any) -> None:
        """Look into what a function returns from a cache: settings that are made once, say."""
        made = cached_by(function)
        results = [v for v in made if type(v) in (dict, list) or self._kinds.is_users(type(v))]
        if results and not any(is_installed(v.__code__) for v in layers_of(function) if type(v) is types.FunctionType):
            label = Label(f"{function.__name__}()")
            for result in results:
                self._visit(self.notes.label(label.spelling, type(result).__name__, id(result)), result, self._in_all)
            still = functools.partial(holds_cached, function, frozenset(map(id, results)))
            part = Reading(str(label), still, lambda: "as captured" if still() else "another object")
            self.notes.add(str(label), part)

    def _add_method(self, method: types.MethodType) -> None:
        owner: Any = method.__self__
        if issubclass(type(owner), type):
            self._add_class(owner, set())
            kind = self._kinds.of(owner)
        else:
            label = self.notes.label("self", type(owner).__name__, id(owner))
            self._add_object(label, owner, [self._in_functions])
            self._subjects[id(owner)].is_self = True
            kind = self._kinds.of(type(owner))
        self._run(method.__func__, kind)

    def _run(self, attribute: Any, kind: Kind) -> None:
        """Follow what runs for an attribute of a class."""
        with self._followed.elsewhere(issubclass(kind.type, torch.autograd.Function)):
            for function in code_behind(attribute):
                self._read(function, kind.names, *(() if kind.is_module else (self._in_all,)))

    def _read(self, function: Any, *into: set[str]) -> None:
        """Note the names in a function and in those that it is wrapped around, and look at its variables later."""
        is_cached = any(type(layer) is functools._lru_cache_wrapper for layer in layers_of(function))
        for layer in layers_of(function):
            if type(layer) is types.MethodType or issubclass(type(layer), functools.partial):
                self._follow(layer)
            elif is_getter(layer):
                self._gather(names_of_getter(layer), into)
            elif type(layer) is types.FunctionType:
                for implementation in implementations_of(layer):
                    if implementation is not vars(layer).get("__wrapped__"):
                        self._read(implementation, *into)
                _, names = self._functions.get(id(layer), (None, None))
                if names is None:
                    if not self._followed.admits(layer, is_cached):
                        continue
                    names = attributes_in(layer) | aliases_in(layer)
                    self._functions[id(layer)] = (layer, names)
                    self._todo.append(layer)
                if self._followed.is_elsewhere(layer):
                    self._elsewhere |= {id(names), *map(id, into)}.difference(self._anyones)
                self._gather(names, into, is_installed=is_installed(layer.__code__))

    def _gather(self, names: set[str], into: Collection[set[str]], *, is_installed: bool = False) -> None:
        self._anywhere |= names
        for gathered in into:
            is_anyones = gathered is self._in_all or gathered is self._in_functions
            if not is_anyones or not is_installed:  # a library names little of the user's
                gathered |= names

    def _scan(self, function: types.FunctionType) -> None:
        """Watch a function's variables."""
        _, names = self._functions[id(function)]
        code, called, scope, notes = function.__code__, function.__name__, function.__globals__, self.notes
        notes.bodies.add(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                label = notes.label(name, called, _owner(in_cell(cell), id(cell)))
                notes.add(str(label), Cell(str(label), cell))
                self._visit(label, in_cell(cell), names)
        wanted = {name for name in globals_in(code) if name.isidentifier()}  # pytest adds some that are not
        for name in sorted(wanted & scope.keys()):
            label = notes.label(name, called, _owner(scope[name], (id(scope), name)))
            notes.put(scope, name, label, scope[name])
            if not (is_installed(code) and is_iterator(scope[name])):
                self._visit(label, scope[name], names)
        for name in sorted(imports_in(code)):
            module = imported(name, scope)
            self._visit(notes.label(name.lstrip("."), called, id(module)), module, names)
        notes.absent(Label(str(scope.get("__name__"))), scope, wanted.difference(scope, vars(builtins)))
        own = vars(function)
        for name in sorted((names & own.keys()) - {"__wrapped__"}):
            notes.put(own, name, Label(called).attribute(name), own[name])
        if function.__defaults__ or function.__kwdefaults__:
            self._add_defaults(function, names)

    def _add_defaults(self, function: types.FunctionType, names: set[str]) -> None:
        part = Defaults(function)
        for parameter, value in part.values.items():
            label = self.notes.label(parameter, function.__name__, (id(function), parameter))
            if not self.notes.is_ignored(label):
                part.names[parameter] = str(label)
            self._visit(label, value, names)
        self.notes.parts.append(part)

    # -- values

    def _visit(self, label: Label, value: Any, names: set[str]) -> None:
        """Look one level into what a variable stands for."""
        kind = type(value)
        if kind in SIMPLE or self.notes.is_ignored(label):
            return
        if issubclass(kind, enum.Enum):
            self._add_code(kind, self._in_all, names)
            return
        self.notes.place(label, value)
        if issubclass(kind, type):
            self._add_class(value, names)
        elif issubclass(kind, types.ModuleType):
            if is_users_module(value) and not self._is_known(value, names):
                self._subjects[id(value)] = Subject(label, value, None, vars(value), [names])
                self._call(vars(value).get("__getattr__"))
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
                self._add_object(label, value, [self._in_all, names])
            else:
                self._add_code(kind, self._in_all, names)

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
            self._add_class(kind, self._in_all)
        elif not issubclass(kind, (torch.Tensor, torch.nn.Module)):
            self._add_code(kind, self._in_all)

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
        self._subjects[id(value)] = Subject(label, value, kind, {}, list(contexts))
        if self._kinds.is_users(meta):
            by_class = self._kinds.of(meta)
            self._subjects[id(value), "as an object"] = Subject(label, value, by_class, {}, list(contexts))
            self._subjects[id(value)].contexts.append(by_class.names)

    def _add_tensor(self, label: Label, value: torch.Tensor, names: set[str]) -> None:
        """What hangs on a tensor (`p.scale = 2.0`) is watched where code names it."""
        if attributes_of(value):
            self._add_object(label, value, [self._in_all, names])

    def _add_object(self, label: Label, value: Any, contexts: list[set[str]], *, is_inner: bool = False) -> None:
        """`is_inner`: of the layers of torch's own inside a model there are hundreds, and their code is as it is."""
        if [names for names in contexts if self._is_known(value, names)]:
            return
        kind = self._kinds.of(type(value), is_eager=id(value) in self._eager)
        found = attributes_of(value)
        slots = slots_of(kind.type) if kind.is_users and not kind.is_module else {}
        attributes = found if found is not None else {}
        subject = Subject(label, value, kind, attributes, contexts, slots, is_self=kind.runs)
        self._subjects[id(value)] = subject
        subject.is_fixed = is_inner and not kind.is_users
        if not subject.is_fixed:
            self.notes.classes.add(label, value)

    def _look(self, subject: Subject) -> bool:
        """Look for the names that have come up since the last look; whether there were any."""
        names, own, kind = subject.names, subject.own, subject.kind
        if (len(names), len(own)) == subject.size:
            return False
        subject.size = (len(names), len(own))
        names |= set(subject.callable_unspelled(self._anyones))
        if kind is not None and kind.is_users:
            names |= {RUN_BY[name] for name in subject.direct(self._anyones) & RUN_BY.keys()}
            for name in sorted(names - kind.asked):
                self._add_class_attribute(kind, name)
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


def _owner(value: Any, place: Any) -> Any:
    """Whose a variable's label is: that of its place, but for a class, which is called so by itself."""
    return id(value) if issubclass(type(value), type) else place
