"""`Holdings` is what some objects hold: a tree of containers, to any depth, with tensors as its leaves.

Looked into are modules, optimizers, schedulers and scalers, the results of `functools.lru_cache`, the dicts, lists,
sets and deques in them, and the attributes of tensors. Of other objects of the user's, such as a trainer that also
holds the data, the attributes are kept and not looked into: what a step names of them is given as well. Objects of
torch and Python of other kinds, and stepgraph's own, are leaves.

Of each container and of each object's attributes a shallow copy is kept. `restore` puts back those that have changed,
in place and by identity, so that all who hold one of them see it as it was.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stepgraph.core.frames import is_engines, is_users
from stepgraph.core.plain_values import MISSING, attributes_of, items_of, results_of
from stepgraph.core.tree import attributes_of as named_values_of
from stepgraph.engine.guards.host_values.parts import Place, attribute_of

__all__ = ["STATEFUL", "Holdings", "Kept", "kept_as_it_is"]

STATEFUL = (LRScheduler, torch.amp.GradScaler)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_LOOKED_INTO = (torch.Tensor, torch.nn.Module, Optimizer, *STATEFUL)
_MAX_OBJECTS = 100_000
_MAX_ITEMS = 4096
"""The items of a larger container are taken for data: it is restored, and they are not looked into."""
_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "hooks" in name)
"""Hooks are the engine's too: a probe puts some there, and takes them away itself."""
_SKIPPED = _HOOKS | frozenset(name for name in dir(Optimizer) if "hooks" in name) | {"_compiled_call_impl"}
_THEIRS = ("torch.nn.parallel.", "torch.distributed.")
"""Objects of these packages keep state of C++ in step with their attributes: only parts and state are looked into."""
_PARTS = ("_parameters", "_buffers", "_modules", "state", "param_groups")
_RUNNING = (
    "threading",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "io",
    "_io",
    "socket",
    "queue",
    "subprocess",
    "logging",
)
_DATA = "torch.utils.data."
"""Objects of these run on by themselves: with their attributes put back they would contradict themselves."""


