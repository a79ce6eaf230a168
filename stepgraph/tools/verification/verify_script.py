"""`verify_script` runs a user's script three times from one seed, eager, eager again and graphed, and compares.

Every captured step, and the training around graphed modules, callables and stages, is traced while the script trains
(`script_trace`). If the graphed run differs, the graphed script runs once more, and the experiments of
`stepgraph.verify` are made at the differing step.

Under torchrun each rank compares what it has traced. All ranks run the script equally often, because it runs on all of
them together: where one rank has to look for a cause, all do. The first rank reports for all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from stepgraph.core.errors import Location
from stepgraph.engine.call.report import render
from stepgraph.tools.script.ranks import exchanged, rank
from stepgraph.tools.script.run import Outcome, Script, Status, run_script, timed_out
from stepgraph.tools.verification.causes import Cause, cause_by_kinds, reused_output, unknown_cause
from stepgraph.tools.verification.compare import Comparison, eager_differs
from stepgraph.tools.verification.costs import Cost
from stepgraph.tools.verification.report import Verdict, VerifyReport
from stepgraph.tools.verification.script_trace import ScriptMoment
from stepgraph.tools.verification.trace import Difference, Moment, Trace, differences, table

__all__ = ["ScriptReport", "verify_script"]

_PROBE = "stepgraph.tools.verification.script_trace:VerifyProbe"
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
    refused: tuple[str, ...] = ()
    """Files that it was not allowed to write."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """Under torchrun: of each rank its number, its verdicts, and the text and the fields of its reports."""

    @property
    def verdict(self) -> Verdict | None:
        """The worst of all verdicts, of all ranks; None if the script itself failed."""
        if self.failed:
            return None
        found = [report.verdict for report in self.reports]
        found += [Verdict(verdict) for rank in self.ranks for verdict in rank["verdicts"]]
        if self.graphed_failed or Verdict.DIFFERENT in found:
            return Verdict.DIFFERENT
        if self.cannot_judge or not found or Verdict.CANNOT_JUDGE in found:
            return Verdict.CANNOT_JUDGE
        return Verdict.WITHIN if Verdict.WITHIN in found else Verdict.EQUAL

    @property
    def rule(self) -> str | None:
        """The rule of the first cause that was found, on any rank."""
        own = (report.to_dict()["cause"] for report in self.reports)
        others = (report["cause"] for rank in self.ranks for report in rank["reports"])
        return next((str(cause["rule"]) for cause in (*own, *others) if cause is not None), None)

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
            "files_refused": list(self.refused),
            "ranks": [{key: rank[key] for key in ("rank", "verdicts", "reports")} for rank in self.ranks],
        }


class Runs(Protocol):
    """Runs a script with a probe: `run_script`, or for tests something in this process."""

    def __call__(
        self, script: Script, probe: str, options: Mapping[str, Any], *, stdout_to_stderr: bool = ...
    ) -> Outcome: ...


def verify_script(
    script: Script,
    *,
    steps: int = 8,
    seed: int = 0,
    rtol: float = 0.0,
    atol: float = 0.0,
    on_run: Callable[[str], None] = lambda name: None,
    stdout_to_stderr: bool = False,
    runs: Runs = run_script,
) -> ScriptReport:
    """Run a script eagerly twice and graphed once, and compare all that it has graphed."""
    with tempfile.TemporaryDirectory(prefix="stepgraph-verify-") as folder:

        def run(name: str, mode: str, **more: Any) -> _Run:
            on_run(name)
            trace = Path(folder, f"{mode}.pt")
            trace.unlink(missing_ok=True)
            options = {"mode": mode, "seed": seed, "steps": steps, "trace": str(trace), **more}
            outcome = runs(script, _PROBE, options, stdout_to_stderr=stdout_to_stderr)
            saved = torch.load(trace, weights_only=False) if trace.exists() else []  # our own child's file
            return _Run(outcome, tuple(ScriptMoment(*one) for one in saved))

        def everywhere(value: Any) -> list[Any]:
            return [one["value"] for one in exchanged({"value": value}, script.timeout)]

        eager = run("eager", "eager")
        shared = _shared(script, eager)
        if eager.has_failed:
            return ScriptReport(**shared, failed=_failure(script, eager.outcome))
        subjects = [name for names in everywhere([s for s in eager.subjects if eager.of(s)]) for name in names]
        if not subjects:
            return ScriptReport(**{**shared, "cannot_judge": (*shared["cannot_judge"], _nothing_graphed(script))})
        again, graphed = run("eager again", "eager", logs_writes=True), run("graphed", "graphed")
        shared["cannot_judge"] = tuple(dict.fromkeys((*shared["cannot_judge"], *again.outcome.cannot_judge)))
        if graphed.has_failed:
            return ScriptReport(**shared, graphed_failed=_failure(script, graphed.outcome))
        judges = [_Judge(name, (eager, again, graphed), (rtol, atol)) for name in dict.fromkeys(subjects)]
        reports = [report for judge in judges if (report := judge.report(run, everywhere)) is not None]
        return ScriptReport(**shared, reports=tuple(reports), ranks=_ranks(reports, everywhere))


def _ranks(reports: Sequence[VerifyReport], everywhere: Callable[[Any], list[Any]]) -> tuple[Mapping[str, Any], ...]:
    """What all ranks report; nothing without torchrun."""
    own = {
        "rank": rank(),
        "verdicts": [report.verdict.value for report in reports],
        "text": "\n".join(render(report, width=80) for report in reports if report.verdict is not Verdict.EQUAL),
        "reports": [report.to_dict() for report in reports],
    }
    found = everywhere(own)
    return tuple(found) if len(found) > 1 else ()


def _shared(script: Script, run: _Run) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "script": str(script),
        "cannot_judge": outcome.cannot_judge,
        "notes": outcome.notes,
        "files": tuple(dict.fromkeys(file.path for file in outcome.files if not file.refused)),
        "refused": tuple(dict.fromkeys(file.path for file in outcome.files if file.refused)),
    }


def _failure(script: Script, outcome: Outcome) -> str:
    if outcome.status is Status.TIMED_OUT:
        return str(timed_out(script, outcome))
    return outcome.exception or str(outcome.status)


def _nothing_graphed(script: Script) -> str:
    if script.step is not None:
        return f"the script never calls `{script.step}`"
    return (
        "the script graphs nothing with stepgraph. Name the function that trains one step: --step NAME. "
        f"`stepgraph check {script}` says which functions can be captured"
    )


class _Judge:
    """Compares the three runs of one subject, and looks for the cause of a difference."""

    def __init__(self, subject: str, runs: Sequence[_Run], bounds: tuple[float, float]) -> None:
        self._subject, self._bounds = subject, bounds
        self._eager, _, self._graphed = runs
        self._expected, again, received = (_trace(one.of(subject)) for one in runs)
        self._found, self._own = _compared(self._expected, received, *bounds), _compared(self._expected, again)
        self._warned = tuple(self._graphed.outcome.result.get("warned", ()))
        held = [one.subjects.get(subject, {}).get("overwritten", ()) for one in (self._eager, self._graphed)]
        self._overwritten = [name for name in held[1] if name not in held[0]]

    def report(self, run: Callable[..., _Run], everywhere: Callable[[Any], list[Any]]) -> VerifyReport | None:
        """Judge the subject; None if this rank has none of that name."""
        cause, module = self._cause(run, everywhere)
        subject, found = self._subject, self._found
        known = self._graphed.subjects.get(subject, self._eager.subjects.get(subject))
        if known is None:
            return None
        costs = (_cost(side, one, subject) for side, one in (("eager", self._eager), ("graphed", self._graphed)))
        comparison = Comparison(
            steps=len(self._expected.moments),
            rows=tuple(table(self._expected, found)),
            spread=tuple(table(self._expected, self._own)),
            first=found[0] if found else None,
            module=module or _first_part(found),
            cause=cause,
            costs=tuple(costs),
            notes=(*(text.partition("\n")[0] for text in self._warned), *known.get("notes", ())),
            bounds=self._bounds,
        )
        return VerifyReport(subject, known["kind"], known["backend"], int(known["replays"]), comparison)

    def _cause(
        self, run: Callable[..., _Run], everywhere: Callable[[Any], list[Any]]
    ) -> tuple[Cause | None, str | None]:
        """The cause of the difference, if there is one, and the first module where an experiment has named it."""
        found, own = self._found, self._own
        step = found[0].step if found else None
        first = [difference for difference in found if difference.step == step]
        known = cause_by_kinds(first, self._warned) if found else None
        steps = [one for one in everywhere(step) if one is not None]
        is_settled = any(everywhere(bool(own) or known is not None))
        shown = None if is_settled or not steps else self._experiments(min(steps), run)
        if not found:
            return reused_output(self._overwritten), None
        if own:
            return eager_differs(own), None
        if known is not None or shown is None:
            return known or unknown_cause(first), None
        return shown

    def _experiments(self, step: int, run: Callable[..., _Run]) -> tuple[Cause, str | None] | None:
        """Run the script again, on all ranks, and look for the cause at the step that differs."""
        outcome = run("again, to find the cause", "experiments", subject=self._subject, step=step).outcome
        cause = outcome.result.get("cause")
        if cause is None:
            return None
        where = None if cause["where"] is None else Location(*cause["where"])
        return Cause(cause["rule"], cause["what"], where), cause["module"]


def _trace(moments: Sequence[ScriptMoment]) -> Trace:
    return Trace(tuple(Moment(moment.values) for moment in moments))


def _compared(one: Trace, two: Trace, rtol: float = 0.0, atol: float = 0.0) -> list[Difference]:
    """Compare two traces, also of scripts that took another course: the first step that one of them lacks differs."""
    length = max(len(one.moments), len(two.moments))
    return list(differences(_filled(one, length), _filled(two, length), rtol, atol))


def _filled(trace: Trace, length: int) -> Trace:
    return Trace((*trace.moments, *(Moment({}),) * (length - len(trace.moments))))


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
