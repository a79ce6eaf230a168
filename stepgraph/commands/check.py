"""`stepgraph check`: whether the step of a script can be captured, and what stands in the way."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, code_line
from stepgraph.commands.script_options import command_on, takes_script
from stepgraph.tools.script.request import Script

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepgraph.tools.checks.check import CheckReport
    from stepgraph.tools.checks.findings import Finding

WatchedSteps = Annotated[
    int, typer.Option("--steps", min=3, help="Steps to watch; then the script is stopped. The first is not compared.")
]


@takes_script
def check(
    wanted: Script,
    steps: WatchedSteps = 10,
    as_json: AsJson = False,
) -> Result:
    """Run a script for some steps and say, by line, what keeps its step from being captured; exit with 1 if any."""
    from stepgraph.tools.checks.check import check as run_check
    from stepgraph.tools.script.run import refuse_unjudged

    report = run_check(
        wanted.target,
        wanted.args,
        steps=steps,
        step=wanted.step,
        timeout=wanted.timeout,
        is_module=wanted.is_module,
        writes=wanted.writes,
        stdout_to_stderr=as_json,
    )
    refuse_unjudged(wanted, report.outcome)
    code = ExitCode.OK if report.fits else ExitCode.FINDINGS
    return Result(report.to_dict(), render(report), _next(wanted, report), code)


def _next(wanted: Script, report: CheckReport) -> str:
    if report.findings:
        return f"stepgraph rules {report.findings[0].rule}"
    if not report.shape.steps and not report.is_graphed:
        return "stepgraph rules no-step"
    if report.is_graphed:
        return command_on("verify", wanted)
    if report.fits and report.shape.function:
        return command_on("verify", wanted, "--step", wanted.step or report.shape.function)
    return command_on("advise", wanted)


def render(report: CheckReport) -> RenderableType:
    """Return the report for people: the verdict first, then the findings, what is outside, and what to paste."""
    from rich.console import Group
    from rich.text import Text

    verdict = report.verdict
    parts: list[RenderableType] = [
        Text(verdict.sentence, style="bold green" if report.fits else "bold yellow"),
        Text(f"{verdict.reason[0].upper()}{verdict.reason[1:]}"),
    ]
    if report.findings:
        parts += [Text(), _findings(report.findings)]
    if report.outside:
        parts += [Text(), Text("Outside the step, where it does no harm:", style="bold"), _outside(report.outside)]
    notes = [*report.outcome.notes, *(f"writes {file.path}" for file in report.outcome.files)]
    if notes:
        parts += [Text(), *(Text(f"Note: {note}") for note in notes)]
    if verdict.paste:
        parts += [Text(), Text("To paste:", style="bold"), *(code_line(f"    {line}") for line in verdict.paste)]
    return Group(*parts)


def _findings(findings: Iterable[Finding]) -> RenderableType:
    """Findings by line, each with its rules, how often, why and what to do."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: dict[tuple[str, int], list[Finding]] = {}
    for finding in findings:
        place = finding.where
        lines.setdefault((place.file, place.line) if place is not None else ("", 0), []).append(finding)
    parts: list[RenderableType] = []
    for (file, line), group in sorted(lines.items()):
        place = group[0].where
        source = place.source if place is not None else ""
        where = f"{os.path.relpath(file)}:{line}" if file else "no line of the script"
        parts.append(Text(where, style="bold cyan"))
        parts += [code_line(f"    {source}")] if source else []
        for finding in group:
            inside = f", in {finding.inside}" if finding.inside else ""
            often = f"in {finding.steps} step{'s' * (finding.steps > 1)}"
            told = f"{finding.group}: {finding.what}{inside}, {often}   "
            parts.append(Padding(Text.assemble(told, (f"[{finding.rule}]", "yellow")), (0, 0, 0, 2)))
            parts.append(Padding(Text(f"Why: {finding.why}\nFix: {finding.fix}"), (0, 0, 0, 4)))
    return Group(*parts)


def _outside(findings: Iterable[Finding]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        place = finding.where
        where = f"  {os.path.basename(place.file)}:{place.line}" if place is not None else "  ?"
        table.add_row(where, Text.assemble(f"{finding.what}   ", (f"[{finding.rule}]", "yellow")))
    return table
