"""Finding what a step's code can name, from its function on.

Looks where Python looks: the cells of closures, the globals that the code names, defaults, the bound object. A function
that is found there is followed; an object, a dict, a list or a tuple is looked into, one level. What the code of a
method names is looked for on its object, and one level into that; what is not there is noted as absent. Which names
count for which object: for `self`, those in its own methods and in plain functions, which may be handed it; for other
objects, those in all code that is followed; for classes and Python modules, those in the functions that name them; and
for all of these, with some doubt, those in code that may have been handed them (`watch_names`). What hangs on functions
is looked for in the same way.
An attribute that no code at all names (`self.global_step`, counted in the loop) is nobody's business, unless there is
code that asks for attributes without spelling them (`getattr(x, name)`, `vars`).
"""

from __future__ import annotations

import builtins
import functools
import types
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch

from stepgraph.ran import ExecutedCode
from stepgraph.values.watch_bases import Bases, is_handed_on
from stepgraph.values.watch_behind import (
    cached_by,
    holds_cached,
    implementations_of,
    is_getter,
    names_of_getter,
)
from stepgraph.values.watch_code import (
    aliases_in,
    attributes_in,
    code_behind,
    globals_in,
    imported,
    imports_in,
    is_callable_by_name,
    is_installed,
    layers_of,
    may_name_all,
    may_name_anything,
)
from stepgraph.values.watch_kinds import Kind
from stepgraph.values.watch_objects import Objects
from stepgraph.values.watch_parts import Cell, Defaults, Reading, in_cell
from stepgraph.values.watch_source import is_iterator
from stepgraph.values.watch_subject import Subject, note_absent, note_attributes, note_whole
from stepgraph.values.watch_telling import Label
from stepgraph.values.watch_values import attributes_of


