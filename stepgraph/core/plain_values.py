"""Compares plain values as a step sees them, and writes them in messages.

A graph has numbers baked in by value and everything else by identity. `1`, `1.0` and `True` are equal in Python and are
three different constants in a graph, as are `0.0` and `-0.0`; a NaN equals itself. A tuple is what it holds, and a
bound method is its object and its function. Neither comparing nor writing runs code of the user: the type decides,
never `==` or `isinstance` of a class that may have its own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from stepgraph.core import storage
from stepgraph.core.frames import is_users
from stepgraph.core.wording import with_article

_NUMBERS = (int, float, complex, str, bytes)
_BY_EQUALITY = (torch.device, range)
_BY_IDENTITY = (enum.Enum, torch.dtype, torch.layout, torch.memory_format, type(None), type(...))
_PLAIN = (*_NUMBERS, *_BY_EQUALITY, *_BY_IDENTITY)


class Described:
    """An object of ours that is passed to a step: compared by identity, described by its `repr`."""


BY_VALUE = (
    *(bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, enum.Enum, Described),
    types.MethodType,  # made again at each look-up: compared by its function and the object it is bound to
)
"""Types of arguments that a signature compares by value, beside floating-point and complex numbers."""


_SHORT = 80
_MAX_CACHED = 64
"""The results of a larger cache are not looked at."""
_BRACKETS: dict[type, tuple[str, str]] = {tuple: ("(", ")"), list: ("[", "]"), set: ("{", "}"), frozenset: ("{", "}")}


class Missing(enum.Enum):
    """The value of a missing attribute or item."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


def is_compared_by_value(argument: Any) -> bool:
    """Whether a signature compares an argument by value, not by identity."""
    return issubclass(type(argument), (float, complex, *BY_VALUE)) and not is_of_numpy(argument)


def is_of_numpy(leaf: Any) -> bool:
    """Whether a value is an array or a number of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(leaf), (numpy.ndarray, numpy.generic))


def is_plain(value: Any) -> bool:
    """Whether a value is a constant in a graph: a number, a string, a tuple of such."""
    kind = type(value)
    if issubclass(kind, _PLAIN):
        return True
    if issubclass(kind, (tuple, frozenset)):
        return all(map(is_plain, items_of(value)))
    return is_numpy(kind, "generic")


def same(one: Any, two: Any) -> bool:
    """Whether a step that reads the second value does the same as with the first."""
    if one is two:
        return True
    kind = type(one)
    if kind is not type(two) or issubclass(kind, _BY_IDENTITY):
        return False
    if issubclass(kind, tuple):
        return tuple.__len__(one) == tuple.__len__(two) and all(map(same, items_of(one), items_of(two)))
    if issubclass(kind, frozenset):
        return contents_of_set(one) == contents_of_set(two)
    if kind is types.MethodType:
        return one.__self__ is two.__self__ and one.__func__ is two.__func__
    if kind is types.BuiltinMethodType:
        return one.__self__ is two.__self__ and bool(one.__name__ == two.__name__)
    if kind is functools.partial:
        return same((one.func, one.args, *one.keywords.items()), (two.func, two.args, *two.keywords.items()))
    return is_plain(one) and is_plain(two) and bool(token(one) == token(two))


def token(value: Any) -> Any:
    """Something hashable that is equal for the same values only."""
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
    """A number or string without what a user's class adds to it; floats as written, which distinguishes zeros."""
    if kind in (int, bool, str, bytes):
        return value
    base: Any = next(base for base in _NUMBERS if issubclass(kind, base))
    return base.__repr__(value)


def contents_of_set(values: Any) -> frozenset[Any]:
    """The contents of a set: plain values as such, others by identity."""
    return frozenset(map(token, items_of(values)))


def items_of(values: Any) -> Iterator[Any]:
    """The items of a tuple, list, deque or set, or of a subclass."""
    base: Any = next(base for base in (tuple, list, deque, set, frozenset) if issubclass(type(values), base))
    return iter(base.__iter__(values))


