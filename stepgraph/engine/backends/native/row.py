"""One fast check that nothing changed since the last replay.

A guard reports what changed, by name, with its own code. Most calls find no change, and for these every Python function
costs: when a step begins, the host's caches are cold. So each guard also adds its expectations to a row: objects that
must be identical, lengths of containers, and functions that must return True. The row is checked in C: by Python's own
loops, or, if it was built, by a library that also reads the facts about tensors. The row compares objects by identity,
so it may fail although nothing changed; then the guards are asked. It never passes if a guard would report a change.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch

from stepgraph.core.ambient import compiler_guards
from stepgraph.engine.backends.native.library import native_row

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Classes whose attributes cannot differ from what torch stores in the tensor."""


Layout = tuple[torch.Tensor, int, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A tensor, its address, dtype, shape, strides, and dispatch keys."""
Gradient = tuple[torch.Tensor, torch.Tensor | None, bool]
"""A parameter, its gradient, and its `requires_grad`."""
_MISSING = object()
_version_of: Callable[[dict[Any, Any]], Any] = getattr(compiler_guards, "dict_version", lambda _: object())
"""The version of a dictionary; always another where torch cannot tell."""


class GuardRow:
    """A row of expectations."""

    __slots__ = (
        *("_attributes", "_containers", "_items", "_keys", "_lengths"),
        *("_classes", "_held", "_names", "_objects", "_owners", "_questions", "_sized"),
        *("_columns", "_gradients", "_layouts", "_otherwise", "_unwritten"),
    )

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._attributes: list[Any] = []
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._items: list[Any] = []
        self._objects: list[Any] = []
        self._classes: list[type] = []
        self._held = _Dictionaries()
        self._sized: list[Sized] = []
        self._lengths: list[int] = []
        self._questions: list[Callable[[], bool]] = []
        self._columns: list[tuple[Sequence[Mapping[Any, Any]], Any, list[Any]]] = []
        self._layouts: list[Layout] = []
        self._gradients: list[Gradient] = []
        self._otherwise: list[Callable[[], bool]] = []
        self._unwritten: list[tuple[Mapping[Any, Any], Mapping[Any, Any]]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Expect an attribute to be this object."""
        self._owners.append(owner)
        self._names.append(name)
        self._attributes.append(value)

    def class_of(self, value: Any, kind: type) -> None:
        """Expect an object to be of exactly this class."""
        self._objects.append(value)
        self._classes.append(kind)

    def item(self, container: Any, key: Any, value: Any) -> None:
        """Expect the item at a key to be this object."""
        self._containers.append(container)
        self._keys.append(key)
        self._items.append(value)

    def items(self, container: Any, values: Mapping[Any, Any]) -> None:
        """Expect the items at these keys to be these objects."""
        if len(values) > 1:
            read = operator.itemgetter(*values)
            self.ask(functools.partial(_are_there, read, container, tuple(values.values())))
        else:
            for key, value in values.items():
                self.item(container, key, value)

    def held(self, container: Mapping[Any, Any], values: Mapping[Any, Any], length: int | None = None) -> None:
        """Expect a dictionary, or the attributes of a class, to hold these objects, and to have this length.

        The version of an empty one may stay as it is when `update` fills it (Python 3.12): it is not asked for.
        """
        dictionary = container if isinstance(container, dict) else gc.get_referents(container)[0]
        if isinstance(dictionary, dict) and dictionary:
            self._held.add(dictionary, values, length)
            return
        for key, value in values.items():
            self.item(container, key, value)
        if length is not None:
            self.length(container, length)

    def contents(self, container: Mapping[Any, Any], values: Mapping[Any, Any]) -> None:
        """Expect a dictionary to hold these objects and no others."""
        self.held(container, values, len(values))

    def column(self, containers: Sequence[dict[Any, Any]], key: Any, values: list[Any]) -> None:
        """Expect the items at one key of many dictionaries to be these objects."""
        self._columns.append((containers, key, values))

    def layouts(self, expected: Iterable[Layout], otherwise: Iterable[Callable[[], bool]]) -> None:
        """Expect tensors to have these addresses and forms. `otherwise` are the same checks without the library."""
        self._layouts += expected
        self._otherwise += otherwise

    def gradients(self, expected: Iterable[Gradient], otherwise: Callable[[], bool]) -> None:
        """Expect parameters to have these gradients and flags. `otherwise` is the same check without the library."""
        self._gradients += expected
        self._otherwise.append(otherwise)

    def unwritten(self, expected: Sequence[tuple[dict[Any, Any], Mapping[Any, Any]]]) -> None:
        """Expect dictionaries to hold exactly these objects. Without the library, check that none was written to."""
        self._unwritten += expected
        for where, _ in expected:
            if not where:  # `held` says why
                self.length(where, 0)
        hold = functools.partial(_hold_just, expected)
        versions = _question_of_versions([where for where, _ in expected]) if hold() else None
        self._otherwise.append(versions or hold)

    def length(self, container: Sized, length: int) -> None:
        """Expect a container to have this length."""
        self._sized.append(container)
        self._lengths.append(length)

    def ask(self, question: Callable[[], bool]) -> None:
        """Expect a function to return True."""
        self._questions.append(question)

    def question(self) -> Callable[[], bool]:
        """Return a function that checks every expectation. The row must be complete."""
        make = native_row()
        if make is None:
            return self.holds
        tensors = (*(layout[0] for layout in self._layouts), *(gradient[0] for gradient in self._gradients))
        is_plain = all(type(tensor) in PLAIN_TENSORS for tensor in tensors)
        items = [*zip(self._containers, self._keys, self._items, strict=True)]
        lengths = [*zip(self._sized, self._lengths, strict=True)]
        for containers, key, values in self._columns:
            items += ((container, key, value) for container, value in zip(containers, values, strict=True))
        unwritten = ((container, copy, len(copy)) for container, copy in self._unwritten)
        for container, copy, length in (*self._held.expected(), *unwritten):
            items += ((container, key, value) for key, value in copy.items())
            lengths += [(container, length)] if length is not None else []
        return make(
            tuple(zip(self._owners, self._names, self._attributes, strict=True)),
            tuple(items),
            tuple(lengths),
            tuple(zip(self._objects, self._classes, strict=True)),
            tuple(self._layouts) if is_plain else (),
            tuple(self._gradients) if is_plain else (),
            (*self._questions, *(() if is_plain else self._otherwise)),
        )

    def holds(self) -> bool:
        """Check every expectation in Python."""
        try:
            return (
                all(map(operator.is_, map(getattr, self._owners, self._names), self._attributes))
                and all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._items))
                and self._held.hold()
                and list(map(len, self._sized)) == self._lengths
                and list(map(type, self._objects)) == self._classes
                and all(list(map(operator.itemgetter(key), where)) == values for where, key, values in self._columns)
                and all(map(operator.call, self._otherwise))
                and all(map(operator.call, self._questions))
            )
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):  # removed, or no longer readable
            return False


