"""The types of settings: check a value against its annotation, and read a value from text.

An annotation is one of int, float, bool, str, a Literal, a Sequence of these, `CudaGraphScope` words, or a union of
them with None. Numbers are not read from strings and bools are not read as numbers, except where the value is text from
a command line (`from_text`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
from collections.abc import Hashable, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from stepgraph.config.scope import CudaGraphScope, read_words
from stepgraph.core.errors import InvalidArgument, nearest

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
_NOT_FINITE = ("nan", "inf", "infinity")
_SCOPE = Sequence[CudaGraphScope]


def types_of(section: type[Any]) -> dict[str, Any]:
    """The annotation of each field of a dataclass, without its sentence."""
    return _types_of(cast(Hashable, section))


@functools.cache
def _types_of(section: Any) -> dict[str, Any]:
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def sentences_of(section: type[Any]) -> dict[str, str]:
    """The sentence that describes each field of a dataclass."""
    hints = get_type_hints(section, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def fitted(where: str, value: Any, hint: Any) -> Any:
    """Return a value as its field stores it (a list for a sequence), or refuse it."""
    if hint == _SCOPE:
        return read_words(value, where)
    if isinstance(value, enum.Enum) and not isinstance(value, str):
        value = value.name
    if isinstance(value, PurePath):
        value = str(value)
    for choice in _choices(hint):
        found = _as(choice, value)
        if found is not _WRONG:
            return found
    raise _wrong(where, value, hint)


def from_text(where: str, text: str, hint: Any) -> Any:
    """Read a value from the text of a command line: `3`, `1e-4`, `true`, `none`, `a,b` or `[a, b]`."""
    if hint == _SCOPE:
        return read_words(_listed(text), where)
    stripped = text.strip()
    for choice in sorted(_choices(hint), key=lambda each: _rank(stripped, each)):
        for value in _readings(stripped, choice):
            found = _as(choice, value)
            if found is not _WRONG:
                return found
    raise _wrong(where, text, hint)


def spelled(hint: Any) -> str:
    """A type as the documentation shows it: `int or None`."""
    if hint == _SCOPE:
        return "words of a scope"
    names = []
    for choice in _choices(hint):
        if get_origin(choice) is Literal:
            names += [repr(value) for value in get_args(choice)]
        elif get_origin(choice) is Sequence:
            names.append(f"list of {spelled(get_args(choice)[0])}")
        else:
            names.append("None" if choice is type(None) else choice.__name__)
    return " or ".join(names)


_WRONG = object()


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _as(choice: Any, value: Any) -> Any:
    """The value as this type stores it, or `_WRONG`."""
    if get_origin(choice) is Literal:
        same = [known for known in get_args(choice) if known == value and type(known) is type(value)]
        return same[0] if same else _WRONG
    if get_origin(choice) is Sequence:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            return _WRONG
        items = [_as(get_args(choice)[0], item) for item in value]
        return _WRONG if any(item is _WRONG for item in items) else items
    if choice is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and not _is_huge(value)
        return float(value) if is_number and math.isfinite(value) else _WRONG
    if choice is int and (isinstance(value, bool) or _is_huge(value)):
        return _WRONG
    return value if isinstance(value, choice) else _WRONG


def _is_huge(value: Any) -> bool:
    """True for an integer that torch's integers of 64 bits cannot hold."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _integers_in(value: Any) -> list[int]:
    """The integers of a value, or of a text that may be a list of them."""
    items = _listed(value) if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    found = [_readings(item, int) if isinstance(item, str) else [item] for item in items]
    return [number for numbers in found for number in numbers if isinstance(number, int)]


def _rank(text: str, choice: Any) -> int:
    """Of several types a text is None first, then what its brackets say, then a string only as the last one."""
    if choice is type(None):
        return 0
    if get_origin(choice) is Sequence:
        return 1 if text.startswith("[") else 3
    return 4 if choice is str and text.startswith("[") else 2


def _readings(text: str, choice: Any) -> list[Any]:
    """What a text may stand for where this type is expected."""
    if choice is type(None):
        return [None] if text.lower() in _NONE else []
    if choice is bool:
        return [True] if text.lower() in _TRUE else [False] if text.lower() in _FALSE else []
    if choice in (int, float):
        try:
            return [choice(text)]
        except ValueError:
            return []
    if get_origin(choice) is Literal:
        return [value for value in get_args(choice) if str(value) == text]
    if get_origin(choice) is Sequence:
        inner = get_args(choice)[0]
        read = [_readings(item, inner) for item in _listed(text)]
        return [[values[0] for values in read]] if all(read) else []
    return [text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text]


def _listed(text: str) -> list[str]:
    stripped = text.strip()
    inner = stripped[1:-1] if stripped[:1] + stripped[-1:] in ("[]", "()") else stripped
    return [item.strip().strip("'\"") for item in inner.split(",") if item.strip()]


def _wrong(where: str, value: Any, hint: Any) -> InvalidArgument:
    if any(map(_is_huge, _integers_in(value))):
        return InvalidArgument(
            f"{where} is an integer of more than 64 bits",
            rule="config-value",
            why="torch's integers have 64 bits.",
            fix=f"give {where} a smaller number.",
        )
    words = [known for choice in _choices(hint) if get_origin(choice) is Literal for known in get_args(choice)]
    near = nearest(str(value), [str(word) for word in words])
    if str(value).strip().lstrip("+-").lower() in _NOT_FINITE and float in _choices(hint):
        return InvalidArgument(
            f"{where} = {value} is not a finite number",
            rule="config-value",
            why="everything that is computed with it would become nan or infinite.",
            fix=f"give {where} a finite value, such as 1e-4.",
        )
    return InvalidArgument(
        f"{where} = {value!r} is not {spelled(hint)}",
        rule="config-value",
        why="a value of another type would be read differently, or fail long after the start.",
        fix=f"did you mean {near!r}?" if near else f"give {where} a value of type {spelled(hint)}.",
    )
