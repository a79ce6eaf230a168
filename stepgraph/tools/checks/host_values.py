"""The host values that a step depends on, each with a way to move it and to put it back.

They come from where the watch looks (`values.walk`): variables, attributes, slots, items, defaults, context variables,
tuples, environment variables that the code spells. The values of optimizers are added, and the plain arguments of the
call. How a value is moved follows from its class, and never from a guess:

- A number is moved a little, so that a probability stays one, and far, so that `if step > 500` is noticed.
- A flag is flipped. A member of an enumeration becomes another one.
- The numbers of a numpy array are moved in place, as single ones are, if the array owns its memory.
- Other memory (`array`, ctypes, a memory map) is not moved: a file or another process may be behind it.
- A string is not moved. Most select code or name something outside of the program (a file, a command), and which other
  strings are good, nobody knows. The guards are asked about it nevertheless, which runs no code of the step.

Tensors of one element are listed, too: they are what a number should be if it has to change.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import gc
import math
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.plain_values import MISSING, attributes_of, is_numpy
from stepgraph.core.wording import with_article
from stepgraph.engine.guards.host_values.naming import Label
from stepgraph.engine.guards.host_values.parts import (
    Place,
    attribute_of,
    by_identity,
    default_of,
    in_slot,
    is_bytes,
    item_at,
    result_of,
)
from stepgraph.engine.guards.host_values.walk import MAX_ITEMS, Walk, Wants
from stepgraph.engine.step.rehearsal import Rehearsal

_STEP_DOWN = 0.875
_STEP_UP = 1.125
"""Exact in binary, and small enough for a probability, a momentum or a temperature."""
_FIRST = 0.125
"""Where a zero is moved to."""
_FAR = 1000
_MAX_BYTES = 64 << 20
"""A larger array is not copied to be moved."""
_MAX_SHOWN = 60
_TEXT = "cannot be moved: another string would be a guess"
_LAYER = "cannot be moved: it must fit the parameters of one of torch's own layers"
_SHARED = "not moved: other code or another process may share its memory"
_Undo = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class HostValue:
    """A value that the host has, and how to move it."""

    name: str
    value: Any
    near: tuple[Any, ...] = ()
    """Values to move it to, in order: the next one if the step fails."""
    far: tuple[Any, ...] = ()
    """Values to try if a near one has no effect."""
    put: Callable[[Any], _Undo] | None = field(default=None, compare=False)
    """Writes another value and returns what puts the first one back; None if it cannot be written."""
    obstacle: str = ""
    """Why it cannot be moved."""
    optimizer: Optimizer | None = None
    """The optimizer that it belongs to."""
    argument: int | None = None
    """The leaf of the call that it is."""
    asked: tuple[Any, ...] = ()
    """Another value, with which only the guards are asked: the step must not run with it."""
    is_compared: bool = False
    """True for memory that is not written to, and whose bytes the watch compares."""
    is_flag: bool = False
    """True if it selects code: moved together with others it may hide their effect."""
    is_tensor: bool = False
    is_on_device: bool = False
    """True for a tensor in the memory of the step's device: a graph reads it at each replay."""

    @property
    def others(self) -> tuple[Any, ...]:
        """Values with which the guards may be asked."""
        return self.near or self.asked


@dataclass(frozen=True, slots=True)
class HostValues:
    """The values of a step, and what restores all host values that it can name."""

    values: list[HostValue]
    restore: Callable[[], None]
    """Undoes what the step's own Python has changed: a recording runs it once more."""
    is_cut_short: bool
    """True if not all were looked at, because there are too many objects."""


