"""`--try`: captures a script's step for real, in the script's own process, and times its replays.

The function that is one step is captured, as a line with `stepgraph.capture` in the script would do. In a second run
the model is compiled first: what a compiler makes of a step cannot be predicted, so it is measured only. Imports no
torch: what runs in the script's process is `trial_probe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepgraph.core.wording import counted
from stepgraph.tools.script.run import Outcome, Script, Status, run_script
from stepgraph.tools.timeline import StepTimes

_PROBE = "stepgraph.tools.advice.trial_probe:TrialProbe"
NAMES = ("whole step", "whole step + compile")


@dataclass(frozen=True, slots=True)
class Trial:
    """A capture that was tried."""

    name: str
    step_ms: float | None = None
    used_bytes: int | None = None
    replays: int = 0
    eager_reasons: Mapping[str, int] | None = None
    error: str = ""


def try_captures(script: Script, steps: int, *, stdout_to_stderr: bool = False) -> tuple[Trial, ...]:
    """Run the script with its step captured, and with its model compiled too; one row each."""
    return tuple(
        _trial(
            name,
            run_script(script, _PROBE, {"steps": steps, "compiles": compiles}, stdout_to_stderr=stdout_to_stderr),
        )
        for name, compiles in zip(NAMES, (False, True), strict=True)
    )


def _trial(name: str, outcome: Outcome) -> Trial:
    result = outcome.result
    if outcome.status in (Status.FAILED, Status.TIMED_OUT):
        lines = outcome.exception.splitlines() or [str(outcome.status)]
        errors = [line for line in lines if line[:1].strip() and not line.startswith("Traceback")]
        return Trial(name, error=(errors or lines)[-1] if not errors else errors[0])
    times = result.get("times_ms", ())
    if not times:
        return Trial(
            name, error=f"the script ended after {counted(outcome.steps, 'steps')}, before any replay was timed"
        )
    if not result.get("replays"):
        reasons = ", ".join(result.get("eager_reasons", ())) or "it was never called"
        return Trial(name, error=f"the step was never replayed: {reasons}")
    return Trial(
        name,
        StepTimes(tuple(times)).median,
        result.get("used_bytes"),
        result.get("replays", 0),
        result.get("eager_reasons", {}),
    )