class Finder(Objects):
    """Looks through what a step can name, and has noted what is to be watched."""

    def __init__(self, ignore: Collection[str], eager: Collection[int], ran: ExecutedCode) -> None:
        super().__init__(ignore, eager, ran)
        self._functions: dict[int, tuple[types.FunctionType, set[str]]] = {}
        self._todo: deque[types.FunctionType] = deque()

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
        while self._add_children():
            self._settle()
        bases = Bases(self._functions.values(), self._subjects.values(), self._names.unread)
        for subject in self._subjects.values():
            if (kind := subject.kind) is not None:
                named = self._names.in_all | self._names.in_functions | kind.names
                may_be_any = not kind.is_users or may_name_anything(named)
                note_attributes(
                    subject, kind, self.notes, None if may_be_any else self._names.anywhere, bases.may_be_of
                )
                if kind.is_users and not kind.is_module and may_name_all(subject.direct(self._names.anyones)):
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
                with self._followed.elsewhere(self._names.is_elsewhere(subject.own, *subject.contexts)):
                    grown = self._look(subject) or grown

    # -- functions

    def _call(self, value: Any) -> None:
        """Find what a callable of any kind can name; the modules that run are known."""
        if is_callable_by_name(value):
            self._follow(value)
        elif self._kinds.is_users(type(value)) and not issubclass(type(value), torch.nn.Module):
            self._visit(self.notes.label("self", type(value).__name__, id(value)), value, self._names.in_functions)

    def _follow(self, value: Any) -> None:
        """Find what a callable can name."""
        for layer in layers_of(value):
            if issubclass(type(layer), functools.partial):
                self._add_attributes(layer)
                self._add_partial(layer)
            elif type(layer) is types.MethodType:
                self._add_method(layer)
            else:
                self._read(layer, self._names.in_functions, self._names.in_all)
                self._add_cached(layer)

    def _add_partial(self, partial: functools.partial[Any]) -> None:
        arguments = partial.keywords
        self._call(partial.func)
        for key, value in arguments.items():
            self.notes.put(arguments, key, Label("partial argument").item(key), value)
            with self._followed.elsewhere(is_callable_by_name(value)):  # a hook, maybe, that runs in a backward
                self._visit(Label(key), value, self._names.in_all)
        for index, value in enumerate(partial.args):
            self._visit(Label(f"argument {index}"), value, self._names.in_all)

    def _add_cached(self, function: Any) -> None:
        """Look into what a function returns from a cache: settings that are made once, say."""
        made = cached_by(function)
        results = [v for v in made if type(v) in (dict, list) or self._kinds.is_users(type(v))]
        if results and not any(is_installed(v.__code__) for v in layers_of(function) if type(v) is types.FunctionType):
            label = Label(f"{function.__name__}()")
            for result in results:
                self._visit(
                    self.notes.label(label.spelling, type(result).__name__, id(result)), result, self._names.in_all
                )
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
            self._add_object(label, owner, [self._names.in_functions])
            self._subjects[id(owner)].is_self = True
            kind = self._kinds.of(type(owner))
        self._run(method.__func__, kind)

    def _run(self, attribute: Any, kind: Kind) -> None:
        """Follow what runs for an attribute of a class."""
        with self._followed.elsewhere(issubclass(kind.type, torch.autograd.Function)):
            for function in code_behind(attribute):
                self._read(function, kind.names, self._names.in_modules if kind.is_module else self._names.in_all)

    def _read(self, function: Any, *into: set[str]) -> None:
        """Note the names in a function and in those that it is wrapped around, and look at its variables later."""
        is_cached = any(type(layer) is functools._lru_cache_wrapper for layer in layers_of(function))
        for layer in layers_of(function):
            if type(layer) is types.MethodType or issubclass(type(layer), functools.partial):
                self._follow(layer)
                continue
            self._add_attributes(layer)
            if is_getter(layer):
                self._names.unread |= names_of_getter(layer)
                self._names.gather(names_of_getter(layer), into)
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
                    self._names.mark_elsewhere(names, *into)
                self._names.gather(names, into, is_installed=is_installed(layer.__code__))

    def _scan(self, function: types.FunctionType) -> None:
        """Watch a function's variables."""
        _, names = self._functions[id(function)]
        code, called, scope, notes = function.__code__, function.__name__, function.__globals__, self.notes
        notes.bodies.add(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            label = notes.label(name, called, _owner(in_cell(cell), id(cell)))
            is_new = name != "__class__" and id(cell) not in self._seen
            if is_new:
                self._seen[id(cell)] = cell
                notes.add(str(label), Cell(str(label), cell))
            if is_new or issubclass(type(in_cell(cell)), types.ModuleType):
                self._visit_variable(label, in_cell(cell), function, name)
        wanted = {name for name in globals_in(code) if name.isidentifier()}  # pytest adds some that are not
        for name in sorted(wanted & scope.keys()):
            label = notes.label(name, called, _owner(scope[name], (id(scope), name)))
            notes.put(scope, name, label, scope[name])
            if not (is_installed(code) and is_iterator(scope[name])):
                self._visit_variable(label, scope[name], function, name)
        for name in sorted(imports_in(code)):
            module = imported(name, scope)
            self._visit(notes.label(name.lstrip("."), called, id(module)), module, names, is_handed_on=False)
        notes.absent(Label(str(scope.get("__name__"))), scope, wanted.difference(scope, vars(builtins)))
        for value in (*map(in_cell, function.__closure__ or ()), *(scope[name] for name in wanted & scope.keys())):
            if is_callable_by_name(value) and any(layer is function for layer in layers_of(value)):
                self._add_attributes(value, is_expected=True)
        if function.__defaults__ or function.__kwdefaults__:
            self._add_defaults(function, names)

    def _visit_variable(self, label: Label, value: Any, function: types.FunctionType, name: str) -> None:
        """Look into what a variable of a function stands for."""
        _, names = self._functions[id(function)]
        is_python = issubclass(type(value), types.ModuleType)
        self._visit(label, value, names, is_handed_on=not is_python or is_handed_on(function.__code__, name))

    def _add_attributes(self, function: Any, *, is_expected: bool = False) -> None:
        """Look for what hangs on a function, or on what is around one; `is_expected`: it may come to have something."""
        own = attributes_of(function)
        is_there = is_expected or any(not key.startswith("__") for key in own or ())
        if own is not None and is_there and id(function) not in self._subjects:
            plain = type(function) is types.FunctionType
            label = Label(function.__name__ if plain else str(own.get("__name__", type(function).__name__)))
            _, names = self._functions.get(id(function), (None, set()))
            subject = Subject(label, function, None, own, [self._names.in_all, names], (self._names.in_modules,))
            self._subjects[id(function)] = subject

    def _add_defaults(self, function: types.FunctionType, names: set[str]) -> None:
        part = Defaults(function)
        for parameter, value in part.values.items():
            label = self.notes.label(parameter, function.__name__, (id(function), parameter))
            if not self.notes.is_ignored(label):
                part.names[parameter] = str(label)
            self._visit(label, value, names)
        self.notes.parts.append(part)


def _owner(value: Any, place: Any) -> Any:
    """Whose a variable's label is: that of its place, but for a class, which is called so by itself."""
    return id(value) if issubclass(type(value), type) else place