def host_values(rehearsal: Rehearsal, env: Mapping[str, str]) -> HostValues:
    """Find the values of a step."""
    finder = _Finder(rehearsal)
    walk = Walk(finder, rehearsal.ran)
    walk.go(rehearsal.function, rehearsal.modules)
    found = [
        dataclasses.replace(_host_value(name, leaf, None), argument=index)
        for index, (name, leaf) in enumerate(rehearsal.arguments)
        if _is_listed(leaf)
    ]
    found += finder.values
    for optimizer, _ in rehearsal.optimizers:
        found += _of_optimizer(finder.names.get(id(optimizer), type(optimizer).__name__), optimizer, rehearsal)
    spelled = walk.names.spelled
    named = {*env, *(name for name in os.environ if name in spelled and ("environ" in spelled or "getenv" in spelled))}
    for name in sorted(named):
        found += _of_environment(name, env.get(name))
    unique = {value.name: value for value in reversed(found)}  # an argument is also in the walk
    found = [value for value in found if unique[value.name] is value]
    return HostValues(found, finder.restore, walk.is_cut_short)


class _Finder:
    """Visits a walk, and collects values."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.values: list[HostValue] = []
        self.names: dict[int, str] = {}
        """The spelling of each optimizer, by id."""
        self._places: list[Place] = []
        self._contents: list[tuple[Any, Any]] = []
        """Containers, attributes of objects, and what they hold."""
        self._scopes: list[tuple[Any, frozenset[Any], Wants]] = []
        """Dicts in which code looks for names that they do not have, and their names."""
        self._owns = rehearsal.backend.owns
        self._classes: dict[int, type] = {}
        """Classes by the id of the dict that holds their attributes."""
        self._layers: set[int] = set()
        """The ids of the dicts that hold the attributes of torch's own layers with parameters."""

    def put(self, place: Place) -> bool:
        name, value = str(place.label), place.value
        self._places.append(place)
        if _is_listed(value):
            made = self._value(name, value, place)
            if issubclass(type(value), int) and id(place.where) in self._layers:
                # kernels read memory by these numbers unchecked: an LSTM with one more layer ends the process
                made = dataclasses.replace(made, obstacle=_LAYER, asked=made.near, near=(), far=())
            self.values.append(made)
        elif issubclass(type(value), tuple):
            for path, item, rebuilt in _in_tuple(value):
                self.values.append(self._value(name + path, item, place, rebuilt))
        elif _is_tensor_number(value):
            self.values.append(_of_tensor(name, value, self._owns(value)))
        return True

    def takes(self, value: Any) -> bool:
        return False

    def miss(self, label: Label, where: Mapping[Any, Any], wants: Wants) -> None:
        """Note which names are there: one that a recording adds is taken away again."""
        self._scopes.append((where, frozenset(where), wants))

    def enter(self, label: Label, value: Any, owner: Any, is_users: bool, wants: Wants | None) -> None:
        if _is_torchs_layer(value):
            self._layers.add(id(vars(value)))
        if issubclass(type(value), Optimizer):
            self.names[id(value)] = str(label)
        elif issubclass(type(value), type):
            self._classes |= {id(body): value for body in gc.get_referents(vars(value))}
        elif type(value) in (list, dict, set, deque) and is_users and len(value) <= MAX_ITEMS:
            self._contents.append((value, copy.copy(value)))
        elif is_numpy(type(value), "ndarray"):
            self.values.append(_of_array(str(label), value))
        elif is_bytes(value, sys.maxsize):
            shown, is_compared = with_article(type(value)), is_bytes(value, MAX_ITEMS)
            made = HostValue(str(label), shown, obstacle=_SHARED, asked=(MISSING,), is_compared=is_compared)
            self.values.append(made)
        elif wants is not None and (own := attributes_of(value)) is not None:
            self._contents.append((own, copy.copy(own)))

    def restore(self) -> None:
        """Write back every value that is another object now, and the contents of containers and objects."""
        for scope, known, wants in self._scopes:
            for name in [name for name in scope if name not in known and wants(name)]:
                del scope[name]
        for value, before in self._contents:
            if not _holds_the_same(value, before):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(before)
        for place in self._places:
            if place.read(place.where, place.key) is not place.value and place.value is not MISSING:
                put, _ = self._writer(place)
                if put is not None:
                    put(place.value)

    def _value(
        self, name: str, value: Any, place: Place, rebuilt: Callable[[Any], Any] = lambda value: value
    ) -> HostValue:
        put, obstacle = self._writer(place)
        if put is None:
            return HostValue(name, _shown(value), obstacle=obstacle)
        write = put
        return _host_value(name, value, lambda moved: write(rebuilt(moved)))

    def _writer(self, place: Place) -> tuple[Callable[[Any], _Undo] | None, str]:
        """Return what writes to a place, or None and the reason."""
        where, key, read = place.where, place.key, place.read
        write: Callable[[Any], Any] | None = None
        if read is item_at and type(where) is types.MappingProxyType:
            owner = next((self._classes.get(id(body)) for body in gc.get_referents(where)), None)
            if owner is None:
                return None, "it is read-only"
            write = lambda value: type.__setattr__(owner, key, value)  # noqa: E731
        elif read in (item_at, by_identity):
            base: Any = next(base for base in (dict, list, deque) if issubclass(type(where), base))
            write = lambda value: base.__setitem__(where, key, value)  # noqa: E731
        elif read is in_slot:
            write = lambda value: key.__set__(where, value)  # noqa: E731
        elif read is attribute_of:
            write = lambda value: setattr(where, key, value)  # noqa: E731
        elif read is default_of:
            return lambda value: _put_default(where, key, value), ""
        elif read is result_of and isinstance(variable := getattr(where, "__self__", None), contextvars.ContextVar):
            return lambda value: _put_variable(variable, value), ""
        if write is None:
            return None, "it is computed by code that only returns it"
        before, written = place.value, write

        def put(value: Any) -> _Undo:
            written(value)
            return lambda: written(before)

        return put, ""


