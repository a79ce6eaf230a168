"""Finds numbers in recorded operations that no value in reach explains.

`stepgraph frozen` moves the values that it can name. A number that comes from elsewhere, a file for example, is in the
graph as well, and moving the others does not change it. What does not change is left out: constants and defaults of
code that ran, and numbers that follow from a shape (`1 / sqrt(d)`). The rest is listed, and is no finding: code that
computes a number from constants (`math.log(10000.0)`) gives such a number, too.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from stepgraph.engine.oplog.log import Log, location_of
from stepgraph.tools.frozen_values.frozen_report import Entry

_POWERS = (1.0, 0.5, 0.25, -1.0, -0.5, -0.25)
"""Powers of a size that torch's operations and their derivatives multiply by."""
_OF_DERIVATIVES = frozenset((0.0, 0.5, 1.0, 2.0))
"""Numbers in torch's own formulas for derivatives."""


def unexplained_numbers(log: Log, moved: Collection[int], codes: Iterable[types.CodeType]) -> list[Entry]:
    """Return such numbers once for each line, with the operation.

    `moved` are the operations that another value of something in reach changes, `codes` is the code that ran.
    Optimizers have guards of their own and are left out.
    """
    constants = _OF_DERIVATIVES.union(_constants_of(set(codes)))
    known = set(moved).union(*(range(start, end) for start, end, _ in log.sections))
    found: dict[tuple[float, str | None, int | None], Entry] = {}
    for index in range(len(log)):
        operation, plain, tensors, line = log[index] if index not in known else ("", (), (), None)
        for number in (part[1] for part in plain if type(part) is tuple and part[0] is float):
            value = float(number)
            if math.isfinite(value) and abs(value) not in constants and not _follows_from_shapes(value, tensors):
                where = location_of(line)
                file, row = (where.file, where.line) if where is not None else (None, None)
                found.setdefault((value, file, row), Entry(f"{value:g} in {operation}", file, row, repr(value), ""))
    return list(found.values())


def _constants_of(codes: Collection[types.CodeType]) -> Iterator[float]:
    """The numbers in code, and the defaults of its functions and methods, which their Python modules hold."""
    for code in codes:
        yield from _constants_in(code.co_consts)
    files = {code.co_filename for code in codes}
    scopes = [vars(m) for m in list(sys.modules.values()) if issubclass(type(m), types.ModuleType)]
    for scope in (scope for scope in scopes if scope.get("__file__") in files):
        classes = [vars(value) for value in list(scope.values()) if issubclass(type(value), type)]
        for function in (value for body in (scope, *classes) for value in list(body.values())):
            if type(function) is types.FunctionType and function.__code__ in codes:
                yield from _constants_in(function.__defaults__ or ())
                yield from _constants_in((function.__kwdefaults__ or {}).values())


def _constants_in(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if type(value) in (int, float) and abs(value) < 1e300:
            yield abs(float(value))
        elif type(value) is tuple:
            yield from _constants_in(value)


def _follows_from_shapes(value: float, tensors: Iterable[Any]) -> bool:
    sizes = {size for tensor in tensors for size in tensor[1][0] if type(size) is int and size > 0}
    return any(math.isclose(abs(value), size**power, rel_tol=1e-6) for size in sizes for power in _POWERS)
