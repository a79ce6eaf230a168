"""`stepgraph verify SCRIPT`: the user's own script, eager and graphed from one seed, compared bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, Seed
from stepgraph.commands.script_options import (
    Module,
    NoWrite,
    ScriptArgs,
    ScriptPath,
    ScriptTimeout,
    StepName,
    agreed,
    script_of,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepgraph.proof.verify_script import ScriptReport


def verify(
    script: ScriptPath = None,
    args: ScriptArgs = None,
    module: Module = None,
    step: StepName = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare; then the script is stopped.")] = 8,
    rtol: Annotated[float, typer.Option(min=0.0, help="Allowed relative difference; 0 asks for equal bits.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0.0, help="Allowed absolute difference; 0 asks for equal bits.")] = 0.0,
    seed: Seed = 0,
    no_write: NoWrite = False,
    as_json: AsJson = False,
    script_timeout: ScriptTimeout = 300.0,
) -> Result:
    """Run a script eagerly twice and graphed once, and compare bit for bit; exit with 1 if they differ."""
    wanted = script_of(script, args, module, step, script_timeout, no_write)

    from rich.console import Console

    from stepgraph.proof.verify_script import verify_script

    with Console(stderr=True, quiet=as_json).status("") as status:
        report = verify_script(
            wanted,
            steps=steps,
            seed=seed,
            rtol=rtol,
            atol=atol,
            on_run=lambda name: status.update(f"{wanted}: {name}"),
            stdout_to_stderr=as_json,
        )
    rule = next((one.comparison.cause.rule for one in report.reports if one.comparison.cause is not None), None)
    following = f"stepgraph frozen {wanted}" if rule is None else f"stepgraph rules {rule}"
    result = Result(report.to_dict(), _shown(report), next=following, exit_code=_exit_code(report))
    return agreed(result, script_timeout)


def _exit_code(report: ScriptReport) -> ExitCode:
    if report.failed:
        return ExitCode.SCRIPT
    is_fine = report.verdict is not None and report.verdict.value in ("equal", "within bounds")
    return ExitCode.OK if is_fine else ExitCode.FINDINGS


def _shown(report: ScriptReport) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if report.failed:
        parts += [Text(f"SCRIPT FAILED: {report.script}, without graphs", style="bold"), Text(report.failed)]
    if report.graphed_failed:
        parts += [Text(f"DIFFERENT: {report.script} fails with graphs only", style="bold"), Text(report.graphed_failed)]
    parts += [Text(f"CANNOT JUDGE: {what}", style="bold") for what in report.cannot_judge]
    parts += report.reports
    parts += [Text(f"Note: {note}") for note in report.notes]
    parts += [Text(f"Written by the script: {file}") for file in report.files]
    return Group(*parts)
