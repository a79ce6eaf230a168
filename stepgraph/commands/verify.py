"""`stepgraph verify SCRIPT`: the user's own script, eager and graphed from one seed, compared bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, Seed, code_line
from stepgraph.commands.script_options import command_on, takes_script
from stepgraph.core.wording import counted
from stepgraph.tools.script.ranks import is_first_rank
from stepgraph.tools.script.request import Script
from stepgraph.tools.script.run import refuse_no_script

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepgraph.tools.verification.verify_script import ScriptReport


@takes_script
def verify(
    wanted: Script,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare; then the script is stopped.")] = 8,
    rtol: Annotated[float, typer.Option(min=0.0, help="Allowed relative difference; 0 asks for equal bits.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0.0, help="Allowed absolute difference; 0 asks for equal bits.")] = 0.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> Result:
    """Run a script eagerly twice and graphed once, and compare bit for bit; exit with 1 if they differ."""
    refuse_no_script(wanted)  # at once: what follows imports torch

    from stepgraph.tools.verification.verify_script import verify_script

    def on_run(name: str) -> None:
        if is_first_rank() and not as_json:  # what the script prints follows, once more
            typer.echo(f"stepgraph verify: running {wanted}, {name}", err=True)

    report = verify_script(
        wanted, steps=steps, seed=seed, rtol=rtol, atol=atol, on_run=on_run, stdout_to_stderr=as_json
    )
    return Result(report.to_dict(), _shown(report), next=_next(wanted, report), exit_code=_exit_code(report))


def _exit_code(report: ScriptReport) -> ExitCode:
    if report.failed:
        return ExitCode.SCRIPT
    is_fine = report.verdict is not None and report.verdict.value in ("equal", "within bounds")
    return ExitCode.OK if is_fine else ExitCode.FINDINGS


def _next(script: Script, report: ScriptReport) -> str:
    """The command that helps on: what the rule means, a longer run, or the next proof."""
    step = ("--step", script.step) if script.step is not None else ()
    if report.failed:
        return f"python {script}" if "[script-timeout]" not in report.failed else "stepgraph rules script-timeout"
    if report.rule is not None:
        return f"stepgraph rules {report.rule}"
    if not report.reports or report.graphed_failed:
        return command_on("check", script, *step)
    if any(not one.replays for one in report.reports):
        steps = 2 * max(one.comparison.steps for one in report.reports)
        return command_on("verify", script, *step, "--steps", str(steps))
    return command_on("frozen", script, *step)


def _shown(report: ScriptReport) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if report.failed:
        parts += [Text(f"SCRIPT FAILED: {report.script}, without graphs", style="bold"), Text(report.failed)]
    if report.graphed_failed:
        parts += [Text(f"DIFFERENT: {report.script} fails with graphs only", style="bold"), Text(report.graphed_failed)]
    parts += [Text(f"CANNOT JUDGE: {what}", style="bold") for what in report.cannot_judge]
    parts += [Text(line, style="bold") for line in _summary(report)]
    parts += report.reports
    for rank in report.ranks:
        if rank["rank"] and rank["text"]:
            parts += [Text(f"Rank {rank['rank']}:", style="bold"), code_line(rank["text"])]
    parts += [Text(f"Note: {note}") for note in report.notes]
    parts += [Text(f"Written by the script: {file}") for file in report.files]
    parts += [Text(f"Refused to be written: {file}") for file in report.refused]
    return Group(*parts)


def _summary(report: ScriptReport) -> list[str]:
    """The verdict of the whole script, where there is more than one report."""
    of_ranks = [(f" on rank {rank['rank']}", one) for rank in report.ranks for one in rank["reports"]]
    found = of_ranks or [("", one.to_dict()) for one in report.reports]
    if len(found) < 2 or report.verdict is None:
        return []
    worst = [f"{one['subject']}{where}" for where, one in found if one["verdict"] == report.verdict.value]
    named = "everything graphed" if len(worst) == len(found) else ", ".join(worst)
    ranks = f" on {counted(len(report.ranks), 'ranks')}" if report.ranks else ""
    return [f"{report.verdict.value.upper()}: {named}, of {len(found)} compared in {report.script}{ranks}"]
