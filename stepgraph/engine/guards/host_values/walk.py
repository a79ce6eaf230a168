"""One breadth-first walk over everything that a step can name, to any depth.

It starts from the names that Python resolves: closure cells, defaults, the globals that code names, the bound object.
From there it follows attributes, slots, items, classes and functions. One filter keeps it small: an attribute counts if
its name occurs in code that ran, a function if it ran. If that is not known (before the first call, or for compiled
code), all functions of the user count, with the names in them. The walk enters each object once, and at most
`MAX_OBJECTS` of them, so it is linear. It runs no user code. A visitor decides what to do with each find.

Code that is not the user's reads values, too: an object hands out what it holds when it is called, indexed or iterated
over. Of an object of the standard library those attributes count which a method of its own class names, if that method
ran (`UserDict.__getitem__` names `data`). Code in C has no names: what an object of C holds is what it refers to, which
the garbage collector knows. Other objects of the standard library (a logger, a lock) are not searched.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import operator
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any, Protocol

import torch

from stepgraph.core.executed_code import MAKING, ExecutedCode, Running, functions_behind, globals_in
from stepgraph.core.frames import (
    is_engines,
    is_installed,
    is_installed_module,
    is_own,
    is_standard,
    is_users,
    is_users_code,
)
from stepgraph.core.frames import is_users_module as is_users_name
from stepgraph.core.plain_values import attributes_of, cached_by, is_plain, items_of
from stepgraph.engine.guards.host_values.naming import Label, Labels
from stepgraph.engine.guards.host_values.parts import (
    Place,
    attribute_of,
    by_identity,
    default_of,
    defaults_of,
    in_slot,
    result_of,
)

MAX_OBJECTS = 20_000
MAX_ITEMS = 4096
"""A container with more items is taken for data: only its first items are looked at."""
_FIRST = 64
_SIMPLE = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))
_BOOKKEEPING = frozenset((*vars(torch.nn.Module()), "_compiled_call_impl", "_is_full_backward_hook"))
"""Attributes of every module, kept by torch; other guards compare them."""
_OPTIMIZERS = frozenset(("param_groups", "state", "defaults"))
"""Attributes of optimizers; other guards compare them."""
_SKIPPED = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__init_subclass__", "__class_getitem__"))
_READING = ("forward", "__call__", "__getattr__", "__getitem__")
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)
"""Modules of torch whose attributes are the user's."""
_LAYERS = ("torch.nn.modules.", "torch.nn.utils.")
"""Python modules with classes whose own code reads attributes of the user's objects."""
_CONTAINERS = (list, tuple, deque, set, frozenset)
_HANDING_OUT = ("__call__", "__getitem__", "__iter__")
"""Methods by which an object hands out what it holds."""
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_CODE = (types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper)
_LOOKS: tuple[tuple[Any, str], ...] = (
    (types.FunctionType, "_function"),
    (types.MethodType, "_method"),
    (functools.partial, "_partial"),
    (functools._lru_cache_wrapper, "_cache"),
    ((operator.attrgetter, operator.methodcaller), "_getter"),
    ((property, staticmethod, classmethod, functools.cached_property), "_descriptor"),
    ((functools.partialmethod, functools.singledispatchmethod), "_descriptor"),
    (type, "_class"),
    (types.ModuleType, "_python_module"),
    (dict, "_dict"),
    (_CONTAINERS, "_items"),
    (weakref.ref, "_reference"),
    (contextvars.ContextVar, "_context"),
    (torch.Tensor, "_tensor"),
)
"""The method of the walk that looks into objects of a class, if they have more than attributes."""
Wants = Callable[[Any], bool]


class Visitor(Protocol):
    """Receives what a walk finds."""

    def put(self, place: Place) -> bool:
        """Take a value found at a place. Return whether to look into it."""

    def enter(self, label: Label, value: Any, owner: Any, is_users: bool, wants: Wants | None) -> None:
        """Take an object that the walk enters, once for each object. `owner` holds it.

        `wants` checks whether a name on it counts. It is None for objects of torch and Python, which get no new names.
        """

    def miss(self, label: Label, where: Mapping[Any, Any], wants: Wants) -> None:
        """Take a dict in which code looks for names that it does not have."""

    def takes(self, value: Any) -> bool:
        """Check whether an attribute counts because of its value, whatever its name."""


