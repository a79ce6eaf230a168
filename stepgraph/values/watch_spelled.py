"""Whether code that asks for attributes by a string spells the string: `hasattr(model, "module")`.

Such code can name one attribute and no other. It is read from the instructions: from where `getattr` is loaded up to
its call the depth of the stack is followed, and the argument that is the name must be one constant by itself. An
expression ends where the depth is that of before plus one, so that a constant which is only a part of the name
(`"a" + x`) comes to that depth twice. Whatever is not this plain counts as not spelled: a jump on the way, `getattr`
as a value or by another name, a name that stands for something else.
"""

from __future__ import annotations

import builtins
import dis
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BUILTIN = frozenset(("getattr", "hasattr", "setattr", "delattr"))
_GETTER = "attrgetter"
_ASKING = _BUILTIN | {_GETTER}
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"  # Python 3.11 has both, one after the other
_NOTHING = frozenset(("EXTENDED_ARG", "NOP"))


def always_spelled(code: types.CodeType, scope: Mapping[str, Any]) -> set[str]:
    """Of `getattr` and its like those that a function with these globals only ever calls with constant names."""
    used: set[str] = set()
    unspelled: set[str] = set()
    for part in _with_inner(code):
        asking = _ASKING.intersection(part.co_names)
        if asking:
            used |= asking
            unspelled |= _unspelled(part, scope)
    return used - unspelled


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _with_inner(constant)


def _unspelled(code: types.CodeType, scope: Mapping[str, Any]) -> set[str]:
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NOTHING]
    asking = ((at, step.argval) for at, step in enumerate(steps) if step.opname != "LOAD_CONST")
    asking = ((at, name) for at, name in asking if name in _ASKING)
    return {name for at, name in asking if not (_is_meant(steps, at, scope) and _is_spelled(steps[at + 1 :], name))}


def _is_meant(steps: Sequence[dis.Instruction], at: int, scope: Mapping[str, Any]) -> bool:
    """Whether what is loaded here is the function that is known by this name."""
    kind, name = steps[at].opname, steps[at].argval
    if kind == "LOAD_GLOBAL":
        meant = operator.attrgetter if name == _GETTER else vars(builtins)[name]
        return scope.get(name, vars(builtins).get(name)) is meant
    owner = steps[at - 1]
    if kind not in ("LOAD_METHOD", "LOAD_ATTR") or name != _GETTER or owner.opname != "LOAD_GLOBAL":
        return False
    return scope.get(owner.argval) is operator


def _is_spelled(steps: Sequence[dis.Instruction], function: str) -> bool:
    """Whether these instructions, from the load of a function on, call it with constant names."""
    depths = [0]  # before each of them
    for step in steps:
        if step.opcode in _JUMPS:
            return False
        if step.opname == _CALL and step.arg == depths[-1]:
            names = range(step.arg) if function == _GETTER else (1,)
            return all(_is_constant(steps, depths, position) for position in names)
        depths.append(depths[-1] + dis.stack_effect(step.opcode, step.arg))
        if depths[-1] <= 0:  # it was a value, or something of it was asked for
            return False
    return False


def _is_constant(steps: Sequence[dis.Instruction], depths: Sequence[int], position: int) -> bool:
    """Whether the argument at a position is one constant by itself."""
    if position not in depths[:-1]:
        return False
    begins = len(depths) - 1 - depths[::-1].index(position)
    name = steps[begins]
    if name.opname != "LOAD_CONST" or depths[begins + 1 :].count(position + 1) != 1:
        return False
    return type(name.argval) is str and name.argval.isidentifier()
