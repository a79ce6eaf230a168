"""Finds the function of which each call is one step, if the script has one.

A function's frame that is there when the step begins and still when it reaches its end holds the whole step. If the
next step has the same frame, it is a loop's; if it has another, each call is a step. The innermost such function is
the one to capture. If the user's innermost line is the same at both ends, and it called a library, the loop is that
library's.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.inspect.places import location_of, package_of, stack_of

_LOOKED_AT = 2
"""Steps whose frames are compared. A frame that is kept also keeps its variables alive, so there are few."""


class StepFunctions:
    """Compares the frames of the first steps."""

    def __init__(self) -> None:
        self._begun: list[tuple[types.FrameType, int]] = []
        """The user's frames as the step began, innermost first, each with its position."""
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
        self._begun = [(frame, frame.f_lasti) for frame in frames] if is_looked_at else []
        self._whole = []

    def reach(self, frame: types.FrameType) -> None:
        """The step goes on at least to here."""
        stack = list(stack_of(frame))
        both = [(one, at) for one, at in self._begun if any(one is other for other in stack)]
        self._whole = [one for one, _ in both]
        if both and both[0][0].f_lasti == both[0][1]:
            inner = stack[: next(number for number, one in enumerate(stack) if one is both[0][0])]
            packages = (package_of(one.f_code.co_filename) for one in reversed(inner))
            self._found["library"] = next((name for name in packages if name not in ("", "torch")), "")

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
