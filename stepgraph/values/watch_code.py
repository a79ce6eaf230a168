"""What a function's code can name, read from the code itself.

Names of globals are told from names of attributes: a loop that calls its own variable `loss` is no business of a step
that reads `output.loss`. What is asked for by a string (`getattr(config, "scale", 1.0)`) counts as named. Code counts
as the user's unless torch, the standard library or this engine wrote it; what is typed at a prompt is the user's.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import opcode
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from stepgraph.frames import is_user
from stepgraph.values.reach import names_in
from stepgraph.values.watch_behind import is_getter
from stepgraph.values.watch_spelled import always_spelled
from stepgraph.values.watch_values import attributes_of

_PROMPTS = ("<stdin>", "<string>", "<console>", "<input>", "<python-input-", "<ipython-input-", "<doctest ")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = f"-packages{os.sep}"
_SHIFTS = {"LOAD_GLOBAL": 1}  # its lowest bit is a flag
_GLOBAL_READS = tuple(
    (opcode.opmap[name], _SHIFTS.get(name, 0))
    for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    if name in opcode.opmap
)
_ASKED_BY_STRING = frozenset(("getattr", "hasattr", "setattr", "delattr", "attrgetter", "vars", "__dict__"))
_ASKED_AT_LARGE = _ASKED_BY_STRING | {
    "__getattribute__",
    "__getattr__",
    "asdict",
    "astuple",
    "getmembers",
    "eval",
    "exec",
}
_CALLED_AT_LARGE = frozenset(
    ("getattr", "__getattribute__", "attrgetter", "methodcaller", "getmembers", "eval", "exec")
)


def is_users_code(code: types.CodeType) -> bool:
    """Whether a function is the user's, typed at a prompt or in a file of theirs or of a library."""
    file = code.co_filename
    if file.startswith("<"):
        return file.startswith(_PROMPTS)
    return is_user(file) and (not file.startswith(_STANDARD) or _INSTALLED in file)


def is_installed(code: types.CodeType) -> bool:
    """Whether a function belongs to a library that was installed."""
    return _INSTALLED in code.co_filename


def is_installed_class(kind: type) -> bool:
    """Whether a class belongs to a library that was installed."""
    module = sys.modules.get(str(kind.__module__))
    return module is not None and is_installed_file(vars(module))


def is_installed_file(scope: Mapping[str, Any]) -> bool:
    """Whether the Python module with these globals belongs to a library that was installed."""
    return _INSTALLED in str(scope.get("__file__"))


def attributes_in(function: types.FunctionType) -> set[str]:
    """The names of attributes that a function's code looks up, inner functions included, and some of globals.

    `getattr` and its like are among them only where the code may ask for what it does not spell.
    """
    code = function.__code__
    names = names_in(code)
    if names.isdisjoint(_ASKED_BY_STRING):
        return names
    return (names | set(_strings_in(code))) - always_spelled(code, function.__globals__)


def asked_by_string(code: types.CodeType) -> set[str]:
    """The names that code may ask for by a string."""
    return set() if names_in(code).isdisjoint(_ASKED_BY_STRING) else set(_strings_in(code))


def may_name_anything(names: set[str]) -> bool:
    """Whether code with these names may look up attributes that it does not spell."""
    return not names.isdisjoint(_ASKED_AT_LARGE)


def may_call_anything(names: set[str]) -> bool:
    """Whether code with these names may call what it does not spell (`getattr(self, "loss_" + kind)(x)`)."""
    return not names.isdisjoint(_CALLED_AT_LARGE)


def may_name_all(names: set[str]) -> bool:
    """Whether code with these names may go through all attributes of an object."""
    return not names.isdisjoint(("vars", "__dict__"))


def _strings_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if type(constant) is str and constant.isidentifier():
            yield constant
        elif type(constant) is types.CodeType:
            yield from _strings_in(constant)


def globals_in(code: types.CodeType) -> set[str]:
    """The names of globals that a function's code looks up, inner functions included."""
    found = _names_of(code, _GLOBAL_READS)
    return found if "globals" not in found else found.union(_strings_in(code))


def imports_in(code: types.CodeType) -> set[str]:
    """The Python modules that a function's code imports by itself, inner functions included; relative ones dotted."""
    found = set().union(*(imports_in(inner) for inner in code.co_consts if type(inner) is types.CodeType))
    if opcode.opmap["IMPORT_NAME"] in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for at, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":  # after its level and what is taken from it
                found.add("." * steps[at - 2].argval + step.argval)
    return found


def imported(name: str, scope: Mapping[str, Any]) -> types.ModuleType | None:
    """The Python module that code with these globals imports by a name."""
    with contextlib.suppress(ImportError):  # there is no package so far up
        return sys.modules.get(importlib.util.resolve_name(name, str(scope.get("__package__") or "")))
    return None


def aliases_in(function: types.FunctionType) -> set[str]:
    """What a function has in a closure or by another name of that which asks for attributes at large (`asdict`)."""
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    scope = function.__globals__
    held += [scope[name] for name in globals_in(function.__code__) & scope.keys() - _ASKED_AT_LARGE]
    named = (v.__name__ for v in held if type(v) in (types.FunctionType, types.BuiltinFunctionType))
    return set(named) & _ASKED_AT_LARGE


def _names_of(code: types.CodeType, wanted: tuple[tuple[int, int], ...]) -> set[str]:
    """The names in instructions of these kinds."""
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    found: set[str] = set()
    for operation, shift in wanted:
        at = operations.find(operation)
        while at >= 0:
            argument, before = arguments[at], at
            while operations[before - 1] == opcode.EXTENDED_ARG and before > 0:
                before -= 1
                argument |= arguments[before] << (8 * (at - before))
            found.add(code.co_names[argument >> shift])
            at = operations.find(operation, at + 1)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            found |= _names_of(constant, wanted)
    return found


def is_callable_by_name(value: Any) -> bool:
    """Whether a value is code that can be followed: a function, a method, a partial, or something around one."""
    kind = type(value)
    if kind in (types.FunctionType, types.MethodType) or issubclass(kind, functools.partial) or is_getter(value):
        return True
    return not issubclass(kind, (type, types.ModuleType)) and "__wrapped__" in (attributes_of(value) or ())


def layers_of(function: Any) -> Iterator[Any]:
    """A function and those that it is wrapped around, outermost first."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = (attributes_of(function) or {}).get("__wrapped__")


def code_behind(attribute: Any) -> list[Any]:
    """The functions that run when an attribute of a class is read or called."""
    kind = type(attribute)
    if issubclass(kind, (staticmethod, classmethod)):
        return [attribute.__func__]
    if issubclass(kind, property):
        return [f for f in (attribute.fget, attribute.fset) if f is not None]
    if issubclass(kind, (functools.cached_property, functools.partialmethod)):
        return [attribute.func]
    if issubclass(kind, functools.singledispatchmethod):
        return [attribute.dispatcher]
    return [attribute] if is_callable_by_name(attribute) else []