def _is_torchs_layer(value: Any) -> bool:
    is_torchs = issubclass(type(value), torch.nn.Module) and type(value).__module__.startswith("torch.nn.")
    return is_torchs and next(value.parameters(recurse=False), None) is not None


def _holds_the_same(one: Any, two: Any) -> bool:
    pairs = zip(one.items(), two.items(), strict=False) if isinstance(one, dict) else zip(one, two, strict=False)
    if isinstance(one, dict):
        return len(one) == len(two) and all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return len(one) == len(two) and all(a is b for a, b in pairs)


def _put_default(function: types.FunctionType, name: str, value: Any) -> _Undo:
    """Give a parameter of a function another default."""
    keywords, defaults, code = function.__kwdefaults__, function.__defaults__ or (), function.__code__
    if keywords is not None and name in keywords:
        before = keywords[name]
        keywords[name] = value
        return lambda: keywords.__setitem__(name, before)
    positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    kept = function.__defaults__
    function.__defaults__ = tuple(value if one == name else old for one, old in zip(positional, defaults, strict=True))
    return lambda: setattr(function, "__defaults__", kept)


def _put_variable(variable: Any, value: Any) -> _Undo:
    token = variable.set(value)
    return lambda: variable.reset(token)


def _of_optimizer(name: str, optimizer: Optimizer, rehearsal: Rehearsal) -> Iterator[HostValue]:
    """The values in an optimizer's parameter groups."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            spelled = f"{name}.param_groups[{index}][{key!r}]"
            if key == "params":
                continue
            if _is_tensor_number(value):
                yield _of_tensor(spelled, value, rehearsal.backend.owns(value))
            elif _is_listed(value):
                yield dataclasses.replace(_host_value(spelled, value, _in_group(group, key)), optimizer=optimizer)
            elif issubclass(type(value), tuple):
                for path, item, rebuilt in _in_tuple(value):
                    made = _host_value(spelled + path, item, _in_group(group, key, rebuilt))
                    yield dataclasses.replace(made, optimizer=optimizer)


def _in_group(
    group: dict[str, Any], key: str, rebuilt: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], _Undo]:
    def put(value: Any) -> _Undo:
        before = group[key]
        group[key] = rebuilt(value)
        return lambda: group.__setitem__(key, before)

    return put


def _of_tensor(name: str, tensor: torch.Tensor, is_on_device: bool) -> HostValue:
    value = "a tensor" if is_on_device else tensor.item()

    def put(moved: Any) -> _Undo:
        before = tensor.data.clone()
        tensor.data.fill_(moved)
        return lambda: tensor.data.copy_(before)

    moves = ((), ()) if is_on_device else _moves(value)
    is_flag = tensor.dtype is torch.bool
    return HostValue(name, value, *moves, put=put, is_flag=is_flag, is_tensor=True, is_on_device=is_on_device)


def _of_array(name: str, array: Any) -> HostValue:
    """An array of numpy: its numbers are moved in place, where the step and the watch look."""
    obstacle = _why_array_stays(array)
    if obstacle:
        return HostValue(name, _shown(array), obstacle=obstacle)

    def put(moved: Callable[[Any], Any]) -> _Undo:
        before = array.copy()
        array[...] = moved(before)
        return lambda: array.__setitem__(..., before)

    is_flag = array.dtype.kind == "b"
    near: tuple[_ArrayMove, ...]
    far: tuple[_ArrayMove, ...]
    if is_flag:
        near, far = (_ArrayMove("not", 0),), ()
    elif array.dtype.kind in "iu":
        near = (_ArrayMove("+", 1), _ArrayMove("+", -1))
        far = (_ArrayMove("+", _FAR),) if array.itemsize > 1 else ()
    else:
        near, far = (_ArrayMove("*", _STEP_DOWN), _ArrayMove("*", _STEP_UP)), (_ArrayMove("*", _FAR),)
    return HostValue(name, _shown(array), near, far, put=put, is_flag=is_flag)


def _why_array_stays(array: Any) -> str:
    """Say why the numbers of an array cannot be moved; an empty text if they can."""
    if array.dtype.kind not in "biufc":
        return f"cannot be moved: {array.dtype} is no number"
    if array.size == 0:
        return "cannot be moved: it is empty"
    if not array.flags.writeable:
        return "cannot be moved: it is read-only"
    if array.nbytes > _MAX_BYTES:
        return f"cannot be moved: its {array.nbytes:,} bytes are too many to copy"
    owner: Any = array
    while is_numpy(type(owner.base), "ndarray"):
        owner = owner.base
    if not owner.flags.owndata:  # a file, a tensor, another library's buffer
        return f"cannot be moved: it is in the memory of another object, {with_article(type(owner.base))}"
    numpy = sys.modules["numpy"]
    return "" if type(array) is numpy.ndarray else f"cannot be moved: {with_article(type(array))} may refuse or do more"


@dataclass(frozen=True, slots=True)
class _ArrayMove:
    """A move of all numbers of an array."""

    sign: str
    by: float

    def __call__(self, array: Any) -> Any:
        if self.sign == "not":
            return ~array
        moved = array.copy()
        with sys.modules["numpy"].errstate(all="ignore"):  # numbers wrap around, or become infinite: they are others
            if self.sign == "+":
                (moved.__iadd__ if self.by > 0 else moved.__isub__)(array.dtype.type(abs(self.by)))
            else:
                moved *= self.by
                moved[(moved == array) | (array != array)] = _FIRST  # zeros, infinite ones, and no numbers
        return moved

    def __repr__(self) -> str:
        return "its flags flipped" if self.sign == "not" else f"its numbers {self.sign} {self.by:g}"


def _of_environment(name: str, wanted: str | None) -> Iterator[HostValue]:
    before = os.environ.get(name)
    number = _parsed(before or "")

    def put(value: str) -> _Undo:
        os.environ[name] = value
        if before is None:
            return lambda: os.environ.pop(name, None)
        return lambda: os.environ.__setitem__(name, before)

    spelled = f"os.environ[{name!r}]"
    if wanted is not None:
        yield HostValue(spelled, before, (wanted,), put=put)
    elif number is not None:
        near, far = (tuple(map(str, moves)) for moves in _moves(number))
        yield HostValue(spelled, before, near, far, put=put)
    elif before is not None:
        yield _host_value(spelled, before, put)


def _parsed(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _host_value(name: str, value: Any, put: Callable[[Any], _Undo] | None) -> HostValue:
    """A value, with what follows from its class."""
    kind, shown = type(value), _shown(value)
    if _is_text(value):
        other = str.__add__(value, "?") if issubclass(kind, str) else bytes.__add__(value, b"?")
        return HostValue(name, shown, put=put, obstacle=_TEXT, asked=(other,))
    near, far = _moves(value)
    obstacle = "" if near else f"{with_article(kind)} cannot be given another value"
    is_flag = kind is bool or issubclass(kind, enum.Enum) or is_numpy(kind, "bool_")
    return HostValue(name, shown, near, far, put=put, obstacle=obstacle, is_flag=is_flag)


def _is_listed(value: Any) -> bool:
    """Check for a number, a flag, a member of an enumeration or a string, also of a subclass or of numpy."""
    kind = type(value)
    is_number = (
        issubclass(kind, (int, float, complex, enum.Enum)) or is_numpy(kind, "number") or is_numpy(kind, "bool_")
    )
    return is_number or _is_text(value)


def _is_text(value: Any) -> bool:
    return issubclass(type(value), (str, bytes)) and not issubclass(type(value), enum.Enum)


def _shown(value: Any) -> Any:
    """A value in a report: a string or an array is shortened."""
    if not _is_text(value) and not is_numpy(type(value), "ndarray"):
        return value
    text = repr(value) if _is_text(value) else f"an array of {value.dtype}{list(value.shape)}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _is_tensor_number(value: Any) -> bool:
    is_tensor = issubclass(type(value), torch.Tensor) and not issubclass(type(value), torch.nn.Parameter)
    return is_tensor and value.numel() == 1 and not value.requires_grad and value.layout is torch.strided


def _moves(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values, near and far, that a value is moved to; none for classes whose values cannot be made freely."""
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return tuple(member for member in kind if member is not value)[:2], ()
    if kind is bool or is_numpy(kind, "bool_"):
        return (kind(not value),), ()
    if kind is float:
        if not math.isfinite(value):
            return (math.copysign(10.0 * _FAR, value if value == value else 1.0),), ()
        near = (value * _STEP_DOWN, value * _STEP_UP) if value * _STEP_DOWN != value else (_FIRST, -_FIRST)
        return near, (value * _FAR or float(_FAR),)
    if kind is complex:
        return (value * _STEP_DOWN if value * _STEP_DOWN != value else complex(_FIRST),), (value * _FAR or _FAR + 0j,)
    if kind is int:
        return (value + 1, value - 1), (value + _FAR,)
    base = next((base for base in (int, float, complex) if issubclass(kind, base)), None)
    plain = base(value) if base is not None else value.item()
    if type(plain) not in (int, float, complex):
        return (), ()
    near, far = _moves(plain)
    return _made(kind, near), _made(kind, far)


def _made(kind: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Make values of a class, those that it takes: 128 is no `int8`, and a class of the user may refuse in any way."""
    found = []
    for value in values:
        with contextlib.suppress(Exception):
            found.append(kind(value))
    return tuple(found)


def _in_tuple(values: tuple[Any, ...]) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """The values in a tuple and in tuples within it: path, value, and the tuple with another value there."""
    names: Sequence[str] = getattr(type(values), "_fields", ())
    for index, value in enumerate(tuple.__iter__(values)):
        path = f".{names[index]}" if names else f"[{index}]"

        def rebuilt(moved: Any, index: int = index) -> Any:
            items = (*values[:index], moved, *values[index + 1 :])
            return type(values)._make(items) if names else items  # type: ignore[attr-defined]

        if _is_listed(value):
            yield path, value, rebuilt
        elif issubclass(type(value), tuple):
            for inner, item, within in _in_tuple(value):
                yield path + inner, item, functools.partial(_after, within, rebuilt)


def _after(first: Callable[[Any], Any], second: Callable[[Any], Any], value: Any) -> Any:
    return second(first(value))
