"""What the code of a class reads: found out once for all objects of it.

A user's class is watched as a place of its own: which method a name stands for, the numbers that are written in its
body. Of torch's own modules and hooks the code is known: an attribute that it does not name (`in_features`) describes
the module and decides nothing, so that `torch.nn.Linear` brings no watched value at all.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stepgraph.values.reach import names_in
from stepgraph.values.watch_code import code_behind, layers_of
from stepgraph.values.watch_values import is_plain, is_users

BOOKKEEPING = frozenset((*vars(torch.nn.Module()), "_compiled_call_impl", "_is_full_backward_hook"))
"""Attributes that each module has, which torch keeps and others guard."""
_IMPLICIT = (
    *("__call__", "__next__", "__iter__", "__enter__", "__exit__", "__getitem__", "__getattr__", "__contains__"),
    *("__len__", "__bool__", "__int__", "__float__", "__torch_function__"),
)
"""Methods that run without being named, and that are looked out for where a class has none."""
_NEVER_IMPLICIT = frozenset(
    (
        *("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__prepare__", "__del__"),
        *("__class_getitem__", "__subclasshook__", "__instancecheck__", "__subclasscheck__", "__dir__", "__sizeof__"),
        *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"),
        *("__copy__", "__deepcopy__", "__setattr__", "__delattr__", "__str__", "__repr__", "__format__"),
    )
)
"""Those that make, copy, change or print an object: they name more than a step computes with."""
RUN_BY = {"str": "__str__", "repr": "__repr__", "format": "__format__"}
"""What runs where code has a name."""
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)
"""Modules of torch's whose attributes are what the user puts there."""
_TORCHS = ("torch.nn.modules.", "torch.nn.utils.")


class Kind:
    """A class, and the names that its own code looks up, as far as that code is reached."""

    __slots__ = ("_reads", "asked", "entries", "is_eager", "is_module", "is_users", "names", "runs", "type")

    def __init__(self, kind: type, *, is_eager: bool = False) -> None:
        """`is_eager`: of an optimizer that runs at each replay. What its step reads and counts is its own affair."""
        self.type, self.is_eager = kind, is_eager
        self.is_users = is_users(kind)
        self.is_module = issubclass(kind, torch.nn.Module)
        self.names: set[str] = set()
        """What the methods that are reached look up, mostly on `self`."""
        self.asked: set[str] = {"step"} if is_eager else set()
        """What was looked for on the class so far."""
        self.entries = _entries(kind, self.is_module) if self.is_module or (self.is_users and not is_eager) else ()
        """Methods that run without being named."""
        self.runs = self.is_module or is_eager
        """Whether there are such methods, so that objects of the class are looked into as `self` is."""
        self._reads = _read_by_code(kind, self.is_module) if not self.is_users else None

    def watched_in(self, attributes: Mapping[str, Any]) -> list[str]:
        """The attributes of an object of the class that are watched, whether code is seen to name them or not."""
        if self.is_eager:
            return []
        if (self.is_users and self.is_module) or issubclass(self.type, _LISTS):
            return [key for key in attributes if key not in BOOKKEEPING]
        if self.is_users:
            return [key for key in attributes if not key.startswith("__")]
        if self._reads is None:
            return [key for key, value in attributes.items() if type(value) is float] if self.is_module else []
        return [k for k in attributes.keys() & self._reads if is_plain(attributes[k]) or callable(attributes[k])]


class Kinds:
    """The classes of what is looked at."""

    def __init__(self, enter: Callable[[Kind, str], None]) -> None:
        """`enter` is told of each class and the methods of it that run without being named."""
        self._enter = enter
        self._found: dict[tuple[type, bool], Kind] = {}
        self._is_users: dict[type, bool] = {}

    def of(self, kind: type, *, is_eager: bool = False) -> Kind:
        found = self._found.get((kind, is_eager))
        if found is None:
            found = self._found[kind, is_eager] = Kind(kind, is_eager=is_eager)
            for name in found.entries:
                self._enter(found, name)
            found.runs = found.runs or bool(found.names)
        return found

    def is_users(self, kind: type) -> bool:
        """Whether a class is the user's, without a look at what it reads."""
        if kind not in self._is_users:
            self._is_users[kind] = is_users(kind)
        return self._is_users[kind]

    def users(self) -> list[Kind]:
        return [kind for kind in self._found.values() if kind.is_users]


def _entries(kind: type, is_module: bool) -> tuple[str, ...]:
    found = dict.fromkeys(("forward",) if is_module else _IMPLICIT)
    for base in filter(is_users, kind.__mro__):
        for name, value in vars(base).items():
            is_special = name.startswith("__") and name.endswith("__") and name not in _NEVER_IMPLICIT
            if is_special and code_behind(value) and not _is_generated(value, base):
                found[name] = None
    return tuple(found)


def _is_generated(value: Any, base: type) -> bool:
    """Whether a method was written by `dataclass`: it names all fields, also those that only the loop is about."""
    is_typed = type(value) is types.FunctionType and value.__code__.co_filename != "<string>"
    return "__dataclass_fields__" in vars(base) and not is_typed


def runs_when_called(kind: type) -> tuple[str, ...]:
    """The methods of a class that run when the class itself is used."""
    if issubclass(kind, torch.autograd.Function):
        return ("forward", "backward", "setup_context")
    return () if issubclass(kind, torch.nn.Module) else ("__new__", "__init__", "__post_init__")


def _read_by_code(kind: type, is_module: bool) -> frozenset[str] | None:
    """The names that a layer of torch's, or a hook (`SpectralNorm`), looks up when it is called; None of others."""
    if not is_module and not kind.__module__.startswith(_TORCHS):
        return None
    found: set[str] = set()
    waiting = {"forward" if is_module else "__call__"}
    while waiting:
        name = waiting.pop()
        found.add(name)
        for base in kind.__mro__:
            if base is torch.nn.Module or name not in vars(base):
                continue
            if not base.__module__.startswith(_TORCHS):
                return None
            for function in code_behind(vars(base)[name]):
                waiting |= _names_of(function) - found
    return frozenset(found - BOOKKEEPING)


def _names_of(function: Any) -> set[str]:
    codes = [layer.__code__ for layer in layers_of(function) if type(layer) is types.FunctionType]
    return set().union(*map(names_in, codes))
