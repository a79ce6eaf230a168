"""Host values that a step reads: noted at capture, compared at replay, never silently frozen.

Python runs only when a step is recorded. A loss weight in a closure, a temperature in a global, a flag on `self` are
read once and are constants from then on. So every number, boolean and string that the step's code can name is noted
when it is captured (closure cells, the globals its code names, the bound object, and one level into objects, dicts,
lists and dataclasses found there; the functions it calls, too), and so is which tensor or object each name stands for.

Reading them again at each replay must cost next to nothing: values are grouped by where they are stored, and each
group is read and compared in one go.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.frames import is_user
from stepgraph.state.reach import names_in
from stepgraph.state.untouched import Untouched

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_UNWATCHED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_NAMESPACES = ("argparse", "types")
_MAX_FUNCTIONS = 64
_MAX_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """A watched value that is not what it was."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.now}"


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value) if _is_plain(value) else f"<{type(value).__name__} at {id(value):#x}>"


Place = tuple[Callable[[Any, Any], Any], Any, Any]
"""Where a value is: the function that reads it, what it is read from, and by which key."""


class _Group:
    """Values stored side by side: what each is called, where it is, and what it was."""

    __slots__ = ("names", "places", "plain", "tensors", "values")

    def __init__(self, names: Sequence[str], places: Sequence[Place], *, plain: bool) -> None:
        self.names, self.places, self.plain = tuple(names), tuple(places), plain
        self.values = self.read()
        self.tensors = [(v, v.data_ptr()) for v in self.values if isinstance(v, torch.Tensor)] if not plain else []

    def read(self) -> tuple[Any, ...]:
        return tuple([read(where, key) for read, where, key in self.places])

    def expect(self, row: Untouched) -> None:
        ways = {read for read, _, _ in self.places}
        containers = {id(where) for _, where, _ in self.places}
        if not self.tensors and ways == {operator.getitem} and len(containers) == 1:
            keys = [key for _, _, key in self.places]
            row.items(self.places[0][1], dict(zip(keys, self.values, strict=True)))
        elif not self.tensors and ways == {getattr}:
            for (_, where, key), value in zip(self.places, self.values, strict=True):
                row.attribute(where, key, value)
        else:
            row.ask(self.holds)

    def holds(self) -> bool:
        try:
            now = self.read()
            if self.plain:
                return bool(now == self.values)
            return all(map(operator.is_, now, self.values)) and all(t.data_ptr() == p for t, p in self.tensors)
        except (LookupError, AttributeError, ValueError, RuntimeError):  # gone, or no longer a plain value
            return False

    def changes(self) -> Iterator[Change]:
        try:
            now = self.read()
        except (LookupError, AttributeError, ValueError):
            yield Change(self.names[0], _told(self.values[0]), "gone")
            return
        moved = {id(t) for t, p in self.tensors if t.data_ptr() != p}
        for name, one, two in zip(self.names, self.values, now, strict=False):
            if id(two) in moved:
                yield Change(name, "a tensor", "the same tensor at another address")
            elif one is not two and not (self.plain and type(one) is type(two) and one == two):
                yield Change(name, _told(one), _told(two))


