"""`verify_script` runs a user's script three times from one seed, eager, eager again and graphed, and compares.

Every captured step, and the training around graphed modules, callables and stages, is traced while the script trains
(`script_trace`). If the graphed run differs, the eager script runs once more, and the operations of the differing step
are compared with those of the step before: a number that a graph has frozen is named with its line.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepgraph.errors import Location
from stepgraph.oplog import Difference as OperationDifference
from stepgraph.proof.causes import Cause, cause_by_kinds, cause_by_operation, unknown_cause
from stepgraph.proof.compare import Comparison
from stepgraph.proof.costs import Cost
from stepgraph.proof.report import Verdict, VerifyReport
from stepgraph.proof.script_trace import ScriptMoment
from stepgraph.proof.trace import Difference, Moment, Trace, differences, table
from stepgraph.script.run import Outcome, Script, Status, run_script

__all__ = ["ScriptReport", "verify_script"]

_PROBE = "stepgraph.proof.script_trace:VerifyProbe"
RUNS = ("eager", "eager again", "graphed")


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the script."""

    outcome: Outcome
    moments: tuple[ScriptMoment, ...] = ()

    @property
    def has_failed(self) -> bool:
        return self.outcome.status in (Status.FAILED, Status.TIMED_OUT)

    @property
    def subjects(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.outcome.result.get("subjects", {})
        return found

    def of(self, subject: str) -> list[ScriptMoment]:
        return [moment for moment in self.moments if moment.subject == subject]


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """The outcome of `stepgraph verify SCRIPT`: one report for each thing that the script has graphed."""

    script: str
    reports: tuple[VerifyReport, ...] = ()
    cannot_judge: tuple[str, ...] = ()
    """Reasons for which nothing certain can be said."""
    failed: str = ""
    """The traceback of the eager script, if it failed by itself or ran past the time limit."""
    graphed_failed: str = ""
    """The traceback of the graphed run, if only that one failed."""
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Files that the script opened for writing."""

    @property
    def verdict(self) -> Verdict | None:
        """The worst of all verdicts; None if the script itself failed."""
        if self.failed:
            return None
        found = [report.verdict for report in self.reports]
        if self.graphed_failed or Verdict.DIFFERENT in found:
            return Verdict.DIFFERENT
        if self.cannot_judge or not found or Verdict.CANNOT_JUDGE in found:
            return Verdict.CANNOT_JUDGE
        return Verdict.WITHIN if Verdict.WITHIN in found else Verdict.EQUAL

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "script": self.script,
            "verdict": None if self.verdict is None else self.verdict.value,
            "reports": [report.to_dict() for report in self.reports],
            "cannot_judge": list(self.cannot_judge),
            "script_failed": self.failed or None,
            "graphed_failed": self.graphed_failed or None,
            "notes": list(self.notes),
            "files_written": list(self.files),
        }


def verify_script(
    script: Script,
    *,
    steps: int = 8,
    seed: int = 0,
    rtol: float = 0.0,
    atol: float = 0.0,
    on_run: Callable[[str], None] = lambda name: None,
    stdout_to_stderr: bool = False,
) -> ScriptReport:
    """Run a script eagerly twice and graphed once, and compare all that it has graphed."""
    with tempfile.TemporaryDirectory(prefix="stepgraph-verify-") as folder:

        def run(name: str, mode: str, **more: Any) -> _Run:
            on_run(name)
            trace = Path(folder, f"{name}.pt")
            options = {"mode": mode, "seed": seed, "steps": steps, "trace": str(trace), **more}
            outcome = run_script(script, _PROBE, options, stdout_to_stderr=stdout_to_stderr)
            saved = torch.load(trace, weights_only=False) if trace.exists() else []  # our own child's file
            return _Run(outcome, tuple(ScriptMoment(*one) for one in saved))

        eager = run("eager", "eager")
        shared = _shared(script, eager)
        if eager.has_failed:
            return ScriptReport(**shared, failed=eager.outcome.exception or str(eager.outcome.status))
        if not eager.moments:
            return ScriptReport(**{**shared, "cannot_judge": (*shared["cannot_judge"], _nothing_graphed(script))})
        again, graphed = run("eager again", "eager"), run("graphed", "graphed")
        if graphed.has_failed:
            return ScriptReport(**shared, graphed_failed=graphed.outcome.exception or str(graphed.outcome.status))
        reports = [
            _judged(subject, (eager, again, graphed), (rtol, atol), run)
            for subject in eager.subjects
            if eager.of(subject)
        ]
        return ScriptReport(**shared, reports=tuple(reports))


def _shared(script: Script, run: _Run) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "script": str(script),
        "cannot_judge": outcome.cannot_judge,
        "notes": outcome.notes,
        "files": tuple(dict.fromkeys(file.path for file in outcome.files)),
    }


def _nothing_graphed(script: Script) -> str:
    if script.step is not None:
        return f"the script never calls `{script.step}`"
    return (
        "the script graphs nothing with stepgraph. Name the function that trains one step: --step NAME. "
        f"`stepgraph check {script}` says which functions can be captured"
    )


def _judged(subject: str, runs: Sequence[_Run], bounds: tuple[float, float], run: Callable[..., _Run]) -> VerifyReport:
    eager, _, graphed = runs
    traces = [_trace(one.of(subject)) for one in runs]
    found, own = _compared(traces[0], traces[2], *bounds), _compared(traces[0], traces[1])
    warned = tuple(graphed.outcome.result.get("warned", ()))
    costs = tuple(_cost(side, one, subject) for side, one in (("eager", eager), ("graphed", graphed)))
    comparison = Comparison(
        steps=len(traces[0].moments),
        rows=tuple(table(traces[0], found)),
        spread=tuple(table(traces[0], own)),
        first=found[0] if found else None,
        module=_first_part(found),
        cause=_cause(subject, found, own, warned, run) if found else None,
        costs=costs,
        notes=tuple(text.partition("\n")[0] for text in warned),
        bounds=bounds,
    )
    known = graphed.subjects.get(subject, eager.subjects[subject])
    return VerifyReport(subject, known["kind"], known["backend"], int(known["replays"]), comparison)


def _trace(moments: Sequence[ScriptMoment]) -> Trace:
    return Trace(tuple(Moment(moment.values) for moment in moments))


def _compared(one: Trace, two: Trace, rtol: float = 0.0, atol: float = 0.0) -> list[Difference]:
    """Compare two traces, also of scripts that took another course: the first step that one of them lacks differs."""
    length = max(len(one.moments), len(two.moments))
    return list(differences(_filled(one, length), _filled(two, length), rtol, atol))


def _filled(trace: Trace, length: int) -> Trace:
    return Trace((*trace.moments, *(Moment({}),) * (length - len(trace.moments))))


def _cause(
    subject: str,
    found: Sequence[Difference],
    own: Sequence[Difference],
    warned: Sequence[str],
    run: Callable[..., _Run],
) -> Cause:
    if own:
        return Cause("eager-differs", f"two eager runs differ from step {own[0].step} on, first in {own[0]}")
    step = found[0].step
    first = [difference for difference in found if difference.step == step]
    known = cause_by_kinds(first, warned)
    if known is not None or step == 0:
        return known or unknown_cause(first)
    kinds = sorted({difference.kind for difference in first})
    logs = run("operations", "logs", logged_subject=subject, logged_step=step, kinds=kinds)
    changed = logs.outcome.result.get("operation")
    if changed is None:
        return unknown_cause(first)
    where = None if changed["where"] is None else Location(*changed["where"])
    told = {name: changed[name] for name in ("index", "operation", "before", "now")}
    return cause_by_operation(OperationDifference(where=where, **told), step)


def _first_part(found: Sequence[Difference]) -> str | None:
    """The graphed part whose result differs first, or the module that owns the first differing tensor."""
    if not found:
        return None
    first = [difference for difference in found if difference.step == found[0].step]
    part = next((one for one in first if one.kind == "outputs" and ":" in one.name), None)
    owned = next((one for one in first if one.kind in ("gradients", "buffers", "parameters")), None)
    if part is not None:
        return part.name.partition(":")[0]
    return f"{owned.name.rpartition('.')[0]}: {owned.kind}" if owned is not None else None


def _cost(side: str, run: _Run, subject: str) -> Cost:
    moments = run.of(subject)
    times = [m.step_ms for m in moments[len(moments) // 2 :] if m.step_ms is not None]
    launches, replays, busy = next((m.counts for m in moments if m.counts is not None), (None, None, None))
    peak = run.outcome.result.get("peak_bytes")
    return Cost(side, launches, replays, busy, min(times, default=None), peak)
