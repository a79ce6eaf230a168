"""From whatever broke a capture to an error that names the line, the cause and the fix."""

from __future__ import annotations

import re

from stepgraph.errors import CaptureError, CaptureRefused, StepgraphError, entry, lookup
from stepgraph.frames import error_location

_READS = re.compile(r"\.(tolist|item|cpu|numpy)\(|\.to\(\s*(device\s*=\s*)?[\"']cpu")

CHANGED_CONTAINER = (
    "arguments are built anew for a capture, and a replay runs no Python: the caller's own stays as it is.",
    "return the new value, copy into the tensor that is there (state['h'].copy_(new)), or, if nobody else uses it, "
    "change a copy (batch = dict(batch)).",
)
"""Why a container must not be changed by a call, and what to do instead."""


def capture_error(step: str, error: Exception) -> StepgraphError:
    """The error to raise for a capture of `step` that ended in `error`."""
    if isinstance(error, StepgraphError):
        return error
    if isinstance(error, CaptureRefused):
        return CaptureError.from_entry(step, error.row, operation=error.operation, where=error.where)
    raw = str(error).split("\n", 1)[0]
    where = error_location(error)
    row = lookup(str(error))
    if row is not None and row.rule == "host-data" and where is not None and _READS.search(where.source):
        row = entry("host-read")  # torch says the same of a copy to the host as of one from it
    if row is not None:
        return CaptureError.from_entry(step, row, where=where, raw=f"{type(error).__name__}: {raw}")
    return CaptureError(
        f"{step}: the step raised {type(error).__name__} while it was captured: {raw}",
        rule="step-raised",
        where=where,
        why="it ran in warm-up; under capture tensors have no values yet, and code may look at whether it is captured.",
        fix="see the original error above; run the step with backend='tape' on CPU tensors to find the line.",
    )


def refuse_changed_container(what: str | None, by: str = "the step") -> None:
    """Raise for a container that a call has changed: at a replay the caller's own never changes."""
    if what is not None:
        why, fix = CHANGED_CONTAINER
        raise CaptureError(
            f"{by} changes a container that it was given: {what}",
            rule="argument-changed",
            why=why,
            fix=fix,
        )
