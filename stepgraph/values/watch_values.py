"""When two values are the same to a step, and whose a class or Python module is.

A graph has numbers baked in by value and everything else by identity. `1`, `1.0` and `True` are equal in Python and are
three different constants in a graph, as are `0.0` and `-0.0`; a NaN is as good as itself. A tuple is what it holds, and
a bound method, which Python makes anew at each access, is its object and its function. No code of the user runs to find
this out: what decides is the type, never `==` or `isinstance` of a class that may have its own.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch

from stepgraph.frames import is_engine

_NUMBERS = (int, float, complex, str, bytes)
_BY_EQUALITY = (torch.device, range)
_BY_IDENTITY = (enum.Enum, torch.dtype, torch.layout, torch.memory_format, type(None), type(...))
_PLAIN = (*_NUMBERS, *_BY_EQUALITY, *_BY_IDENTITY)
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "stepgraph", "triton", "pybind11_builtins"))
_NAMESPACES = ("argparse", "types")
_USER_ROOMS = ("stepgraph.models", "stepgraph.bench")


class Missing(enum.Enum):
    """What is found where there is nothing."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


def is_plain(value: Any) -> bool:
    """Whether a value is a constant in a graph: a number, a string, a tuple of such."""
    kind = type(value)
    if issubclass(kind, _PLAIN):
        return True
    if issubclass(kind, (tuple, frozenset)):
        return all(map(is_plain, items_of(value)))
    return is_numpy(kind, "generic")


def same(one: Any, two: Any) -> bool:
    """Whether a step that reads the second does what it does with the first."""
    if one is two:
        return True
    kind = type(one)
    if kind is not type(two) or issubclass(kind, _BY_IDENTITY):
        return False
    if issubclass(kind, tuple):
        return tuple.__len__(one) == tuple.__len__(two) and all(map(same, items_of(one), items_of(two)))
    if kind is types.MethodType:
        return one.__self__ is two.__self__ and one.__func__ is two.__func__
    if kind is types.BuiltinMethodType:
        return one.__self__ is two.__self__ and bool(one.__name__ == two.__name__)
    if kind is functools.partial:
        return same((one.func, one.args, *one.keywords.items()), (two.func, two.args, *two.keywords.items()))
    return is_plain(one) and is_plain(two) and bool(token(one) == token(two))


def token(value: Any) -> Any:
    """Something hashable that is equal for values that are the same, and for no others."""
    kind = type(value)
    if not is_plain(value) or issubclass(kind, _BY_IDENTITY):
        return id(value)
    if issubclass(kind, tuple):
        return (kind, *map(token, items_of(value)))
    if issubclass(kind, frozenset):
        return kind, contents_of_set(value)
    if issubclass(kind, _NUMBERS):
        return kind, _number(value, kind)
    return (kind, value) if issubclass(kind, _BY_EQUALITY) else (kind, value.dtype.str, value.tobytes())


def _number(value: Any, kind: type) -> Any:
    """A number or string without what a class of the user adds to it; floats as written, which tells zeros apart."""
    if kind in (int, bool, str, bytes):
        return value
    base: Any = next(base for base in _NUMBERS if issubclass(kind, base))
    return base.__repr__(value)


def contents_of_set(values: Any) -> frozenset[Any]:
    """What is in a set: plain values as such, others by identity."""
    return frozenset(map(token, items_of(values)))


def items_of(values: Any) -> Iterator[Any]:
    """The items of a tuple, list, deque or set, of whatever class the user has made of it."""
    base: Any = next(base for base in (tuple, list, deque, set, frozenset) if issubclass(type(values), base))
    return iter(base.__iter__(values))


def is_numpy(kind: type, name: str) -> bool:
    """Whether a class is this one of numpy's, where numpy is in use."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, getattr(numpy, name))


# -- whose something is


def is_users(kind: type) -> bool:
    """Whether a class holds the user's values: their own, a library's, a namespace; not torch's or a standard one."""
    return any(_is_users_name(str(base.__module__)) for base in kind.__mro__)


def is_users_module(module: types.ModuleType) -> bool:
    """Whether a Python module is the user's, for its attributes to be watched."""
    return _is_users_name(str(vars(module).get("__name__", "")))


def _is_users_name(name: str) -> bool:
    root = name.partition(".")[0]
    return root not in _LIBRARIES or root in _NAMESPACES or name.startswith(_USER_ROOMS)


def is_engines(value: Any) -> bool:
    """Whether a value is stepgraph's own: a graphed forward that it has put in a module's place for one."""
    value = value.__func__ if type(value) is types.MethodType else value
    if type(value) is types.FunctionType:
        return is_engine(value.__code__.co_filename)
    name = str(type(value).__module__)
    return name.startswith("stepgraph.") and not name.startswith(_USER_ROOMS)


def is_no_matter(value: Any) -> bool:
    """Whether a value that hides a method does what the method did: a graphed forward, a scheduler's count of steps."""
    function = value.__func__ if type(value) is types.MethodType else value
    return is_engines(value) or "_wrapped_by_lr_sched" in (attributes_of(function) or ())


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, where it has any; what its class makes of attribute access is not asked."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """The slots of a class that the user has made, by name."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if _is_users_name(str(base.__module__))
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    }
