"""Refuses objects that cannot be captured as a step, before the first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import with_article


def refuse_no_step(step: Any) -> None:
    """Refuse objects that are not steps; the error says what to write instead."""
    kind = type(step).__name__
    fix = "write the step as a function, def train_step(batch): ..., and capture that."
    if isinstance(step, torch.nn.Module):
        what = f"capture got a module, {kind}, but captures functions"
        why = "results of a captured step are detached: a backward outside the step would not reach the module."
        fix = (
            "stepgraph.graph_modules(model) graphs a module's forward and backward. If it is a whole step, or runs "
            "without gradients: stepgraph.capture(lambda batch: model(batch))."
        )
    elif isinstance(step, torch.optim.Optimizer):
        what, why = (
            f"capture got an optimizer, {kind}, but captures functions",
            "an optimizer is called inside the step.",
        )
        fix = "call optimizer.step() in a function together with the backward, and capture that function."
    elif not callable(step):
        what, why = (
            f"capture got {step!r}, {with_article(kind)}, which cannot be called",
            "capture records what a call does.",
        )
        fix = "put @stepgraph.capture below @classmethod." if isinstance(step, classmethod) else fix
    elif _is(step, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        what, why = f"the step {_name(step)} is async", "await runs on the host, and a replay runs no Python."
        fix = "capture a plain function that has only the tensor work, and await around its calls."
    elif _is(step, inspect.isgeneratorfunction):
        what, why = (
            f"the step {_name(step)} is a generator",
            "a call only creates the generator: there is nothing to record.",
        )
        fix = "return the results, all at once, instead of yielding them."
    else:
        return
    raise InvalidArgument(what, rule="option", why=why, fix=fix)


def _is(step: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Check whether a function, or an object's `__call__`, is of one of these kinds."""
    return any(kind(step) or kind(type(step).__call__) for kind in kinds)


def _name(step: Any) -> str:
    return str(getattr(step, "__name__", type(step).__name__))
