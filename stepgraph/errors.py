"""Every exception stepgraph raises, and the table that turns a CUDA failure into a cause and a fix.

CUDA reports a broken capture in one line that names neither the user's code nor the remedy ("operation failed due to
a previous error during capture"). Each error here says what happened, why, and what to type instead, and carries a
rule id that is a heading of `docs/errors.md`. Raised errors, the tape's refusals and the docs page read `ERROR_TABLE`.
"""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterable
from dataclasses import dataclass


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The one of these names that a misspelt one may stand for."""
    others = [name for name in known if name != word]
    longer = [name for name in others if word and name.startswith(word)]
    return next(iter(longer if len(longer) == 1 else difflib.get_close_matches(word, others, 1, likeness)), None)


class StepgraphWarning(UserWarning):
    """Something the user should know and may want to change; the program is still right."""


class StepgraphError(Exception):
    """The base of all errors: what happened, details, why, how to fix it, and the rule's id.

    Example:
        >>> print(StepgraphError("the batch is on another device", rule="device", fix="move it"))
        the batch is on another device   [device]
        Fix: move it
    """

    def __init__(self, what: str, *, rule: str, details: Iterable[str] = (), why: str = "", fix: str = "") -> None:
        self.what, self.rule, self.details, self.why, self.fix = what, rule, tuple(details), why, fix
        lines = [f"{what}   [{rule}]", *(f"  {line}" for line in self.details)]
        lines += [f"Why: {why}"] if why else []
        lines += [f"Fix: {fix}"] if fix else []
        super().__init__("\n".join(lines))


class InvalidArgument(StepgraphError, ValueError):
    """An option or an argument given to stepgraph that it cannot work with."""


class SignatureMismatch(StepgraphError):
    """A call under `strict=True` that no captured graph fits."""


class StateChanged(StepgraphError):
    """Something that a graph has baked in has changed since the capture, and `strict=True` forbids to capture again.

    Without `strict`: an optimizer between two graphs changed it, in the middle of a step.
    """


class NonFinite(StepgraphError, ArithmeticError):
    """With `nan_check="device"`: a loss or a gradient of an earlier call held a NaN or an infinity."""


class ClosedError(StepgraphError):
    """A captured step or a session used after it was closed."""


class BuildError(StepgraphError, RuntimeError):
    """The part of stepgraph in C++ could not be compiled."""


class StaleMemoryError(StepgraphError, RuntimeError):
    """A graph was about to read memory that another graph's replay has overwritten."""


@dataclass(frozen=True, slots=True)
class Location:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line itself, where it can be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": `{self.source}`" if self.source else "")


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """One row of the error table."""

    rule: str
    """The id shown in brackets; a heading of docs/errors.md."""
    what: str
    why: str
    fix: str
    texts: tuple[str, ...]
    """Pieces of the raw message that identify it; CUDA's name does too."""
    code: int | None = None
    """The CUDA runtime's error number, where the failure has one."""
    name: str = ""
    """The CUDA name."""


