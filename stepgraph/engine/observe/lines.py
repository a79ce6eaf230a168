"""Finds the user's line for something that is known by its name only: a value that a call changed, a call's result.

The instructions of the code that ran are searched for one that stores to the name. If there are several such lines, the
line is not known: an attribute of the same name may belong to another class.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Container, Iterable
from types import CodeType
from typing import Any

from stepgraph.core.errors import Location
from stepgraph.core.executed_code import functions_behind
from stepgraph.core.frames import is_installed, is_users_code

_STORES = frozenset(f"{do}_{what}" for do in ("STORE", "DELETE") for what in ("ATTR", "GLOBAL", "DEREF", "NAME"))
_ITEM_STORES = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR"))
_RETURNS = frozenset(("RETURN_VALUE", "RETURN_CONST"))
_CHANGE = frozenset(
    (
        *("append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "discard", "clear"),
        *("add", "update", "setdefault", "sort", "reverse"),
    )
)
"""Methods that change a container."""


def line_of_change(
    name: str, ran: Iterable[CodeType], lines: Container[tuple[str, int]] | None = None
) -> Location | None:
    """Return the line that changes a value of this name, as messages spell it, or None if it is not known.

    `lines` are those that ran, by file and number, if that is known: the first of several is taken then.
    """
    spelled = name.removeprefix("len(").partition(" (")[0].rstrip(")")
    container = spelled[: spelled.rindex("[")] if spelled.endswith("]") else spelled
    (last,) = re.findall(r"\w*$", container)[:1]
    is_item = container != name

    def changes(line: list[dis.Instruction]) -> bool:
        if not is_item:
            return any(one.opname in _STORES and one.argval == last for one in line)
        names = {one.argval for one in line if isinstance(one.argval, str)}
        return last in names and (any(one.opname in _ITEM_STORES for one in line) or not _CHANGE.isdisjoint(names))

    codes = [code for code in ran if is_users_code(code) and not is_installed(code.co_filename)]
    found = (line for code in codes for line in _lines(code, changes))
    if lines is None:
        return _only(found)
    return next((place for place in found if (place.file, place.line) in lines), None)


def line_of_use(name: str, ran: Iterable[CodeType]) -> Location | None:
    """Return the first line of the user's that loads a value of this name, as messages spell it, or None."""
    found = re.findall(r"\w+", name.partition(" (")[0])
    last = found[-1] if found else ""

    def uses(line: list[dis.Instruction]) -> bool:
        return any(one.opname.startswith("LOAD_") and one.argval == last for one in line)

    codes = [code for code in ran if is_users_code(code) and not is_installed(code.co_filename)]
    return next((place for code in codes for place in _lines(code, uses)), None)


def line_of_return(function: Callable[..., Any]) -> Location | None:
    """Return the line of a function's only `return`, or None if it is not known."""
    found = functions_behind(function) or functions_behind(type(function).__call__)

    def returns(line: list[dis.Instruction]) -> bool:
        return any(one.opname in _RETURNS for one in line)

    code = next((one.__code__ for one in found if is_users_code(one.__code__)), None)
    return _only(_lines(code, returns)) if code is not None else None


def _lines(code: CodeType, is_wanted: Callable[[list[dis.Instruction]], bool]) -> list[Location]:
    by_line: dict[int, list[dis.Instruction]] = {}
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if line is not None:
            by_line.setdefault(line, []).append(instruction)
    return [Location(code.co_filename, line, code.co_name) for line, found in by_line.items() if is_wanted(found)]


def _only(found: Iterable[Location]) -> Location | None:
    lines = list(dict.fromkeys(found))
    return lines[0] if len(lines) == 1 else None
