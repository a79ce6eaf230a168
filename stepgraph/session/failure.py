"""From whatever broke a capture to an error that names the line, the cause and the fix."""

from __future__ import annotations

import re

from stepgraph.errors import CaptureError, CaptureRefused, ErrorEntry, StepgraphError, entry, lookup
from stepgraph.frames import error_location, torch_function
from stepgraph.session.torch_reads import fix_for, fix_in_library

_READS = re.compile(r"\.(tolist|item|cpu|numpy)\(|\.to\(\s*(device\s*=\s*)?[\"']cpu")
_READ_WITHIN_TORCH = frozenset(("host-read", "host-data", "tape-limit"))

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
        inside, fix = _reader(error.row, error)
        return CaptureError.from_entry(
            step, error.row, operation=error.operation, where=error.where, inside=inside, fix=fix
        )
    raw = str(error).split("\n", 1)[0]
    where = error_location(error)
    row = lookup(str(error))
    if row is not None and row.rule == "host-data" and where is not None and _READS.search(where.source):
        row = entry("host-read")  # torch says the same of a copy to the host as of one from it
    if row is not None:
        inside, fix = _reader(row, error)
        raw = f"{type(error).__name__}: {raw}"
        return CaptureError.from_entry(step, row, where=where, inside=inside, raw=raw, fix=fix)
    return CaptureError(
        f"{step}: the step raised {type(error).__name__} while it was captured: {raw}",
        rule="step-raised",
        where=where,
        why="it ran in warm-up; under capture tensors have no values yet, and code may look at whether it is captured.",
        fix="see the original error above; run the step with backend='tape' on CPU tensors to find the line.",
    )


def _reader(row: ErrorEntry, error: Exception) -> tuple[str, str | None]:
    """The function of torch that reads what the user's line does not, and what to do about it where that is known."""
    reader = torch_function(error) if row.rule in _READ_WITHIN_TORCH else None
    if reader is not None:
        return f"torch/{reader.file}, {reader.function}", fix_for(reader)
    where = error.where if isinstance(error, CaptureRefused) else error_location(error)
    return "", fix_in_library(where) if row.rule == "host-read" and where is not None else None


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
