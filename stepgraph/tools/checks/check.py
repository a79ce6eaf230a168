"""`stepgraph.check` runs a script for some steps and says whether its step can be captured, and what stands in the way.

Nothing is captured for the verdict on a machine without a GPU: the step runs as the user wrote it, watched by the probe
(`check_probe`). With a GPU torch reports hidden waits too.

Example:
    >>> report = stepgraph.check("train.py", ["--epochs", "1"])
    >>> for finding in report.findings:
    ...     print(finding.where, finding.rule)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.core.errors import Location
from stepgraph.tools.checks.findings import Api, Finding, Seen, StepShape, Verdict, collect, judge
from stepgraph.tools.script.run import Outcome, Script, Status, run_script

__all__ = ["CheckReport", "check"]

DEFAULT_STEPS = 10
"""Steps that are watched before the script is stopped."""
PROBE = "stepgraph.tools.checks.check_probe:CheckProbe"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found."""

    script: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    outside: tuple[Finding, ...]
    """What a step must not do and this script does between its steps: harmless there."""
    shape: StepShape
    outcome: Outcome
    is_module: bool = False
    """Whether the script is a module's name."""

    @property
    def is_graphed(self) -> bool:
        """Whether the script uses stepgraph already."""
        return bool(self.outcome.result.get("is_graphed"))

    @property
    def fits(self) -> bool:
        """Whether the whole step can be captured as it is."""
        return self.verdict.api is Api.CAPTURE

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "script": self.script,
            "status": self.outcome.status.value,
            "verdict": self.verdict.api.value,
            "sentence": self.verdict.sentence,
            "reason": self.verdict.reason,
            "paste": list(self.verdict.paste),
            "steps": self.shape.steps,
            "function": self.shape.function,
            "findings": [finding.to_dict() for finding in self.findings],
            "outside": [finding.to_dict() for finding in self.outside],
            "cannot_judge": list(self.outcome.cannot_judge),
            "notes": list(self.outcome.notes),
            "files_written": [file.path for file in self.outcome.files],
            "exception": self.outcome.exception,
        }


def check(
    script: str,
    args: Sequence[str] = (),
    *,
    steps: int = DEFAULT_STEPS,
    step: str | None = None,
    timeout: float = 300.0,
    is_module: bool = False,
    writes: bool = True,
    stdout_to_stderr: bool = False,
) -> CheckReport:
    """Run a script, watch its training steps, and report what a captured step could not do, line by line.

    Args:
        script: The path of the script, or with `is_module` the dotted name of a module.
        args: The script's own arguments.
        steps: How many steps to watch; then the script is stopped.
        step: The function that is one step, if it is not found by itself: `train_step`, `Trainer.step`, `module:name`.
        timeout: Seconds after which the script is ended.
        is_module: Run `python -m script`.
        writes: False refuses files that the script opens for writing.
        stdout_to_stderr: Keep stdout free of what the script prints.
    """
    wanted = Script(script, tuple(args), is_module=is_module, step=step, timeout=timeout, writes=writes)
    outcome = run_script(wanted, PROBE, {"steps": steps}, stdout_to_stderr=stdout_to_stderr)
    return report_of(script, outcome, is_module=is_module)


def report_of(script: str, outcome: Outcome, *, is_module: bool = False) -> CheckReport:
    """Make the report of a run."""
    result = outcome.result
    findings = collect(map(_seen_of, result.get("inside", ())))
    lines = {(one.where.file, one.where.line) for one in findings if one.where is not None}
    outside = [
        one
        for one in collect(map(_seen_of, result.get("outside", ())))
        if one.where is None or (one.where.file, one.where.line) not in lines
    ]
    shape = _shape_of(result)
    unknown = list(outcome.cannot_judge)
    if result.get("is_hidden"):
        unknown.append("a profiler or a debugger hides what Python runs in the step")
    if outcome.status is Status.TIMED_OUT:
        unknown.append("the time limit was over")
    verdict = judge(findings, shape, unknown)
    return CheckReport(script, verdict, tuple(findings), tuple(outside), shape, outcome, is_module)


def _seen_of(plain: Mapping[str, Any]) -> Seen:
    where = Location(*plain["where"]) if plain["where"] is not None else None
    return Seen(**{**plain, "where": where})


def _unfit(models: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The outermost modules that no replay can serve: a model by the user's name, a part by its path."""
    found: dict[str, str] = {}
    for model in models:
        if "" in model["unfit"]:
            found[model["name"] or model["class"]] = model["unfit"][""]
            continue
        for path, rule in sorted(model["unfit"].items()):
            if not any(path.startswith(f"{other}.") for other in model["unfit"]):
                found[path] = rule
    return found


def _shape_of(result: Mapping[str, Any]) -> StepShape:
    step = result.get("step", {})
    models = result.get("models", ())
    loop = step.get("loop")
    return StepShape(
        steps=result.get("steps", 0),
        function=step.get("function", ""),
        parameters=tuple(step.get("parameters", ())),
        loop=Location(*loop) if loop is not None else None,
        models=tuple(model["name"] for model in models if model["name"]),
        clean_modules=tuple(models[0]["clean"]) if models else (),
        unfit=_unfit(models),
        library=step.get("library", ""),
        replays=result.get("replays", 0),
    )
