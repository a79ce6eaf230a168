"""`stepgraph.verify` proves, on a user's own step and batches, that its graphs compute what eager computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.backends import backend_for
from stepgraph.tools.verification.causes import Pair
from stepgraph.tools.verification.compare import Comparison, compare_pair
from stepgraph.tools.verification.report import VerifyReport
from stepgraph.tools.verification.subjects import eager_reasons, subject_of
from stepgraph.tools.verification.trace import Batches

__all__ = ["verify"]


@entry_point
def verify(
    step: Any,
    batches: Iterable[Any],
    *,
    steps: int = 8,
    rtol: float = 0.0,
    atol: float = 0.0,
    on_step: Callable[[], None] = lambda: None,
) -> VerifyReport:
    """Compare a graphed step with its eager form, bit for bit, and return a report; the program is left as it was.

    Example:
        >>> step = stepgraph.capture(train_step)
        >>> report = stepgraph.verify(step, [(x, y), (other_x, other_y)])
        >>> assert report.equal, report

    `step` is a captured step, a function (captured for the comparison, unless it calls something graphed), a model or
    handle with graphed modules, or a graphed callable. A batch is the tuple of the arguments of one call, or the only
    argument. Eager runs twice and graphed once, all from the present state, with learning rates and seeds that change
    from step to step. Outputs, gradients, parameters, optimizer state, buffers and random state are compared after
    each step. `rtol` and `atol` allow for a difference, as in `torch.allclose`.
    """
    _check(steps, rtol, atol)
    if not isinstance(batches, Iterable):
        raise InvalidArgument(
            f"verify, argument `batches`: {batches!r} is not iterable",
            rule="option",
            why="each step is called with a batch of its own.",
            fix="pass the batches, verify(step, [(x, y), (other_x, other_y)]), and their number as steps=N.",
        )
    taken = Batches.read(batches, steps)
    subject = subject_of(step, taken.calls[0] if taken.calls else ())
    with subject.during:
        backend = backend_for(subject.program.device)
        pair = Pair(subject.eager, subject.graphed, subject.program, taken.calls, backend)
        found = compare_pair(
            pair,
            rtol=rtol,
            atol=atol,
            capture=subject.capture,
            holds=subject.holds,
            on_step=on_step,
        )
        reasons = () if _replays(found) else eager_reasons([subject.graphed])
    found = replace(found, notes=(*taken.notes, *found.notes, *reasons))
    return VerifyReport(subject.name, subject.kind, backend.name, _replays(found), found)


def _replays(found: Comparison) -> int:
    return next((cost.replays or 0 for cost in found.costs if cost.side == "graphed"), 0)


def _check(steps: int, rtol: float, atol: float) -> None:
    for name, value, least in (("steps", steps, 1), ("rtol", rtol, 0), ("atol", atol, 0)):
        if not value >= least:
            raise InvalidArgument(
                f"verify, argument `{name}`: {value!r} is less than {least}",
                rule="option",
                why="steps are counted, and bounds are distances.",
                fix=f"pass {name}={least} or more.",
            )