ERROR_TABLE: tuple[ErrorEntry, ...] = (
    ErrorEntry(
        "host-data",
        "data moves between host and device memory while the step is captured",
        "a graph replays fixed device work; a copy from or to pageable host memory needs the host at every replay. "
        "torch.tensor, as_tensor, from_numpy, a list used as an index, .cpu() and, in older versions of torch, "
        "`x[0] = 1.0` make one.",
        "pass the data to the step as an argument, make it before the step, or build it on the device "
        "(torch.full, torch.arange, x[0].fill_(1.0)).",
        texts=("unless the CPU tensor is pinned",),
    ),
    ErrorEntry(
        "host-read",
        "the step waits for the device, or reads a tensor's value on the host, while it is captured",
        "nothing runs during capture, so there is no value yet, and a replay could not act on it. .item(), bool(), "
        "float(), .tolist(), print, nonzero, mask indexing, unique and torch.cuda.synchronize all do this.",
        "return the tensor and read it after the step, or stay on the device (torch.where, masked_fill, "
        "F.one_hot(x, n), repeat_interleave(..., output_size=n)).",
        texts=("operation not permitted when stream is capturing",),
        code=900,
        name="cudaErrorStreamCaptureUnsupported",
    ),
    ErrorEntry(
        "capture-invalidated",
        "the capture was broken by an earlier call",
        "a call that CUDA forbids during capture ran before this point, in the step (its error may have been caught "
        "there) or in code that shares its thread.",
        "look for a try/except in the step around a host read; on a GPU, run the step on CPU tensors to get the line.",
        texts=("operation failed due to a previous error during capture",),
        code=901,
        name="cudaErrorStreamCaptureInvalidated",
    ),
    ErrorEntry(
        "capture-merge",
        "two captures were about to be joined",
        "the step waits on a stream that another capture is recording.",
        "capture one step at a time, or share one stepgraph.Session between them.",
        texts=("merge of separate capture sequences",),
        code=902,
        name="cudaErrorStreamCaptureMerge",
    ),
    ErrorEntry(
        "capture-unmatched",
        "the capture ended on another stream than it began on",
        "the step left another stream current when it returned.",
        "enter streams with `with torch.cuda.stream(s):` so that they are left again.",
        texts=("capture was not initiated in this stream",),
        code=903,
        name="cudaErrorStreamCaptureUnmatched",
    ),
    ErrorEntry(
        "unjoined-stream",
        "a side stream that the step started was not joined before the step returned",
        "a graph ends where its capture stream ends; work on another stream would be lost.",
        "torch.cuda.current_stream().wait_stream(side) before the step returns.",
        texts=("capturing stream has unjoined work",),
        code=904,
        name="cudaErrorStreamCaptureUnjoined",
    ),
    ErrorEntry(
        "capture-isolation",
        "the step waits for work that was queued outside the capture",
        "an event or stream from before the capture cannot be part of the graph.",
        "wait for that work before the step is called, or move it into the step.",
        texts=("dependency created on uncaptured work in another stream",),
        code=905,
        name="cudaErrorStreamCaptureIsolation",
    ),
    ErrorEntry(
        "legacy-stream",
        "work was queued on the default stream while another stream is captured",
        "often a parameter's gradient accumulator that was made on the default stream and is still alive: a loss of "
        "an eager step was kept with its graph, or DDP or nn.utils.weight_norm was built on the default stream.",
        "drop or .detach() losses kept from before, build DDP under `with session.stream():`, and take "
        "nn.utils.parametrizations.weight_norm.",
        texts=("would make the legacy stream depend on a capturing",),
        code=906,
        name="cudaErrorStreamCaptureImplicit",
    ),
    ErrorEntry(
        "captured-event",
        "the host asks for an event that was recorded inside the capture",
        "the event belongs to the graph and never happens outside it.",
        "time and query around the step, not in it.",
        texts=("operation not permitted on an event last recorded in a capturing stream",),
        code=907,
        name="cudaErrorCapturedEvent",
    ),
    ErrorEntry(
        "capture-thread",
        "the capture was ended by another thread than began it",
        "a capture belongs to the thread that called the step.",
        "call the step from one thread.",
        texts=("attempt to terminate a thread-local capture sequence from another thread",),
        code=908,
        name="cudaErrorStreamCaptureWrongThread",
    ),
    ErrorEntry(
        "illegal-address",
        "a kernel touched memory that is not there any more",
        "a graph uses the addresses of its capture; a tensor it reads was freed or moved since.",
        "keep the tensors that the step uses alive and in place, or step.reset() after moving them. The process must "
        "be restarted: CUDA does not recover from this.",
        texts=("illegal memory access",),
        code=700,
        name="cudaErrorIllegalAddress",
    ),
    ErrorEntry(
        "out-of-memory",
        "the device ran out of memory during capture",
        "a graph holds its activations' memory for as long as it lives, beside what eager code has cached.",
        "share one stepgraph.Session between steps, lower max_graphs, close steps no longer used, or make the batch "
        "smaller.",
        texts=("out of memory",),
        code=2,
        name="cudaErrorMemoryAllocation",
    ),
    ErrorEntry(
        "generator",
        "the step draws random numbers from a generator that the graph does not know",
        "a graph advances only the generators registered with it; another one would repeat its numbers.",
        "stepgraph.capture(step, generators=[generator]).",
        texts=(
            "CUDA generator not in capture mode",
            "construct a new CUDAGeneratorImpl",
            "generator is not registered",
        ),
    ),
    ErrorEntry(
        "reseed",
        "the step seeds a random generator",
        "the seed would be set once, at capture, and not at the replays.",
        "seed before the step. For a checkpoint inside a tracker's fork: preserve_rng_state=False and "
        "context_fn=tracker.checkpoint_contexts.",
        texts=("can be called during stream capture only if new seed",),
    ),
    ErrorEntry(
        "optimizer-capturable",
        "an optimizer that keeps its step count on the host was about to be captured",
        "the count would be frozen, and with it the bias correction.",
        "leave optimizer='auto', or use optimizer='capturable'.",
        texts=("param_groups' capturable is False",),
    ),
    ErrorEntry(
        "tape-limit",
        "the tape does not record this kind of work",
        "it sees plain CPU tensors and ATen operators; sparse tensors and higher-order operators (torch.cond, "
        "flex_attention) are outside its model.",
        "capture on a GPU, or leave this part out of the step.",
        texts=("the tape does not record",),
    ),
    ErrorEntry(
        "library-call",
        "a linear-algebra call that works on the host was about to be captured",
        "this decomposition synchronizes inside its library.",
        "move it out of the step, or take a form that stays on the device (torch.linalg.qr, inv_ex, cholesky_ex).",
        texts=("CUSOLVER_STATUS", "cusolver error", "MAGMA"),
    ),
)


