"""A call of getattr and its like names one attribute where its name is a constant; nothing else may be taken for it."""

from __future__ import annotations

import operator
import sys
import types
from operator import attrgetter
from typing import Any

import pytest

from stepgraph.values.watch_code import attributes_in, may_name_anything
from stepgraph.values.watch_spelled import always_spelled

SCOPE: dict[str, Any] = {"operator": operator, "attrgetter": attrgetter}

SPELLED = [
    'hasattr(x, "a")',
    'getattr(x, "a")',
    'getattr(x, "a", None)',
    'getattr(x, "a" "b", -y)',
    'getattr(x.y.z(), "a", f(x, k=y) + 1)',
    'getattr(x[y], "a", {"k": [y]})[0]',
    'setattr(x, "a", f(y))',
    'delattr(x, "a")',
    'getattr(getattr(x, "a"), "b")',
    'getattr(x, "a", getattr(y, "b", getattr(z, "c")))',
    'x.b if hasattr(x, "b") and not hasattr(x, "c") else y',
    '[getattr(i, "a") for i in x]',
    '(lambda q: getattr(q, "a"))(x)',
    'f(*getattr(x, "a"))',
    'operator.attrgetter("a")(x)',
    'max(x, key=attrgetter("a", "b"))',
]

NOT_SPELLED = [
    "getattr(x, y)",
    "getattr(x, NAME)",
    'getattr("a", y, "b")',
    'getattr(x, "a" + y)',
    'getattr(x, "a" + y, None)',
    'getattr(x, f"a{y}")',
    'getattr(x, f"a{y}", f(z))',
    'getattr(x, "a_%s" % y, None)',
    'getattr(x, "a{}".format(y))',
    'getattr(x, "a{}".format(y), z)',
    'getattr(x, "a".upper())',
    'getattr(x, "a" if y else "b")',
    'getattr(x, y or "b")',
    'getattr(x, ("a", "b")[y])',
    'getattr(x, ["a", y][1], z)',
    'getattr(x, "abc"[y:z], z)',
    'getattr(x, (n := "a" + y), z)',
    'getattr(x, (n := y), "a")',
    'getattr(x, (yield "a"))',
    "getattr(*x)",
    'getattr(*x, "a")',
    'getattr(x, *["a"])',
    "getattr(x, **y)",
    'getattr(x, "no identifier")',
    'getattr(getattr(x, y), "a")',
    'getattr(x, "a", getattr(x, y))',
    'getattr(x, "a") or getattr(x, y)',
    'f(getattr, x, "a")',
    'map(getattr, x, "a")',
    '[getattr][0](x, "a")',
    'getattr.__call__(x, y)(z, "a")',
    'x.getattr(y, "a")',
    "lambda: getattr",
    "[getattr(i, j) for i in x for j in y]",
    "operator.attrgetter(y)",
    'operator.attrgetter("a.b")',
    'attrgetter("a", y)',
    'attrgetter("a" + y, "b")',
    'x.attrgetter("a")',
]


def function(expression: str, **scope: Any) -> types.FunctionType:
    made: dict[str, Any] = {**SCOPE, **scope}
    exec(f"def made(x, y, z, f):\n    return ({expression})", made)
    found = made["made"]
    assert isinstance(found, types.FunctionType)
    return found


@pytest.mark.parametrize("expression", SPELLED)
def test_spelled_names_are_told(expression: str) -> None:
    names = attributes_in(function(expression))
    assert not may_name_anything(names)
    assert names & {"a", "ab", "b"}


@pytest.mark.parametrize("expression", NOT_SPELLED)
def test_names_that_are_not_spelled_are_never_missed(expression: str) -> None:
    assert may_name_anything(attributes_in(function(expression)))


@pytest.mark.parametrize(
    ("expression", "scope"),
    [
        ('getattr(x, "a")', {"getattr": print}),
        ('attrgetter("a")', {"attrgetter": print}),
        ('operator.attrgetter("a")', {"operator": sys}),
    ],
)
def test_name_that_stands_for_something_else_is_not_spelled(expression: str, scope: dict[str, Any]) -> None:
    assert may_name_anything(attributes_in(function(expression, **scope)))


def test_spelled_beyond_the_first_256_constants() -> None:
    many = " + ".join(f"{i}.5 * y" for i in range(300))
    spelled, not_spelled = 'getattr(x, "a", y.last)', 'getattr(x, "a" + y)'
    assert always_spelled(function(f"[{many}, {spelled}]").__code__, SCOPE) == {"getattr"}
    assert always_spelled(function(f"[{many}, {spelled}, {not_spelled}]").__code__, SCOPE) == set()
