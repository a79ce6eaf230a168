"""A failed capture becomes an error that names the line, the cause and the fix.

Some functions of torch and of libraries read tensors on the host although the user's code does not. For known ones the
fix says how to avoid the read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepgraph.core.catalogue import Entry, entry, lookup
from stepgraph.core.errors import CaptureError, CaptureRefused, Location, StepgraphError, refusal_in
from stepgraph.core.frames import error_location, is_users, torch_function
from stepgraph.engine.backends import Backend

_READS = re.compile(r"\.(tolist|item|cpu|numpy)\(|\.to\(\s*(device\s*=\s*)?[\"']cpu")
_READ_WITHIN_TORCH = frozenset(("host-read", "host-data", "tape-limit"))


def capture_error(step: str, error: Exception, backend: Backend) -> StepgraphError:
    """Return the error to raise for a capture of `step` that ended in `error`.

    If the cause is known, the new error has the traceback of `error`, so that it ends at the line of the step that
    failed. On the tape the fix does not advise the tape. A refusal that a library has put into an error of its own is
    found in there.
    """
    refused = refusal_in(error)
    if isinstance(refused, StepgraphError):
        return refused
    if refused is not None:
        inside, fix = _reader_and_fix(refused.row, refused)
        return CaptureError.from_entry(
            step, refused.row, operation=refused.operation, where=refused.where, inside=inside, fix=fix
        ).with_traceback(refused.__traceback__)
    raw = str(error).split("\n", 1)[0]
    where = error_location(error)
    row = lookup(str(error))
    if row is not None and row.id == "host-data" and where is not None and _READS.search(where.source):
        row = entry("host-read")  # torch has one message for copies to the host and from it
    if row is not None:
        inside, fix = _reader_and_fix(row, error)
        raw = f"{type(error).__name__}: {raw}"
        found = CaptureError.from_entry(step, row, where=where, inside=inside, raw=raw, fix=fix)
        return found.with_traceback(error.__traceback__)
    return CaptureError(
        f"{step}: the step raised {type(error).__name__} while it was captured: {raw}",
        rule="step-raised",
        where=where,
        why="it ran in warm-up. During capture tensors have no values yet, and code may check whether it is captured.",
        fix="see the original error above"
        + ("." if backend.name == "tape" else "; run the step with backend='tape' on CPU tensors to find the line."),
    )


def is_programs_own(error: Exception) -> bool:
    """Whether code around the step may expect an exception: its class is the program's or a library's.

    One that stands for another error may come from the capture.
    """
    is_first = error.__cause__ is None and error.__context__ is None
    return is_first and is_users(type(error)) and not isinstance(error, StepgraphError | CaptureRefused)


def cause_of(raised: StepgraphError, error: Exception) -> Exception | None:
    """Return what to raise a capture's error from: nothing if it was in the chain of `error` already."""
    return None if refusal_in(error) is raised else error


def _reader_and_fix(row: Entry, error: Exception) -> tuple[str, str | None]:
    """Return the function of torch that reads on the host, if the user's line does not, and the fix if it is known."""
    reader = torch_function(error) if row.id in _READ_WITHIN_TORCH else None
    if reader is not None:
        return f"torch/{reader.file}, {reader.function}", fix_in_torch(reader)
    where = error.where if isinstance(error, CaptureRefused) else error_location(error)
    return "", fix_in_library(where) if row.id == "host-read" and where is not None else None


@dataclass(frozen=True, slots=True)
class _Reader:
    file: str
    """Prefix of its path within torch."""
    function: str
    """Its name, or empty for all functions of the file."""
    fix: str


_READERS = (
    _Reader(
        "distributions/",
        "",
        "call torch.distributions.Distribution.set_default_validate_args(False) before the step, or pass "
        "validate_args=False: validation reads the arguments.",
    ),
    _Reader(
        "nn/modules/batchnorm.py",
        "",
        "give BatchNorm a momentum (momentum=0.1): with momentum=None it reads num_batches_tracked at each call.",
    ),
    _Reader(
        "nn/modules/transformer.py",
        "_detect_is_causal_mask",
        "pass is_causal=True or False, so that torch does not read the mask to find out (nn.Transformer has "
        "src_is_causal and tgt_is_causal, a decoder has tgt_is_causal).",
    ),
    _Reader(
        "nn/modules/transformer.py",
        "forward",
        "pass nn.TransformerEncoder(..., enable_nested_tensor=False): in eval mode it makes nested tensors of a padded "
        "batch, and reads the padding mask for that.",
    ),
    _Reader(
        "optim/swa_utils.py",
        "",
        "call update_parameters outside, after the step: it reads n_averaged at each call.",
    ),
    _Reader(
        "nn/utils/clip_grad.py",
        "",
        "leave error_if_nonfinite off and check the returned norm after the step.",
    ),
    *(
        _Reader(
            file,
            "",
            "leave the batch padded and mask the results: packing a sequence reads its lengths on the host.",
        )
        for file in ("nn/utils/rnn.py", "nn/modules/rnn.py")
    ),
)


def fix_in_torch(reader: Location) -> str | None:
    """Return the fix for a host read in a function of torch, if it is known."""
    rows = (row for row in _READERS if reader.file.startswith(row.file))
    return next((row.fix for row in rows if row.function in ("", reader.function)), None)


_LIBRARIES = re.compile(r"-packages[/\\](\w+)")
_MASKS = (
    "give the model a boolean attention mask of four dimensions, built outside the step, and use_cache=False: it reads "
    "a mask of two dimensions, or one that it makes itself, on the host."
)


def fix_in_library(where: Location) -> str | None:
    """Return the fix for a host read in a library's code, or None if the code is not a library's."""
    found = _LIBRARIES.search(where.file)
    if found is None:
        return None
    if found[1] == "transformers" and "mask" in where.file:
        return _MASKS
    return (
        f"the read is inside {found[1]}: choose arguments that avoid it, do this part outside the step, or graph the "
        "parts around it (stepgraph.graph_modules)."
    )


def refuse_changed_container(what: str | None, by: str = "the step") -> None:
    """Raise for a container that a call has changed, since a replay does not change the caller's container."""
    if what is not None:
        raise CaptureError(f"{by} changes a container that it was given: {what}", rule="argument-changed")