def is_numpy(kind: type, name: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, getattr(numpy, name))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own `__dict__`, if it has one; attribute access that its class defines in Python is not used."""
    kind = type(value)
    try:
        is_usual = type.__getattribute__(kind, "__getattribute__") is object.__getattribute__
        found = (object.__getattribute__ if is_usual else _reader_in_c(kind))(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


def _reader_in_c(kind: type) -> Any:
    """What reads attributes in C: `threading.local` keeps those of each thread apart. A proxy would ask its object."""
    bases = (object,) if kind in weakref.ProxyTypes else kind.__mro__
    found = (vars(base).get("__getattribute__") for base in bases)
    return next(read for read in found if type(read) is types.WrapperDescriptorType)


# -- in messages


def told(value: Any) -> str:
    """A value in a message."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return storage.told(value)
    if kind in (types.FunctionType, types.BuiltinFunctionType, types.MethodType):
        return f"<function {value.__qualname__}>"
    if kind is types.CodeType:
        return f"<code of line {value.co_firstlineno}>"
    if issubclass(kind, type):
        return f"<class {value.__qualname__}>"
    if issubclass(kind, types.ModuleType):
        return f"<module {vars(value).get('__name__')}>"
    if issubclass(kind, tuple) and any(issubclass(type(item), torch.Tensor) for item in items_of(value)):
        return f"{with_article(kind)} with tensors"
    text = _written(value)
    if text is None or (len(text) >= _SHORT and not is_plain(value)):
        return f"<{kind.__name__} at {id(value):#x}>"
    return text


def _written(value: Any) -> str | None:
    """A value as one would type it, if it is made of plain ones."""
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return f"{kind.__name__}.{(attributes_of(value) or {}).get('_name_')}"
    for base in (int, float, complex, str, bytes):
        if issubclass(kind, base):
            number: Any = bool if kind is bool else base
            return str(number.__repr__(value))
    if kind in _BRACKETS:
        left, right = _BRACKETS[kind]
        comma = "," if kind is tuple and len(value) == 1 else ""
        return (
            _joined(left, [("", v) for v in items_of(value)], comma + right)
            if value or kind not in (set, frozenset)
            else "set()"
        )
    if issubclass(kind, (tuple, frozenset)):
        return _joined(f"{kind.__name__}(", [("", v) for v in items_of(value)], ")")
    if kind is dict:
        return _joined("{", [(f"{told(k)}: ", v) for k, v in value.items()], "}") if len(value) < _SHORT else None
    if dataclasses.is_dataclass(kind) or kind is types.SimpleNamespace:
        attributes = attributes_of(value)
        fields = None if attributes is None else [(f"{k}=", v) for k, v in attributes.items()]
        return None if fields is None else _joined(f"{kind.__name__}(", fields, ")")
    if is_numpy(kind, "ndarray"):
        return " ".join(repr(value).split()) if value.dtype.kind in "biufc" else None
    return repr(value) if is_plain(value) else None


def _joined(left: str, items: Iterable[tuple[str, Any]], right: str) -> str | None:
    parts: list[str] = []
    for before, value in items:
        if not is_plain(value):
            return None
        parts.append(f"{before}{_written(value)}")
    return f"{left}{', '.join(parts)}{right}"


def kept_by(cache: Any) -> dict[Any, Any]:
    """The results of a function of `functools.lru_cache`, or links to them, by arguments."""
    own = attributes_of(cache)
    return next((one for one in gc.get_referents(cache) if type(one) is dict and one is not own), {})


def results_of(cache: Any) -> list[Any]:
    """The results that it keeps, and a few other objects: a bounded cache refers to them itself."""
    kept, own = kept_by(cache), attributes_of(cache) or {}
    found = (one for one in gc.get_referents(cache) if one is not kept and one is not own)
    return [*(one for one in found if one is not own.get("__wrapped__")), *kept.values()]


def cached_by(cache: Any) -> list[Any]:
    """The results of a function with a cache, if they are few; without tensors and modules."""
    results = [] if len(kept_by(cache)) > _MAX_CACHED else results_of(cache)
    others = (torch.Tensor, torch.nn.Module, type)
    return [v for v in results if type(v) in (dict, list) or (is_users(type(v)) and not issubclass(type(v), others))]