class Kind:
    """Facts about a class: how to look into its objects, and which of their attributes count."""

    __slots__ = (
        *("holds", "is_layer", "is_list", "is_module", "is_open", "is_own", "is_users"),
        *("look", "read", "skipped", "slots"),
    )

    def __init__(self, kind: type, running: Running) -> None:
        self.look = next((look for base, look in _LOOKS if issubclass(kind, base)), None)
        handing = [body[name] for name in _HANDING_OUT for body in map(vars, kind.__mro__) if name in body]
        is_iterator = any("__next__" in vars(base) for base in kind.__mro__)  # it hands out what is drawn, once
        self.holds = self.look is None and not is_iterator and any(type(method) in _IN_C for method in handing)
        """True if code in C hands out what its objects hold."""
        self.read = running.names_in(filter(is_standard, kind.__mro__)) if handing else frozenset()
        """Names in those methods of the standard library that count."""
        self.is_users, self.is_own = is_users(kind), is_own(kind)
        self.is_module, self.is_list = issubclass(kind, torch.nn.Module), issubclass(kind, _LISTS)
        users = [vars(base) for base in kind.__mro__ if is_users_name(str(base.__module__))]
        self.is_open = not self.is_module and any("__getattr__" in body for body in users)
        """True if its attributes may be in a dict that it holds."""
        others = [base for base in kind.__mro__ if base is not torch.nn.Module]
        self.is_layer = any(str(base.__module__).startswith(_LAYERS) for base in others)
        self.skipped = (
            _BOOKKEEPING if self.is_module else _OPTIMIZERS if issubclass(kind, torch.optim.Optimizer) else ()
        )
        members = (entry for body in reversed(users) for entry in body.items())
        self.slots = {name: member for name, member in members if type(member) is types.MemberDescriptorType}