class Holdings:
    """The containers and tensors that named objects hold, as they are now."""

    def __init__(
        self, roots: Iterable[tuple[str, Any]], variables: Iterable[Place] = (), *, without: Iterable[Any] = ()
    ) -> None:
        """`variables` are globals and closed-over ones, `without` are objects that are not looked into."""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """Each once, by the first name that leads to it."""
        self._kept: list[Kept] = [_Variable(place) for place in variables]
        self._seen = {id(one): one for one in without}
        todo = deque(roots)
        while todo and len(self._seen) < _MAX_OBJECTS:
            name, value = todo.popleft()
            if id(value) not in self._seen and _is_entered(value):
                self._seen[id(value)] = value
                todo += self._enter(name, value)

    def _enter(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keep what changes in place, and return what is looked into next, by name."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            self.tensors.append((name, value))
        if issubclass(kind, functools._lru_cache_wrapper):
            yield from ((f"{name}()", result) for result in results_of(value))
        elif issubclass(kind, dict):
            self._kept.append(_Dict(value))
            if dict.__len__(value) <= _MAX_ITEMS:
                yield from ((_item(name, key), item) for key, item in dict.items(value))
        elif issubclass(kind, _CONTAINERS):
            items = list(items_of(value))
            if not issubclass(kind, (tuple, frozenset)):
                self._kept.append(_Items(value, items))
            if len(items) <= _MAX_ITEMS:
                yield from ((f"{name}[{index}]", item) for index, item in enumerate(items))
        yield from self._attributes(name, value, attributes_of(value))

    def _attributes(self, name: str, value: Any, own: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if own is not None and f"{kind.__module__}.".startswith(_THEIRS):
            yield from ((f"{name}.{key}", own[key]) for key in _PARTS if key in own)
        elif own is not None:
            is_looked_into = issubclass(kind, _LOOKED_INTO)
            skipped = _SKIPPED if is_looked_into else frozenset[str]()
            self._kept.append(_Attributes(own, skipped))
            if is_looked_into:
                yield from ((f"{name}.{key}", item) for key, item in list(own.items()) if key not in skipped)
        if is_users(kind) and any("__slots__" in vars(base) for base in kind.__mro__):
            held = named_values_of(value)
            self._kept.append(_Slots(value, {key: held[key] for key in held.keys() - (own or {}).keys()}))

    def restore(self) -> None:
        """Put back what has changed since."""
        for kept in self._kept:
            kept.restore()


def _is_entered(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, (type, types.ModuleType)) or is_engines(value):
        return False
    if issubclass(kind, (*_LOOKED_INTO, *_CONTAINERS, functools._lru_cache_wrapper, types.FunctionType)):
        return True
    modules = [str(base.__module__) for base in kind.__mro__]
    runs_on = any(name.partition(".")[0] in _RUNNING or name.startswith(_DATA) for name in modules)
    return is_users(kind) and not runs_on


def _item(name: str, key: Any) -> str:
    owner, _, part = name.rpartition(".")
    if part in _PARTS[:3]:
        return f"{owner}.{key}"
    return f"{name}[{key!r}]" if type(key) in (str, int) else f"{name}[...]"


def kept_as_it_is(container: Any) -> Kept:
    """A dict, a list, a deque, a set or a variable, as it is now."""
    if type(container) is Place:
        return _Variable(container)
    if type(container) is dict:
        return _Attributes(container)
    return _Dict(container) if issubclass(type(container), dict) else _Items(container, list(items_of(container)))


def _is_ours(value: Any) -> bool:
    return value is not MISSING and is_engines(value)


class Kept:
    """A container, and what it held."""

    def restore(self) -> None:
        """Put it back, if it has changed."""
        raise NotImplementedError


class _Dict(Kept):
    def __init__(self, where: dict[Any, Any]) -> None:
        self._where: Any = where
        self._base: Any = OrderedDict if isinstance(where, OrderedDict) else dict
        self._before = list(self._base.items(where))  # past subclasses that note reads

    def restore(self) -> None:
        where, base = self._where, self._base
        now = list(base.items(where))
        if len(now) == len(self._before) and all(
            key is old and value is before for (key, value), (old, before) in zip(now, self._before, strict=True)
        ):
            return
        for key, _ in now:
            base.pop(where, key)
        for key, value in self._before:
            base.__setitem__(where, key, value)


class _Items(Kept):
    """A list, a deque or a set."""

    def __init__(self, where: Any, items: list[Any]) -> None:
        self._where: Any = where
        self._base: Any = next(base for base in (list, deque, set) if isinstance(where, base))
        self._before = items

    def restore(self) -> None:
        now = list(items_of(self._where))
        if len(now) != len(self._before) or any(
            one is not before for one, before in zip(now, self._before, strict=True)
        ):
            self._base.clear(self._where)
            (self._base.update if self._base is set else self._base.extend)(self._where, self._before)


class _Variable(Kept):
    """A global of a module, or the variable in a cell."""

    def __init__(self, place: Place) -> None:
        self._where, self._key, self._before = place.where, place.key, place.value

    def restore(self) -> None:
        is_cell = type(self._where) is types.CellType
        now = attribute_of(self._where, "cell_contents") if is_cell else self._where.get(self._key, MISSING)
        if now is self._before or is_engines(now) or is_engines(self._before):  # so is a missing one
            return
        if is_cell:
            self._where.cell_contents = self._before
        else:
            self._where[self._key] = self._before


class _Attributes(Kept):
    """The attributes of an object; those that the engine has put there, or has taken away, are left alone."""

    def __init__(self, where: dict[str, Any], skipped: frozenset[str] = frozenset()) -> None:
        self._where, self._before, self._skipped = where, dict(where), skipped

    def restore(self) -> None:
        for key in [*self._before, *(self._where.keys() - self._before.keys())]:
            now, before = self._where.get(key, MISSING), self._before.get(key, MISSING)
            if now is before or key in self._skipped or _is_ours(now) or _is_ours(before):
                continue
            if before is MISSING:
                del self._where[key]
            else:
                self._where[key] = before


class _Slots(Kept):
    def __init__(self, owner: Any, before: Mapping[str, Any]) -> None:
        self._owner, self._before = owner, before

    def restore(self) -> None:
        for key, value in self._before.items():
            if getattr(self._owner, key, MISSING) is not value:
                object.__setattr__(self._owner, key, value)
