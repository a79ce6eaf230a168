"""Every exception stepgraph raises.

CUDA reports a broken capture in one line that names neither the user's code nor the remedy ("operation failed due to
a previous error during capture"). Each error here says what happened, why, and what to type instead, and carries the
id of a rule in the catalogue. What the catalogue knows about a raw message (`catalogue.lookup`) becomes a
`CaptureError`.
"""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterable
from dataclasses import dataclass

from stepgraph.core import catalogue
from stepgraph.core.catalogue import Entry
from stepgraph.core.wording import counted


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The one of these names that a misspelt one may stand for."""
    others = [name for name in known if name != word]
    longer = [name for name in others if word and name.startswith(word)]
    return next(iter(longer if len(longer) == 1 else difflib.get_close_matches(word, others, 1, likeness)), None)


class StepgraphWarning(UserWarning):
    """Something the user should know and may want to change; the program is still right."""


class StepgraphError(Exception):
    """The base of all errors: what happened, details, why, how to fix it, and the rule's id.

    Without `why` or `fix` the texts of the rule's entry in the catalogue stand there.

    Example:
        >>> print(StepgraphError("the session is closed", rule="closed", fix="make another."))
        the session is closed   [closed]
        Why: its graphs and its pool are gone.
        Fix: make another.
    """

    def __init__(
        self, what: str, *, rule: str, details: Iterable[str] = (), why: str | None = None, fix: str | None = None
    ) -> None:
        if why is None or fix is None:
            known_why, known_fix = catalogue.entry(rule).reason_and_fix()
            why, fix = known_why if why is None else why, known_fix if fix is None else fix
        self.what, self.rule, self.details, self.why, self.fix = what, rule, tuple(details), why, fix
        lines = [f"{what}   [{rule}]", *(f"  {line}" for line in self.details)]
        lines += [f"Why: {why}"] if why else []
        lines += [f"Fix: {fix}"] if fix else []
        super().__init__("\n".join(lines))


class InvalidArgument(StepgraphError, ValueError):
    """An option or an argument given to stepgraph that it cannot work with."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a configuration breaks."""

    rule: str
    what: str
    details: tuple[str, ...]
    """The settings that break it, with their values."""
    why: str
    fix: str


class ConfigError(InvalidArgument):
    """A configuration that breaks one or more rules; `violations` has all of them."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        if len(self.violations) == 1:
            (one,) = self.violations
            super().__init__(one.what, rule=one.rule, details=one.details, why=one.why, fix=one.fix)
            return
        lines = []
        for number, each in enumerate(self.violations, 1):
            lines += [f"{number}. {each.what}   [{each.rule}]", *(f"   {line}" for line in each.details)]
            lines += [f"   Why: {each.why}", f"   Fix: {each.fix}"]
        super().__init__(
            f"the configuration breaks {counted(len(self.violations), 'rules')}", rule="config-rules", details=lines
        )


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


class ScriptError(StepgraphError, RuntimeError):
    """A user's script failed, or ran past its time limit."""


class NoStepError(ScriptError):
    """A user's script ran, and has no training step that can be judged."""


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


class CaptureRefused(RuntimeError):
    """Raised by the tape at the line that CUDA would refuse; the session turns it into a `CaptureError`."""

    def __init__(self, row: Entry, what: str, where: Location | None) -> None:
        code = f" (CUDA error {row.code})" if row.code is not None else ""
        super().__init__(f"{what}: {row.what}{code}")
        self.row, self.operation, self.where = row, what, where


def refusal_in(error: BaseException | None) -> StepgraphError | CaptureRefused | None:
    """Find the refusal in an exception or in the chain behind it: libraries put errors of their own around ours.

    The chain is what Python prints: causes (`raise LibraryError from error`), and contexts that are not suppressed.

    Example:
        >>> try:
        ...     trainer.fit(model)
        ... except Exception as error:
        ...     refusal = refusal_in(error)
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, StepgraphError | CaptureRefused):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


class CaptureError(StepgraphError, RuntimeError):
    """A capture that failed. The program is as it was before the call.

    `code` is CUDA's error number where there is one, `where` the user's line, `entry` the catalogue's entry.
    """

    def __init__(
        self,
        what: str,
        *,
        rule: str,
        details: Iterable[str] = (),
        why: str | None = None,
        fix: str | None = None,
        where: Location | None = None,
        entry: Entry | None = None,
    ) -> None:
        self.code, self.where, self.entry = None if entry is None else entry.code, where, entry
        lines = [f"at    {where}"] if where else []
        lines += [f"cuda  {entry.code} {entry.name}"] if entry is not None and entry.code is not None else []
        super().__init__(what, rule=rule, details=[*lines, *details], why=why, fix=fix)

    @classmethod
    def from_entry(
        cls,
        step: str,
        row: Entry,
        *,
        operation: str = "",
        where: Location | None = None,
        inside: str = "",
        raw: str = "",
        fix: str | None = None,
    ) -> CaptureError:
        """The error for a failure that the catalogue knows; `inside` is the function of torch that the line called."""
        details = [f"in    {inside}"] if inside else []
        details += [f"op    {operation}"] if operation else []
        details += [f"torch {raw}"] if raw else []
        why, known = row.reason_and_fix()  # the row may be the catalogue's with another fix
        fix = known if fix is None else fix
        return cls(f"{step}: {row.what}", rule=row.id, details=details, why=why, fix=fix, where=where, entry=row)
