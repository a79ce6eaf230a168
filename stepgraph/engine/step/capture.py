"""`stepgraph.capture` turns any Python training step into one that captures and replays itself.

Under `on_error="modules"` a step whose capture has failed goes on with graphs for its modules. That is the only place
where whole steps and parts meet, and it is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch

from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.backends import Backend
from stepgraph.engine.call.options import Audit, Hook, OnError, Outputs, reads_options
from stepgraph.engine.call.session import Session
from stepgraph.engine.optim.optimizer import OptimizerMode
from stepgraph.engine.step.options import NanCheck, StepOptions
from stepgraph.engine.step.padding import Buckets
from stepgraph.engine.step.refusals import refuse_no_step
from stepgraph.engine.step.step import CapturedStep, Fallback

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
        refuse_no_step(function)
        return CapturedStep(function, read, session, backend, _fall_back)

    return captured if step is None else captured(step)


def _fall_back(name: str, session: Session, options: StepOptions) -> Fallback:
    """Make what a step goes on with after a failed capture. The engine of modules is imported only then."""
    from stepgraph.engine.step.fallback.fallback import ModuleFallback

    return ModuleFallback(name, session, options)
