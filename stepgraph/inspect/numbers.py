"""The numbers that a step depends on, each with a way to move it and to put it back.

They come from where the watch looks (`values.walk`): variables, attributes, slots, items, defaults, context variables,
tuples of numbers, environment variables that the code spells. The numbers of optimizers are added, and the plain
arguments of the call. A number is moved a little, so that a probability stays one, and far, so that `if step > 500` is
noticed. Tensors of one element are listed with them: they are what a number should be if it has to change.
"""

from __future__ import annotations

import contextvars
import copy
import enum
import functools
import gc
import math
import os
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.plain import MISSING, is_numpy
from stepgraph.step.rehearsal import Rehearsal
from stepgraph.values.naming import Label
from stepgraph.values.parts import Place, attribute_of, by_identity, default_of, in_slot, item_at, result_of
from stepgraph.values.walk import MAX_ITEMS, Walk, Wants

_STEP_DOWN = 0.875
_STEP_UP = 1.125
"""Exact in binary, and small enough for a probability, a momentum or a temperature."""
_FIRST = 0.125
"""Where a zero is moved to."""
_FAR = 1000
_Undo = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Number:
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
    is_tensor: bool = False
    is_on_device: bool = False
    """True for a tensor in the memory of the step's device: a graph reads it at each replay."""


@dataclass(frozen=True, slots=True)
class HostValues:
    """The numbers of a step, and what restores all host values that it can name."""

    numbers: list[Number]
    restore: Callable[[], None]
    """Undoes what the step's own Python has changed: a recording runs it once more."""
    is_cut_short: bool
    """True if not all were looked at, because there are too many objects."""


def host_values(rehearsal: Rehearsal, env: Mapping[str, str]) -> HostValues:
    """Find the numbers of a step."""
    finder = _Finder(rehearsal)
    walk = Walk(finder, rehearsal.ran)
    walk.go(rehearsal.function, rehearsal.modules)
    found = [
        Number(name, leaf, *_moves(leaf), argument=index)
        for index, (name, leaf) in enumerate(rehearsal.arguments)
        if _is_number(leaf) and _moves(leaf)[0]
    ]
    found += finder.numbers
    for optimizer, _ in rehearsal.optimizers:
        found += _of_optimizer(finder.names.get(id(optimizer), type(optimizer).__name__), optimizer, rehearsal)
    spelled = walk.names.spelled
    named = {*env, *(name for name in os.environ if name in spelled and ("environ" in spelled or "getenv" in spelled))}
    for name in sorted(named):
        found += _of_environment(name, env.get(name))
    unique = {number.name: number for number in reversed(found)}  # an argument is also in the walk
    found = [number for number in found if unique[number.name] is number]
    return HostValues(found, finder.restore, walk.is_cut_short)


class _Finder:
    """Visits a walk, and collects numbers."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.numbers: list[Number] = []
        self.names: dict[int, str] = {}
        """The spelling of each optimizer, by id."""
        self._places: list[Place] = []
        self._contents: list[tuple[Any, Any]] = []
        """Containers and what they hold."""
        self._owns = rehearsal.backend.owns
        self._classes: dict[int, type] = {}
        """Classes by the id of the dict that holds their attributes."""

    def put(self, place: Place) -> bool:
        name, value = str(place.label), place.value
        self._places.append(place)
        if _is_number(value):
            self.numbers.append(self._number(name, value, place))
        elif issubclass(type(value), tuple):
            for path, number, rebuilt in _in_tuple(value):
                self.numbers.append(self._number(name + path, number, place, rebuilt))
        elif _is_tensor_number(value):
            self.numbers.append(_of_tensor(name, value, self._owns(value)))
        return True

    def takes(self, value: Any) -> bool:
        return False

    def miss(self, label: Label, where: Mapping[Any, Any], wants: Wants) -> None:
        """What is not there cannot be moved."""

    def enter(self, label: Label, value: Any, owner: Any, is_users: bool, wants: Wants | None) -> None:
        if issubclass(type(value), Optimizer):
            self.names[id(value)] = str(label)
        elif issubclass(type(value), type):
            self._classes |= {id(body): value for body in gc.get_referents(vars(value))}
        elif type(value) in (list, dict, set, deque) and is_users and len(value) <= MAX_ITEMS:
            self._contents.append((value, copy.copy(value)))

    def restore(self) -> None:
        """Write back every value that is another object now, and the contents of containers."""
        for value, before in self._contents:
            if not _holds_the_same(value, before):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(before)
        for place in self._places:
            if place.read(place.where, place.key) is not place.value and place.value is not MISSING:
                put, _ = self._writer(place)
                if put is not None:
                    put(place.value)

    def _number(
        self, name: str, value: Any, place: Place, rebuilt: Callable[[Any], Any] = lambda value: value
    ) -> Number:
        put, obstacle = self._writer(place)
        if put is None or not _moves(value)[0]:
            return Number(name, value, obstacle=obstacle or f"a {type(value).__name__} cannot be given another value")
        write = put
        return Number(name, value, *_moves(value), put=lambda moved: write(rebuilt(moved)))

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


def _of_optimizer(name: str, optimizer: Optimizer, rehearsal: Rehearsal) -> Iterator[Number]:
    """The numbers in an optimizer's parameter groups."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            spelled = f"{name}.param_groups[{index}][{key!r}]"
            if key == "params":
                continue
            if _is_tensor_number(value):
                yield _of_tensor(spelled, value, rehearsal.backend.owns(value))
            elif _is_number(value):
                yield Number(spelled, value, *_moves(value), put=_in_group(group, key), optimizer=optimizer)
            elif issubclass(type(value), tuple):
                for path, number, rebuilt in _in_tuple(value):
                    put = _in_group(group, key, rebuilt)
                    yield Number(spelled + path, number, *_moves(number), put=put, optimizer=optimizer)


