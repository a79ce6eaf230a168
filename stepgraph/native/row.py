"""Whether nothing at all was touched since a replay, asked in one row.

A guard tells what changed, by name, with code of its own. Most calls find nothing changed, and for them every function
on the way is felt: when a step begins, the host's caches are cold. So each guard also says what it comes down to: which
objects must be the very ones they were, how long containers must be, and what else must be asked. That row is run
through in C: by Python's own loops, or, where it was built, by a library that reads the facts of tensors as well. It
may say no where all is well, for it knows objects by identity; then the guards are asked, and tell. It never says yes
where one of them would tell of a change.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch

from stepgraph.native.library import native_row
from stepgraph.signature import compiler_guards

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The classes whose facts are what torch itself says of a tensor."""


Layout = tuple[torch.Tensor, int, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A tensor, its address, its dtype, its shape, its strides, and its keys in torch's dispatcher."""
Gradient = tuple[torch.Tensor, torch.Tensor | None, bool]
"""A parameter, its gradient, and whether it requires one."""


class GuardRow:
    """A row of expectations."""

    __slots__ = (
        *("_attributes", "_containers", "_items", "_keys", "_lengths"),
        *("_classes", "_copies", "_names", "_objects", "_owners", "_questions", "_sized", "_wholes"),
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
        self._wholes: list[Mapping[Any, Any]] = []
        self._copies: list[Mapping[Any, Any]] = []
        self._sized: list[Sized] = []
        self._lengths: list[int] = []
        self._questions: list[Callable[[], bool]] = []
        self._columns: list[tuple[Sequence[Mapping[Any, Any]], Any, list[Any]]] = []
        self._layouts: list[Layout] = []
        self._gradients: list[Gradient] = []
        self._otherwise: list[Callable[[], bool]] = []
        self._unwritten: list[tuple[Mapping[Any, Any], Mapping[Any, Any]]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """An attribute must be this very object."""
        self._owners.append(owner)
        self._names.append(name)
        self._attributes.append(value)

    def class_of(self, value: Any, kind: type) -> None:
        """An object must be of this very class."""
        self._objects.append(value)
        self._classes.append(kind)

    def item(self, container: Any, key: Any, value: Any) -> None:
        """What lies at a key must be this very object."""
        self._containers.append(container)
        self._keys.append(key)
        self._items.append(value)

    def items(self, container: Any, values: Mapping[Any, Any]) -> None:
        """What lies at these keys must be these very objects."""
        if len(values) > 1:
            read = operator.itemgetter(*values)
            self.ask(functools.partial(_are_there, read, container, tuple(values.values())))
        else:
            for key, value in values.items():
                self.item(container, key, value)

    def contents(self, container: Mapping[Any, Any], values: Mapping[Any, Any]) -> None:
        """A dictionary must hold just these very objects.

        Python compares what two dictionaries hold by identity first, twice as fast as can be had otherwise. Only what
        differs is compared by value, and of two tensors with several elements that raises, which is as good as a no.
        """
        if all(map(is_told_by_identity, values.values())):
            self._wholes.append(container)
            self._copies.append(values)
        else:
            for key, value in values.items():
                self.item(container, key, value)
            self.length(container, len(values))

    def column(self, containers: Sequence[dict[Any, Any]], key: Any, values: list[Any]) -> None:
        """What lies at one key of many dictionaries must be these very objects."""
        self._columns.append((containers, key, values))

    def layouts(self, expected: Iterable[Layout], otherwise: Iterable[Callable[[], bool]]) -> None:
        """Tensors must lie where they lay, in the same form; `otherwise` asks the same without the library."""
        self._layouts += expected
        self._otherwise += otherwise

    def gradients(self, expected: Iterable[Gradient], otherwise: Callable[[], bool]) -> None:
        """Parameters must have the very gradients and the flags they had; `otherwise` asks so without the library."""
        self._gradients += expected
        self._otherwise.append(otherwise)

    def unwritten(self, expected: Sequence[tuple[dict[Any, Any], Mapping[Any, Any]]]) -> None:
        """Dictionaries must hold just these very objects; without the library it is asked whether they were written."""
        self._unwritten += expected
        hold = functools.partial(_hold_just, expected)
        versions = _question_of_versions([where for where, _ in expected]) if hold() else None
        self._otherwise.append(versions or hold)

    def length(self, container: Sized, length: int) -> None:
        """A container must be as long."""
        self._sized.append(container)
        self._lengths.append(length)

    def ask(self, question: Callable[[], bool]) -> None:
        """The answer must be yes."""
        self._questions.append(question)

    def question(self) -> Callable[[], bool]:
        """What to call to know whether every expectation is met; the row is complete."""
        make = native_row()
        if make is None:
            return self.holds
        tensors = (*(layout[0] for layout in self._layouts), *(gradient[0] for gradient in self._gradients))
        is_plain = all(type(tensor) in PLAIN_TENSORS for tensor in tensors)
        items = [*zip(self._containers, self._keys, self._items, strict=True)]
        lengths = [*zip(self._sized, self._lengths, strict=True)]
        for containers, key, values in self._columns:
            items += ((container, key, value) for container, value in zip(containers, values, strict=True))
        for container, copy in (*zip(self._wholes, self._copies, strict=True), *self._unwritten):
            items += ((container, key, value) for key, value in copy.items())
            lengths.append((container, len(copy)))
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
        """Whether every expectation is met, asked in Python."""
        try:
            return (
                all(map(operator.is_, map(getattr, self._owners, self._names), self._attributes))
                and all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._items))
                and all(map(operator.eq, self._wholes, self._copies))
                and list(map(len, self._sized)) == self._lengths
                and list(map(type, self._objects)) == self._classes
                and all(list(map(operator.itemgetter(key), where)) == values for where, key, values in self._columns)
                and all(map(operator.call, self._otherwise))
                and all(map(operator.call, self._questions))
            )
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):  # gone, or not to be read any more
            return False


def is_told_by_identity(value: Any) -> bool:
    """Whether an object compares equal to no other one of its kind without raising."""
    if isinstance(value, torch.Tensor):
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() > 1
    return value is None or operator.is_(type(value).__eq__, object.__eq__)


def _hold_just(expected: Sequence[tuple[dict[Any, Any], Mapping[Any, Any]]]) -> bool:
    return all(
        len(where) == len(values) and all(dict.get(where, key) is value for key, value in values.items())
        for where, values in expected
    )


def _question_of_versions(dictionaries: list[dict[Any, Any]]) -> Callable[[], bool] | None:
    """Whether any was written to, asked of torch's compiler, which has it from Python; None where it does not know."""
    for stack in ((None,), ()):  # later versions want a Python stack to tell users of
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
    # the compiler's Python half is there as soon as an optimizer was made; it is not worth its import here
    return sys.modules["torch._dynamo.guards"].GuardManagerType.GUARD_MANAGER


def _are_there(read: Callable[[Any], tuple[Any, ...]], container: Any, values: tuple[Any, ...]) -> bool:
    found = read(container)
    return all(map(operator.is_, found, values)) or all(map(_is_same_number, found, values))


def _is_same_number(one: Any, two: Any) -> bool:
    """Whether a number was only made anew, as a schedule does that stands still."""
    return one is two or (type(one) is type(two) is float and one == two != 0)
