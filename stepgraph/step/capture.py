"""`stepgraph.capture` turns any Python training step into one that captures and replays itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch

from stepgraph.backends import Backend
from stepgraph.errors import InvalidArgument
from stepgraph.optim.optimizer import OptimizerMode
from stepgraph.padding import Buckets
from stepgraph.session.options import Audit, Hook, OnError, Outputs, reads_options
from stepgraph.session.session import Session
from stepgraph.step.options import NanCheck, StepOptions
from stepgraph.step.step import CapturedStep
from stepgraph.tracebacks import entry_point

P = ParamSpec("P")
R = TypeVar("R")


@overload
def capture(
    step: Callable[P, R],
    /,
    *,
    warmup: int = ...,
    max_graphs: int = ...,
    strict: bool = ...,
    on_error: OnError = ...,
    optimizer: OptimizerMode = ...,
    outputs: Outputs = ...,
    generators: Sequence[torch.Generator] = ...,
    ignore: Sequence[str] = ...,
    safe_hooks: Sequence[Hook] = ...,
    audit: Audit = ...,
    nan_check: NanCheck = ...,
    buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = ...,
    pad_values: Mapping[str, Any] | None = ...,
    session: Session | None = ...,
    backend: Backend | str | None = ...,
) -> CapturedStep[P, R]: ...
@overload
def capture(
    step: None = None,
    /,
    *,
    warmup: int = ...,
    max_graphs: int = ...,
    strict: bool = ...,
    on_error: OnError = ...,
    optimizer: OptimizerMode = ...,
    outputs: Outputs = ...,
    generators: Sequence[torch.Generator] = ...,
    ignore: Sequence[str] = ...,
    safe_hooks: Sequence[Hook] = ...,
    audit: Audit = ...,
    nan_check: NanCheck = ...,
    buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = ...,
    pad_values: Mapping[str, Any] | None = ...,
    session: Session | None = ...,
    backend: Backend | str | None = ...,
) -> Callable[[Callable[P, R]], CapturedStep[P, R]]: ...
@reads_options(StepOptions, pad_values="Padding value of each bucketed tensor, by name; the default is 0.")
def capture(
    step: Any = None,
    /,
    *,
    buckets: Any = None,
    pad_values: Any = None,
    session: Session | None = None,
    backend: Backend | str | None = None,
    **options: Any,
) -> Any:
    """Capture a training step: it runs eagerly to warm up, is recorded as graphs, and is replayed from then on.

    Example:
        >>> step = stepgraph.capture(train_step)     # or @stepgraph.capture above the function
        >>> for batch in loader:
        ...     loss = step(batch)                   # equal to train_step(batch), bit for bit
        >>> print(step.report())

    The step is any function of tensors, containers and plain values: the whole of zero_grad, forward, backward and
    optimizer, or a part. Tensors are copied in at each call; results come out detached, as copies (`outputs="static"`:
    as buffers that the next call overwrites).
    """
    read = StepOptions(buckets=Buckets.parse(buckets, pad_values), **options)

    @entry_point
    def captured(function: Callable[P, R]) -> CapturedStep[P, R]:
        _refuse_no_step(function)
        return CapturedStep(function, read, session, backend)

    return captured if step is None else captured(step)


def _refuse_no_step(step: Any) -> None:
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
        what, why = f"capture got {step!r}, a {kind}, which cannot be called", "capture records what a call does."
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
