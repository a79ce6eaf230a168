"""Notices a step that is defined anew in each epoch.

`step = stepgraph.capture(train_step)` inside a loop is another step in each round: it warms up and is captured again,
and the graphs of the one before are thrown away. Nothing is wrong, but little is won. So it is named after the second
capture: the same code, with the same parameters, while the step before is gone. Steps that live beside each other, of
one function for several models for example, are what they were meant to be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from stepgraph.core import catalogue
from stepgraph.core.errors import Location
from stepgraph.core.frames import warn_user


@dataclass(slots=True)
class _Captured:
    """The last capture of a step's code."""

    step: weakref.ref[Any]
    parameter: weakref.ref[torch.Tensor]
    """Its first one."""
    is_named: bool = False


_CAPTURED: weakref.WeakKeyDictionary[CodeType, _Captured] = weakref.WeakKeyDictionary()
"""A step that is defined anew knows nothing of the one before, which is gone."""


def note_capture(step: Any, name: str, function: Callable[..., Any], parameters: Collection[torch.Tensor]) -> None:
    """Remember the first capture of a step; warn, once, if it is the second of a step that was defined anew."""
    code = _code_of(function)
    if code is None or not parameters:
        return
    first, before = next(iter(parameters)), _CAPTURED.get(code)
    is_anew = before is not None and before.step() is None and before.parameter() is first
    is_named = is_anew and before is not None and before.is_named
    _CAPTURED[code] = _Captured(weakref.ref(step), weakref.ref(first), is_anew)
    if is_anew and not is_named:
        entry = catalogue.entry("defined-anew")
        line = Location(code.co_filename, code.co_firstlineno, name)
        warn_user(f"{name}: {entry.what}   [defined-anew]\n  {line}\nWhy: {entry.why}\nFix: {entry.fix}")


def forget_capture(step: Any, function: Callable[..., Any]) -> None:
    """Forget a step that was closed: whoever closes it wants another one after it."""
    code = _code_of(function)
    before = _CAPTURED.get(code) if code is not None else None
    if code is not None and before is not None and before.step() is step:
        del _CAPTURED[code]


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None
