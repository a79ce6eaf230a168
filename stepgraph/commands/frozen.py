"""`stepgraph frozen SCRIPT`: the values that the graphs of a script's steps have baked in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result
from stepgraph.commands.script_options import command_on, takes_script
from stepgraph.tools.script.request import Script

if TYPE_CHECKING:
    from stepgraph.tools.script.request import Outcome

_PROBE = "stepgraph.tools.frozen_values.frozen_probe:FrozenProbe"
_NO_STEP = "the script calls no captured step twice; name a function with --step, or capture one (stepgraph.capture)"


@takes_script
def frozen(
    wanted: Script,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Also set this environment variable, and see what changes."),
    ] = None,
    as_json: AsJson = False,
) -> Result:
    """Find values that a graph has baked in and nobody watches; exit with 1 if there are any."""
    options = {"env": dict(_variable(pair) for pair in env or ()), "step": wanted.step is not None}

    from stepgraph.tools.script.run import run_script

    return _result(wanted, run_script(wanted, _PROBE, options, stdout_to_stderr=as_json))


def _result(script: Script, outcome: Outcome) -> Result:
    from rich.console import Group, RenderableType
    from rich.text import Text

    from stepgraph.tools.frozen_values.frozen_report import FrozenReport
    from stepgraph.tools.script.run import refuse_unjudged

    reports = [FrozenReport.from_dict(values) for values in outcome.result.get("reports", ())]
    if not reports:
        refuse_unjudged(script, outcome)
    unjudged = list(outcome.cannot_judge)
    if not reports and (not unjudged or not outcome.seen):
        unjudged.append(_NO_STEP if script.step is None else f"{script.step} was not called twice")
    parts: list[RenderableType] = [*reports, *(Text(f"Not judged: {what}", style="bold") for what in unjudged)]
    parts += [Text(f"Note: {note}") for note in outcome.notes]
    parts += [Text(f"Written: {file.path}{' (refused)' if file.refused else ''}") for file in outcome.files]
    values = {
        "script": str(script),
        "status": outcome.status.value,
        "steps": [report.to_dict() for report in reports],
        "findings": sum(len(report.findings) for report in reports),
        "not_judged": unjudged,
        "notes": list(outcome.notes),
        "files": [file.path for file in outcome.files],
    }
    exit_code = ExitCode.FINDINGS if unjudged or values["findings"] else ExitCode.OK
    step = ("--step", script.step) if script.step is not None else ()
    following = "stepgraph rules host-value" if exit_code else command_on("verify", script, *step)
    return Result(values, Group(*parts), next=following, exit_code=exit_code)


def _variable(pair: str) -> tuple[str, str]:
    name, has_value, value = pair.partition("=")
    if not name or not has_value:
        raise typer.BadParameter(f"`{pair}` is not NAME=VALUE", param_hint="--env")
    return name, value