def _in_group(
    group: dict[str, Any], key: str, rebuilt: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], _Undo]:
    def put(value: Any) -> _Undo:
        before = group[key]
        group[key] = rebuilt(value)
        return lambda: group.__setitem__(key, before)

    return put


def _of_tensor(name: str, tensor: torch.Tensor, is_on_device: bool) -> Number:
    value = "a tensor" if is_on_device else tensor.item()

    def put(moved: Any) -> _Undo:
        before = tensor.data.clone()
        tensor.data.fill_(moved)
        return lambda: tensor.data.copy_(before)

    moves = ((), ()) if is_on_device else _moves(value)
    return Number(name, value, *moves, put=put, is_tensor=True, is_on_device=is_on_device)


def _of_environment(name: str, wanted: str | None) -> Iterator[Number]:
    before = os.environ.get(name)
    if wanted is None:
        number = _parsed(before or "")
        if number is None:
            return
        near, far = (tuple(map(str, moves)) for moves in _moves(number))
    else:
        near, far = (wanted,), ()

    def put(value: str) -> _Undo:
        os.environ[name] = value
        if before is None:
            return lambda: os.environ.pop(name, None)
        return lambda: os.environ.__setitem__(name, before)

    yield Number(f"os.environ[{name!r}]", before, near, far, put=put)


def _parsed(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _is_number(value: Any) -> bool:
    """Check for a number, also of a subclass or of numpy; flags are not numbers."""
    kind = type(value)
    return (issubclass(kind, (int, float)) and kind is not bool) or is_numpy(kind, "number")


def _is_tensor_number(value: Any) -> bool:
    is_tensor = issubclass(type(value), torch.Tensor) and not issubclass(type(value), torch.nn.Parameter)
    return is_tensor and value.numel() == 1 and not value.requires_grad and value.layout is torch.strided


def _moves(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values, near and far, that a number is moved to; none for classes whose values cannot be made freely."""
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return tuple(member for member in kind if member is not value)[:2], ()
    if kind is float:
        if not math.isfinite(value):
            return (math.copysign(10.0 * _FAR, value if value == value else 1.0),), ()
        near = (value * _STEP_DOWN, value * _STEP_UP) if value * _STEP_DOWN != value else (_FIRST, -_FIRST)
        return near, (value * _FAR or float(_FAR),)
    if kind is int:
        return (value + 1, value - 1), (value + _FAR,)
    if kind is bool:
        return (not value,), ()
    base = next((base for base in (int, float) if issubclass(kind, base)), None)
    plain = base(value) if base is not None else value.item()
    if type(plain) not in (int, float):
        return (), ()
    try:
        return tuple(kind(one) for one in _moves(plain)[0]), ()
    except Exception:  # noqa: BLE001 (a class of the user may refuse in any way)
        return (), ()


def _in_tuple(values: tuple[Any, ...]) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """The numbers in a tuple and in tuples within it: path, number, and the tuple with another number there."""
    names: Sequence[str] = getattr(type(values), "_fields", ())
    for index, value in enumerate(tuple.__iter__(values)):
        path = f".{names[index]}" if names else f"[{index}]"

        def rebuilt(moved: Any, index: int = index) -> Any:
            items = (*values[:index], moved, *values[index + 1 :])
            return type(values)._make(items) if names else items  # type: ignore[attr-defined]

        if _is_number(value):
            yield path, value, rebuilt
        elif issubclass(type(value), tuple):
            for inner, number, within in _in_tuple(value):
                yield path + inner, number, functools.partial(_after, within, rebuilt)


def _after(first: Callable[[Any], Any], second: Callable[[Any], Any], value: Any) -> Any:
    return second(first(value))