def lookup(text: str) -> ErrorEntry | None:
    """The row of the error table that a raw message belongs to."""
    folded = text.lower()
    pieces = ((row, piece) for row in ERROR_TABLE for piece in (*row.texts, row.name) if piece)
    return next((row for row, piece in pieces if piece.lower() in folded), None)


def entry(rule: str) -> ErrorEntry:
    """The row of the error table with this rule id."""
    return next(row for row in ERROR_TABLE if row.rule == rule)


class CaptureRefused(RuntimeError):
    """Raised by the tape at the line that CUDA would refuse; the session turns it into a `CaptureError`."""

    def __init__(self, row: ErrorEntry, what: str, where: Location | None) -> None:
        code = f" (CUDA error {row.code})" if row.code is not None else ""
        super().__init__(f"{what}: {row.what}{code}")
        self.row, self.operation, self.where = row, what, where


class CaptureError(StepgraphError, RuntimeError):
    """A capture that failed. The program is as it was before the call.

    `code` is CUDA's error number where there is one, `where` the user's line, `entry` the row of the error table.
    """

    def __init__(
        self,
        what: str,
        *,
        rule: str,
        details: Iterable[str] = (),
        why: str = "",
        fix: str = "",
        where: Location | None = None,
        entry: ErrorEntry | None = None,
    ) -> None:
        self.code, self.where, self.entry = None if entry is None else entry.code, where, entry
        lines = [f"at    {where}"] if where else []
        lines += [f"cuda  {entry.code} {entry.name}"] if entry is not None and entry.code is not None else []
        super().__init__(what, rule=rule, details=[*lines, *details], why=why, fix=fix)

    @classmethod
    def from_entry(
        cls,
        step: str,
        row: ErrorEntry,
        *,
        operation: str = "",
        where: Location | None = None,
        inside: str = "",
        raw: str = "",
        fix: str | None = None,
    ) -> CaptureError:
        """The error for a failure that the table knows; `inside` is the function of torch that the line called."""
        details = [f"in    {inside}"] if inside else []
        details += [f"op    {operation}"] if operation else []
        details += [f"torch {raw}"] if raw else []
        what, fix = f"{step}: {row.what}", fix or row.fix
        return cls(what, rule=row.rule, details=details, why=row.why, fix=fix, where=where, entry=row)
