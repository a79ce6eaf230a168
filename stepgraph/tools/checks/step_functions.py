"""Finds the function of which each call is one step, if the script has one.

A function's frame that is there when the step begins and still when it reaches its end holds the whole step. If the
next step has the same frame, it is a loop's; if it has another, each call is a step. The innermost such function is
the one to capture. If the user's innermost line is the same at both ends, and it called a library, the loop is that
library's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stepgraph.core.errors import Location
from stepgraph.tools.checks.places import location_of, package_of, stack_of

_LOOKED_AT = 2
"""Steps whose frames are compared. A frame that is kept also keeps its variables alive, so there are few."""


@functools.lru_cache(maxsize=64)
def first_statement(file: str, first: int, last: int) -> int:
    """Return `first`, or the line at which the statement around it begins that ends before the line `last`.

    Code from there to `last` can be moved: it begins in the middle of no `with` and no `if`.
    """
    try:
        block: Sequence[ast.stmt] = ast.parse("".join(linecache.getlines(file))).body
    except SyntaxError:
        return first
    while True:
        around = next((one for one in block if one.lineno <= first <= (one.end_lineno or one.lineno)), None)
        if around is None:
            return first
        is_shared = around.lineno <= last <= (around.end_lineno or around.lineno)
        inner = next((one for one in _blocks(around) if _holds(one, first) and _holds(one, last)), None)
        if not is_shared or inner is None:
            return around.lineno
        block = inner


def _blocks(statement: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """The blocks of statements directly inside one."""
    for _, value in ast.iter_fields(statement):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
        elif isinstance(value, list):  # of `except` and `case`
            for part in value:
                if isinstance(part, ast.AST):
                    yield from _blocks(part)


def _holds(block: Sequence[ast.stmt], line: int) -> bool:
    return block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno)


class StepFunctions:
    """Compares the frames of the first steps."""

    def __init__(self) -> None:
        self._begun: list[tuple[types.FrameType, int, int]] = []
        """The user's frames as the step began, innermost first, each with its position and its line."""
        self._whole: list[types.FrameType] = []
        self._num_steps = 0
        self._found: dict[str, Any] = {"function": "", "parameters": [], "loop": None, "library": ""}
        self._models: dict[int, str] = {}
        self.code: types.CodeType | None = None
        """The code of the function that is one step."""

    def begin(self, frames: Sequence[types.FrameType]) -> None:
        """A step begins in these frames of the user's, innermost first."""
        if 0 < self._num_steps <= _LOOKED_AT:
            of_calls = [frame for frame in self._whole if not any(frame is other for other in frames)]
            if of_calls:
                self._describe(of_calls[0])
        if self._num_steps < _LOOKED_AT and frames:
            where = location_of(frames[0])
            self._found["loop"] = [where.file, where.line, where.function]
            self._name_models(frames)
        self._num_steps += 1
        is_looked_at = self._num_steps <= _LOOKED_AT
        self._begun = [(frame, frame.f_lasti, frame.f_lineno or 0) for frame in frames] if is_looked_at else []
        self._whole = []

    def reach(self, frame: types.FrameType) -> None:
        """The step goes on at least to here."""
        stack = list(stack_of(frame))
        both = [(one, at) for one, at, _ in self._begun if any(one is other for other in stack)]
        self._whole = [one for one, _ in both]
        if both:
            self._find_loop(*next(one for one in self._begun if one[0] is both[0][0]))
        if both and both[0][0].f_lasti == both[0][1]:
            inner = stack[: next(number for number, one in enumerate(stack) if one is both[0][0])]
            packages = (package_of(one.f_code.co_filename) for one in reversed(inner))
            self._found["library"] = next((name for name in packages if name not in ("", "torch")), "")

    def _find_loop(self, frame: types.FrameType, _: int, line: int) -> None:
        """Find where in the loop's body the step begins, which began at a line of a frame and has reached another."""
        file, last = frame.f_code.co_filename, frame.f_lineno or line
        self._found["loop"] = [file, first_statement(file, line, last), frame.f_code.co_name]

    @property
    def place(self) -> Location | None:
        """Where the step begins: its function, or the first line of the loop's body that is in it."""
        if self.code is not None:
            return Location(self.code.co_filename, self.code.co_firstlineno, self.code.co_name)
        return Location(*self._found["loop"]) if self._found["loop"] is not None else None

    def is_running(self, frame: types.FrameType) -> bool:
        """Whether the function that is one step runs in this frame, or around it."""
        return self.code is not None and any(one.f_code is self.code for one in stack_of(frame))

    def name_of(self, module: torch.nn.Module) -> str:
        """The user's name of a model, or an empty text."""
        return self._models.get(id(module), "")

    def _name_models(self, frames: Sequence[types.FrameType]) -> None:
        for frame in frames:
            for name, value in frame.f_locals.items():
                if isinstance(value, torch.nn.Module):
                    self._models.setdefault(id(value), name)
                elif name == "self":
                    for inner, held in getattr(value, "__dict__", {}).items():
                        if isinstance(held, torch.nn.Module):
                            self._models.setdefault(id(held), f"self.{inner}")

    def _describe(self, frame: types.FrameType) -> None:
        code = self.code = frame.f_code
        names = list(inspect.getargs(code).args)
        is_method = bool(names) and names[0] == "self"
        name = code.co_qualname if is_method else code.co_name
        self._found |= {"function": name, "parameters": names[is_method:]}

    def result(self) -> dict[str, Any]:
        """Return what was found, as plain values."""
        self._begun, self._whole = [], []
        return self._found