class Walk:
    """Walks over everything that a step can name, and passes it to a visitor."""

    def __init__(self, visitor: Visitor, ran: ExecutedCode | None = None, live: Collection[int] = ()) -> None:
        """`live` are the ids of optimizers that run at each replay."""
        self._visitor, self._live = visitor, frozenset(live)
        self._running = Running(ran)
        self.names = self._running.names
        self._labels = Labels()
        self._queue: deque[tuple[Label, Any, Any, bool]] = deque()
        self._seen: dict[Any, Any] = {id(os.environ): os.environ}
        """Objects that were entered, by id. The environment has places of its own."""
        self._kinds: dict[type, Kind] = {}
        self._paths: dict[int, Label] = {}
        self._inner: set[int] = set()
        """Ids of modules inside others. Hundreds of them are torch's own layers, which get no new names."""
        self._waiting: dict[str, list[tuple[Kind | None, Label, Place]]] = {}
        self._missed: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._resting: list[tuple[Label, types.FunctionType, bool]] = []
        """Functions that do not count yet."""
        self.is_compiled = self.is_cut_short = False

    def go(self, function: Any, modules: Mapping[str, torch.nn.Module]) -> None:
        """Walk from a callable, and from the modules, by path, that it is known to call."""
        self._paths = {id(module): Label(path) for path, module in modules.items()}
        self._inner.update(id(module) for path, module in modules.items() if "." in path)
        self._running.admit(function)
        self._add(Label(""), function, True)
        self._run()
        for path, module in modules.items():
            self._add(Label(path), module, True)
        self._run()
        for kernel in self._running.kernels():
            self._add(Label(""), kernel, True)
        self._run()
        for scope, names in self._missed.values():
            self._visitor.miss(Label(str(scope.get("__name__"))), scope, names.__contains__)

    def _run(self) -> None:
        while self._queue and not self.is_cut_short:
            label, value, owner, users = self._queue.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self.is_cut_short = len(self._seen) >= MAX_OBJECTS
                (self._eager if id(value) in self._live else self._enter)(label, value, owner, users)
            if not self._queue:
                resting, self._resting = self._resting, []
                for entry in resting:
                    self._body(*entry)

    def _enter(self, label: Label, value: Any, owner: Any, users: bool) -> None:
        if is_engines(value) and not issubclass(type(value), dict):  # such a dict replaces one of the user
            self._add(label, (attributes_of(value) or {}).get("__wrapped__"), users)
            self._marks(label, value, users)
            return
        facts = named = self._kind(type(value))
        if issubclass(type(value), type):
            named, label = self._kind(value), self._labels.new(value.__name__, value.__module__, id(value))
        elif facts.look is None and not label.spelling:
            label = self._labels.new("self", type(value).__name__, id(value))
        is_open = named.is_users or (named.is_module and id(value) not in self._inner)
        wants = functools.partial(_wants, self._running, named) if is_open else None
        self._visitor.enter(label, value, owner, users, wants)
        if facts.look is not None:
            getattr(self, facts.look)(label, value, users)
        if facts.holds:
            self._referents(label, value, users)
        if facts.look is None or facts.is_users:
            self._object(label, value, facts, users)

    def _eager(self, label: Label, optimizer: Any, owner: Any, users: bool) -> None:
        """Take those numbers of an optimizer that runs at each replay which code other than its own step reads."""
        named = self._running.names_beside(type(optimizer), "step") if is_users(type(optimizer)) else ()
        own = attributes_of(optimizer) or {}
        for name in sorted(own.keys() & named - _OPTIMIZERS) if named else ():
            self._take(Place(label.attribute(name), own, name, own[name], users))

    def _kind(self, kind: type) -> Kind:
        if kind not in self._kinds:
            self._kinds[kind] = Kind(kind, self._running)
        return self._kinds[kind]

    # -- which names count

    def _offer(self, kind: Kind | None, label: Label, place: Place, name: str) -> None:
        """Take an attribute now if its name counts, or later once it does."""
        if _wants(self._running, kind, name):
            place.label = label.attribute(name)
            self._take(place, is_open=kind is not None and kind.is_open and name.startswith("_"))
        elif self._visitor.takes(place.value):
            self._add(label.attribute(name), place.value, place.is_users, place.where)
        else:
            self._waiting.setdefault(name, []).append((kind, label, place))

    def _take(self, place: Place, *, is_open: bool = False) -> None:
        spot = (id(place.where), place.key) if type(place.key) is str else None  # a global is also an attribute
        if spot is not None and self._seen.setdefault(spot, place) is not place:
            return
        if self._visitor.put(place):
            label = place.label
            if is_open and issubclass(type(place.value), dict):
                label = Label(label.spelling.rpartition(".")[0], label.apart, is_open=True)
            self._add(label, place.value, place.is_users, place.where)

    def _add(self, label: Label, value: Any, users: bool, owner: Any = None) -> None:
        is_listed = not users and issubclass(type(value), type) and issubclass(type(owner), (dict, *_CONTAINERS))
        if type(value) not in _SIMPLE and not is_listed:  # classes in a library's table are not followed
            self._queue.append((label, value, owner, users))

    def _name(self, code: types.CodeType) -> None:
        """Let the names in some code count."""
        names = self.names
        had_dynamic_names = names.uses_dynamic_names
        new = names.add(code)
        any_name = names.uses_dynamic_names and not had_dynamic_names
        for name in list(self._waiting) if any_name else new & self._waiting.keys():
            for kind, label, place in self._waiting.pop(name):
                self._offer(kind, label, place, name)

    # -- code

    def _function(self, label: Label, function: types.FunctionType, users: bool) -> None:
        code, marks = function.__code__, vars(function)
        if "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable"):
            self.is_compiled = self.is_compiled or users or self._running.has(code)
        self._add(label, marks.get("__wrapped__"), users)
        self._marks(Label(function.__name__), function, users)
        if is_users_code(code):
            self._body(label, function, users)
            return
        for cell in function.__closure__ or ():  # of torch's and Python's functions: only what they wrap
            if issubclass(type(held := attribute_of(cell, "cell_contents")), (*_CODE, dict)):
                self._add(label, held, users)

    def _body(self, label: Label, function: types.FunctionType, users: bool) -> None:
        """Take the variables of a function, if it counts now."""
        code, called, scope = function.__code__, function.__name__, function.__globals__
        is_made = code.co_filename.startswith("<")
        own = not is_installed(str(scope.get("__file__")) if is_made else code.co_filename)
        if not self._running.counts(function, own or users):
            self._resting.append((label, function, users))
            return
        if not self._running.has(code):
            self._name(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                held = attribute_of(cell, "cell_contents")
                spelled = self._labels.new(name, called, _owner(held, id(cell)))
                self._visitor.enter(spelled, cell, None, own, None)
                self._take(Place(spelled, cell, "cell_contents", held, own, attribute_of))
        self._globals(code, scope, called, own)
        if own:
            body = Label(f"{function.__qualname__}.__code__")
            self._visitor.put(Place(body, function, "__code__", code, own, attribute_of))
            for name, value in defaults_of(function).items():
                spelled = self._labels.new(name, called, (id(function), name))
                self._take(Place(spelled, function, name, value, own, default_of))
            self._visitor.miss(Label(called), vars(function), functools.partial(_wants, self._running, None))

    def _marks(self, label: Label, function: Any, users: bool) -> None:
        """Offer the attributes of a function, or of an object around one."""
        own = attributes_of(function) or {}
        for name, value in list(own.items()):
            if not name.startswith("_"):
                self._offer(None, label, Place(label, own, name, value, users), name)

    def _globals(self, code: types.CodeType, scope: dict[str, Any], called: str, own: bool) -> None:
        named = globals_in(code)
        for name in sorted(named & scope.keys()):
            value = scope[name]
            label = self._labels.new(name, called, _owner(value, (id(scope), name)))
            if own or _is_small(value):
                self._take(Place(label, scope, name, value, own))
            else:  # functions, classes and objects of a library are not compared
                self._add(label, value, own)
        if own:
            self._missed.setdefault(id(scope), (scope, set()))[1].update(named - scope.keys())
            for name in code.co_names:  # modules imported inside the function
                for path in (name, f"{scope.get('__package__')}.{name}"):
                    if path in sys.modules and is_users_name(path) and name not in scope:
                        self._add(self._labels.new(name, called, path), sys.modules[path], True)

    def _method(self, label: Label, method: types.MethodType, users: bool) -> None:
        owner: Any = method.__self__
        if not issubclass(type(owner), type):
            label = self._labels.new("self", type(owner).__name__, id(owner))
        self._add(label, owner, users)
        self._add(label, method.__func__, users)

    def _partial(self, label: Label, partial: Any, users: bool) -> None:
        self._add(label, partial.func, users)
        self._marks(label if label.spelling else Label("partial"), partial, users)
        for index, value in enumerate(partial.args):
            self._add(Label(f"argument {index}"), value, users)
        self._running.admit(*partial.args, *partial.keywords.values())  # these may be hooks that run in a backward
        for key, value in partial.keywords.items():
            self._take(Place(Label(key), partial.keywords, key, value, users))

    def _cache(self, label: Label, cache: Any, users: bool) -> None:
        """Follow cached results: the step uses them although the function may have run long ago."""
        self._running.admit(cache)
        self._add(label, cache.__wrapped__, users)
        for result in cached_by(cache):
            name = f"{getattr(cache.__wrapped__, '__name__', 'cache')}()"
            self._add(self._labels.new(name, type(result).__name__, id(result)), result, users)

    def _getter(self, label: Label, getter: Any, users: bool) -> None:
        """Let the names count that an `attrgetter` reads, which occur in no code."""
        made = getter.__reduce__()
        names = made[0].args if issubclass(type(made[0]), functools.partial) else made[1]
        body = "\n".join(name for name in names if type(name) is str and name.replace(".", "").isidentifier())
        self._name(compile(body, "<string>", "exec"))

    def _descriptor(self, label: Label, value: Any, users: bool) -> None:
        for name in ("fget", "fset", "func", "__func__", "dispatcher"):
            with contextlib.suppress(AttributeError):
                self._add(label, object.__getattribute__(value, name), users)

    # -- objects

    def _object(self, label: Label, value: Any, facts: Kind, users: bool) -> None:
        """Offer attributes, slots and class of an object; of torch's and Python's objects only names that are read.

        What a container of Python's holds belongs to the code that holds the container.
        """
        own = attributes_of(value) or {}
        is_theirs = facts.is_users or facts.is_list
        is_whole = is_theirs or is_standard(type(value))
        is_own = facts.is_own or (users and not facts.is_users and "__getitem__" in facts.read)
        for name, item in list(own.items()):
            if type(name) is not str or name in facts.skipped or name.startswith("__"):
                continue
            if is_whole or is_plain(item) or issubclass(type(item), _CODE) or self._visitor.takes(item):
                self._offer(facts, label, Place(label, own, name, item, is_own), name)
        for name, member in facts.slots.items():
            self._offer(facts, label, Place(label, value, member, in_slot(value, member), facts.is_own, in_slot), name)
        if facts.is_module:
            self.is_compiled = self.is_compiled or own.get("_compiled_call_impl") is not None or "dynamo_ctx" in own
            self._inner.update(map(id, (own.get("_modules") or {}).values()))
            for name, child in (own.get("_modules") or {}).items():
                self._add(self._paths.get(id(child)) or label.attribute(name), child, facts.is_own)
            for name, parameter in (own.get("_parameters") or {}).items():
                self._tensor(label.attribute(name), parameter, facts.is_own)
        if is_theirs or facts.is_module:
            self._add(Label(""), type(value), facts.is_own)

    def _tensor(self, label: Label, tensor: Any, users: bool) -> None:
        """Offer attributes set on a tensor (`p.scale = 2.0`)."""
        own = attributes_of(tensor) or {}
        for name, item in list(own.items()):
            self._offer(None, label, Place(label, own, name, item, users), name)

    def _class(self, label: Label, kind: type, users: bool) -> None:
        """Offer the body of a class, and follow its bases."""
        own, facts, body = is_own(kind), self._kind(kind), vars(kind)
        is_theirs = is_users_name(str(kind.__module__))
        for name, item in body.items() if is_theirs else ():
            functions = functions_behind(item)
            if name in _SKIPPED or type(item) is types.MemberDescriptorType or (name[:2] == "__" and not functions):
                continue
            place = Place(label.attribute(name), body, name, item, own)
            if not self._running.is_known or issubclass(kind, torch.autograd.Function):
                self._running.admit(*functions)
            if functions and self._runs(functions, name, own):
                self._take(place)
            elif not functions or not self._running.is_known:
                self._offer(facts, label, place, name)
        if not is_theirs and facts.is_module and "forward" in body:
            self._visitor.put(Place(label.attribute("forward"), body, "forward", body["forward"], own))
        for base in kind.__mro__[1:] if is_theirs else ():
            self._add(Label(""), base, own)
        if is_users(type(kind)):
            self._add(Label(""), type(kind), own)

    def _runs(self, functions: list[types.FunctionType], name: str, own: bool) -> bool:
        """Check whether a method counts, also one that no code names."""
        if not self._running.is_known:
            return name in _READING or (own and name.startswith("__") and name not in MAKING)
        return self._running.runs(functions) or (own and name in self.names.spelled)

    def _python_module(self, label: Label, module: types.ModuleType, users: bool) -> None:
        places = attributes_of(module) or {}
        name = str(places.get("__name__"))
        own, facts = not is_installed_module(name), self._kind(types.SimpleNamespace)
        for key, value in list(places.items()) if is_users_name(name) else ():
            if key == "__getattr__":
                self._add(label, value, own)
            elif not key.startswith("__") and (own or _is_small(value) or issubclass(type(value), (*_CODE, type))):
                self._offer(facts if own else None, label, Place(label, places, key, value, own), key)

    def _context(self, label: Label, variable: Any, users: bool) -> None:
        spelled, read = Label(f"{label.spelling}.get()", label.apart), variable.get
        self._take(Place(spelled, read, None, result_of(read, None), users, result_of))

    # -- containers

    def _dict(self, label: Label, items: dict[Any, Any], users: bool) -> None:
        for key, value in islice(dict.items(items), _most(dict.__len__(items))):
            read = () if is_plain(key) else (by_identity,)
            self._take(Place(label.item(key), items, key, value, users, *read))

    def _items(self, label: Label, items: Any, users: bool) -> None:
        kind = type(items)
        base: Any = next(base for base in _CONTAINERS if issubclass(kind, base))
        for index, value in enumerate(islice(items_of(items), _most(base.__len__(items)))):
            inner = label if issubclass(kind, (set, frozenset)) else label.item(index)
            if issubclass(kind, (list, deque)):
                self._take(Place(inner, items, index, value, users))
            else:
                self._add(inner, value, users, items)

    def _referents(self, label: Label, value: Any, users: bool) -> None:
        """Follow what an object refers to: the dict behind a view, the object of a bound method of C."""
        label, own = label.attribute("__self__") if type(value) in _BOUND else label, attributes_of(value)
        for behind in gc.get_referents(value):
            if behind is not own and not issubclass(type(behind), (type, types.ModuleType)):
                self._add(label, behind, users)

    def _reference(self, label: Label, reference: Any, users: bool) -> None:
        is_method = type(reference) is weakref.WeakMethod
        behind = reference() if is_method else weakref.ref.__call__(reference)
        self._add(Label(f"{label.spelling}()", label.apart), behind, users)


def _wants(running: Running, kind: Kind | None, name: Any) -> bool:
    """Check whether an attribute of this name counts."""
    if name in running.names.spelled:
        return True
    if kind is None or type(name) is not str:
        return False
    if name in kind.read:
        return True
    if kind.is_layer and (name in running.names.platforms or (not running.is_known and not kind.is_users)):
        return True
    is_asked = kind.is_own and running.names.uses_dynamic_names and not name.startswith("__")
    return is_asked or kind.is_list or (kind.is_module and name == "forward")


def _owner(value: Any, place: Any) -> Any:
    """Return the owner of a variable's label: its place; for a class the class itself, which has that name."""
    return id(value) if issubclass(type(value), type) else place


def _most(length: int) -> int:
    return length if length <= MAX_ITEMS else _FIRST


def _is_small(value: Any) -> bool:
    """Check whether a value of a library is watched: a plain one, or a container."""
    return is_plain(value) or type(value) in (dict, list, set)
