"""`stepgraph.capture` turns any Python training step into one that captures and replays itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch

from stepgraph.backends import Backend
from stepgraph.padding import Buckets
from stepgraph.session.options import Options, listed
from stepgraph.session.session import Session
from stepgraph.step.step import CapturedStep
from stepgraph.tracebacks import entry_point

P = ParamSpec("P")
R = TypeVar("R")


@overload
def capture(step: Callable[P, R], /, **options: Any) -> CapturedStep[P, R]: ...
@overload
def capture(step: None = None, /, **options: Any) -> Callable[[Callable[P, R]], CapturedStep[P, R]]: ...
@entry_point  # type: ignore[misc]
def capture(
    step: Callable[..., Any] | None = None,
    /,
    *,
    warmup: int = 3,
    max_graphs: int = 8,
    strict: bool = False,
    on_error: str = "raise",
    optimizer: str = "auto",
    outputs: str = "copy",
    generators: Sequence[torch.Generator] = (),
    ignore: Sequence[str] = (),
    safe_hooks: Sequence[Any] = (),
    audit: str | int = "auto",
    nan_check: str = "off",
    buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
    pad_values: Mapping[str, Any] | None = None,
    session: Session | None = None,
    backend: Backend | str | None = None,
) -> Any:
    """Capture a training step: it warms up eagerly, is recorded as graphs, and is replayed from then on.

    Example:
        >>> step = stepgraph.capture(train_step)     # or @stepgraph.capture above the function
        >>> for batch in loader:
        ...     loss = step(batch)                   # equal to train_step(batch), bit for bit
        >>> print(step.report())

    `Options` says what each option means. The step is any function of tensors, containers and plain values: the
    whole of zero_grad, forward, backward and optimizer, or a part. Tensors are copied in at each call; results come
    out detached, as copies (`outputs="static"`: as buffers that the next call overwrites).
    """
    options = Options(
        warmup=warmup,
        max_graphs=max_graphs,
        strict=strict,
        on_error=on_error,
        optimizer=optimizer,
        outputs=outputs,
        generators=listed("generators", generators),
        ignore=listed("ignore", ignore),
        safe_hooks=listed("safe_hooks", safe_hooks),
        audit=audit,
        nan_check=nan_check,
        buckets=Buckets.parse(buckets, pad_values),
    )
    if step is None:
        return lambda function: CapturedStep(function, options, session, backend)
    return CapturedStep(step, options, session, backend)