class _Dictionaries:
    """Dictionaries whose items must stay what they are.

    A dictionary has a version, which is another one after each write. So items are compared only after a write: most
    are attributes of classes and globals of libraries, which nothing writes to.
    """

    __slots__ = ("_copies", "_index", "_lengths", "_versions", "_where")

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._where: list[dict[Any, Any]] = []
        self._copies: list[dict[Any, Any]] = []
        self._lengths: list[int | None] = []
        self._versions: list[Any] = []

    def add(self, where: dict[Any, Any], values: Mapping[Any, Any], length: int | None) -> None:
        index = self._index.setdefault(id(where), len(self._where))
        if index == len(self._where):
            self._where.append(where)
            self._copies.append({})
            self._lengths.append(None)
            self._versions.append(None)
        self._copies[index].update(values)
        if length is not None:
            self._lengths[index] = length

    def expected(self) -> Iterable[tuple[dict[Any, Any], Mapping[Any, Any], int | None]]:
        return zip(self._where, self._copies, self._lengths, strict=True)

    def hold(self) -> bool:
        versions = list(map(_version_of, self._where))
        if versions == self._versions:
            return True
        for now, then, expected in zip(versions, self._versions, self.expected(), strict=True):
            if now != then and not _hold(*expected):
                return False
        self._versions = versions  # as read before the items: a write since then makes another
        return True


def _hold(where: dict[Any, Any], values: Mapping[Any, Any], length: int | None) -> bool:
    found = map(dict.get, itertools.repeat(where), values, itertools.repeat(_MISSING))
    return (length is None or dict.__len__(where) == length) and all(map(operator.is_, found, values.values()))


def is_compared_by_identity(value: Any) -> bool:
    """Check that `==` of this object with another of its kind is either False or raises."""
    if isinstance(value, torch.Tensor):
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() > 1
    return value is None or operator.is_(type(value).__eq__, object.__eq__)


def _hold_just(expected: Sequence[tuple[dict[Any, Any], Mapping[Any, Any]]]) -> bool:
    return all(
        len(where) == len(values) and all(dict.get(where, key) is value for key, value in values.items())
        for where, values in expected
    )


def _question_of_versions(dictionaries: list[dict[Any, Any]]) -> Callable[[], bool] | None:
    """Make a check that no dictionary was written to, by guards of torch's compiler, or return None without those."""
    for stack in ((None,), ()):  # later versions take a Python stack for their messages
        try:
            root = compiler_guards.RootGuardManager()
            kind = _guard_kind()
            for index, where in enumerate(dictionaries):
                root.list_getitem_manager(index, "", where, kind).add_dict_version_guard(where, [""], *stack)
            if root.check(dictionaries):
                return functools.partial(root.check, dictionaries)
        except (AttributeError, TypeError, RuntimeError, ValueError, KeyError):
            continue
    return None


def _guard_kind() -> Any:
    # the compiler's Python part is imported as soon as an optimizer is made; importing it here is too slow
    return sys.modules["torch._dynamo.guards"].GuardManagerType.GUARD_MANAGER


def _are_there(read: Callable[[Any], tuple[Any, ...]], container: Any, values: tuple[Any, ...]) -> bool:
    found = read(container)
    return all(map(operator.is_, found, values)) or all(map(_is_same_number, found, values))


def _is_same_number(one: Any, two: Any) -> bool:
    """Check for a number that was computed again with the same value, as by a schedule that stands still."""
    return one is two or (type(one) is type(two) is float and one == two != 0)