class Watch:
    """The watched values of one step, as they were when it was made."""

    def __init__(
        self,
        function: Callable[..., Any],
        ignore: Collection[str] = (),
        modules: Mapping[str, torch.nn.Module] | None = None,
        read: Mapping[tuple[str, int], Callable[[], Any]] | None = None,
    ) -> None:
        self._ignore = frozenset(ignore)
        self._groups: list[_Group] = []
        self._seen: set[int] = set()
        self._functions = 0
        self._follow(function)
        self._add_modules(modules or {})
        for (name, _), reader in (read or {}).items():
            if name not in self._ignore:
                self._groups.append(_Group([name], [(_answer, reader, None)], plain=_is_plain(reader())))

    def __len__(self) -> int:
        return sum(len(group.names) for group in self._groups)

    def changed(self) -> list[Change]:
        """What is not as it was; empty in next to no time when nothing changed."""
        found: list[Change] = []
        for group in self._groups:
            if not group.holds():
                found += group.changes()
        return found

    def expect(self, row: Untouched) -> None:
        """What `changed` comes down to."""
        for group in self._groups:
            group.expect(row)

    # -- finding what to watch

    def _follow(self, function: Any) -> None:
        """Watch what a callable can name."""
        if id(function) in self._seen or self._functions >= _MAX_FUNCTIONS:
            return
        self._seen.add(id(function))
        if isinstance(function, functools.partial):
            self._follow(function.func)
            self._add_items("partial argument", function.keywords)
            for name, value in [*enumerate(function.args), *function.keywords.items()]:
                self._look_into(str(name), value)
        elif isinstance(function, types.MethodType):
            self._add_object("self", function.__self__)
            self._follow(function.__func__)
            self._add_named_by(function.__func__, function.__self__)
        elif isinstance(function, types.FunctionType):
            if is_user(function.__code__.co_filename):
                self._functions += 1
                self._add_function(function)
        elif not isinstance(function, torch.nn.Module):
            self._seen.discard(id(function))
            self._look_into(type(function).__name__, function)

    def _add_function(self, function: types.FunctionType) -> None:
        names = function.__code__.co_freevars
        cells = {name: cell for name, cell in zip(names, function.__closure__ or (), strict=True) if _filled(cell)}
        self._add_named(
            {name: cell.cell_contents for name, cell in cells.items()},
            lambda chosen: [(getattr, cells[name], "cell_contents") for name in chosen],
        )
        scope = function.__globals__
        named = {name: scope[name] for name in sorted(names_in(function.__code__)) if name in scope}
        self._add_named(named, lambda chosen: _items(scope, chosen))
        defaults = _defaults(function)
        self._add_named(defaults, lambda chosen: _items(defaults, chosen))
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._follow(wrapped)

    def _add_named_by(self, method: Any, owner: Any) -> None:
        """What a method reads through `self`: one level into the attributes it names, and the methods it calls."""
        if not isinstance(method, types.FunctionType) or not is_user(method.__code__.co_filename):
            return
        for name in sorted(names_in(method.__code__)):
            called = getattr(type(owner), name, None)
            called = called.fget if isinstance(called, property) else called
            if name in getattr(owner, "__dict__", {}):
                self._look_into(f"self.{name}", vars(owner)[name])
            elif isinstance(called, types.FunctionType) and id(called) not in self._seen:
                self._follow(called)
                if id(called) in self._seen:  # not past the limit of functions
                    self._add_named_by(called, owner)

    def _add_named(self, values: Mapping[str, Any], find: Callable[[list[str]], list[Place]]) -> None:
        """Variables: their values, which objects they stand for, and one level into those."""
        self._add_groups(values, str, find)
        for name, value in values.items():
            self._look_into(name, value)

    def _look_into(self, name: str, value: Any) -> None:
        """What a name stands for: a function is followed, an object looked into, and its `__call__` followed."""
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._follow(value)
        elif name not in self._ignore:
            self._add_object(name, value)
            call = vars(type(value)).get("__call__")
            if isinstance(call, types.FunctionType):
                self._follow(call)
                self._add_named_by(call, value)

    def _add_object(self, name: str, value: Any) -> None:
        """One level into an object, a dict, a list or a dataclass."""
        if isinstance(value, (*_PLAIN, *_UNWATCHED, torch.Tensor)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            if len(value) <= _MAX_ITEMS:
                self._add_items(name, value)
            self._add_length(name, value)
        elif isinstance(value, (list, set)):
            self._add_length(name, value)
            if isinstance(value, list) and len(value) <= _MAX_ITEMS:
                self._add_items(name, value)
        elif not hasattr(value, "__dict__") and _is_users(type(value)):
            slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
            self._add_groups(
                {slot: getattr(value, slot) for slot in slots if not slot.startswith("_") and hasattr(value, slot)},
                lambda slot: f"{name}.{slot}",
                lambda chosen: [(getattr, value, name) for name in chosen],
            )
        elif isinstance(value, torch.nn.Module) or _is_users(type(value)):
            attributes = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("__")}
            if isinstance(value, torch.nn.Module):  # its numbers; modules, parameters and buffers have a guard
                attributes = {k: v for k, v in attributes.items() if _is_module_number(value, k, v)}
            self._add_groups(
                attributes,
                lambda key: f"{name}.{key}",
                lambda chosen: _items(vars(value), chosen),
            )

    def _add_modules(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """The numbers of the modules that the step calls, in one group: dropout's p, a norm's eps, a user's flag."""
        slots = {
            f"{path}.{key}": (vars(module), key)
            for path, module in modules.items()
            if id(module) not in self._seen
            for key, value in vars(module).items()
            if _is_module_number(module, key, value)
        }
        chosen = [spot for name, spot in slots.items() if name not in self._ignore]
        if chosen:
            names = [name for name in slots if name not in self._ignore]
            self._groups.append(_Group(names, [(operator.getitem, *spot) for spot in chosen], plain=True))

    def _add_items(self, name: str, items: Mapping[Any, Any] | list[Any]) -> None:
        self._add_groups(
            dict(enumerate(items)) if isinstance(items, list) else items,
            lambda key: f"{name}[{key!r}]",
            lambda chosen: _items(items, chosen),
        )

    def _add_length(self, name: str, value: Collection[Any]) -> None:
        if f"len({name})" not in self._ignore and name not in self._ignore:
            self._groups.append(_Group([f"len({name})"], [(_length, value, None)], plain=True))

    def _add_groups(
        self,
        values: Mapping[Any, Any],
        spell: Callable[[Any], str],
        find: Callable[[list[Any]], list[Place]],
    ) -> None:
        """Split values that are stored together into plain ones and objects."""
        watched = {k: v for k, v in values.items() if not isinstance(v, _UNWATCHED) and spell(k) not in self._ignore}
        for plain in (True, False):
            chosen = [k for k, v in watched.items() if isinstance(v, _PLAIN) == plain]
            if chosen:
                self._groups.append(_Group([spell(k) for k in chosen], find(chosen), plain=plain))


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """The objects that a function's parameters stand for by default; plain ones cannot change."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    named = dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})
    return {name: value for name, value in named.items() if not isinstance(value, _PLAIN)}


def _answer(reader: Callable[[], Any], _: None) -> Any:
    return reader()


def _length(value: Collection[Any], _: None) -> int:
    return len(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _items(items: Mapping[Any, Any] | list[Any], keys: Sequence[Any]) -> list[Place]:
    return [(operator.getitem, items, key) for key in keys]


def _is_module_number(module: torch.nn.Module, key: str, value: Any) -> bool:
    """Whether an attribute is a number that a forward may read; sizes of torch's own layers never change."""
    if key.startswith("_") or key == "training" or not isinstance(value, _PLAIN):
        return False
    return isinstance(value, float) or _is_users(type(module))


def _is_users(kind: type) -> bool:
    """Whether a class holds the user's values: their own, a library's, a namespace; not torch's or a standard one."""
    root = kind.__module__.partition(".")[0]
    return root in _NAMESPACES or root not in (*sys.stdlib_module_names, "torch", "numpy", "stepgraph")
