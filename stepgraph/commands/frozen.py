"""`stepgraph frozen SCRIPT`: the numbers that the graphs of a script's steps have baked in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, Timeout

if TYPE_CHECKING:
    from stepgraph.script.run import Outcome, Script

_PROBE = "stepgraph.inspect.frozen_probe:FrozenProbe"


def frozen(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run, or with -m a module.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of the script.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, as python -m does.")] = False,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Look at this function: function, Class.method or module:function, captured or not."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Also set this environment variable, and see what changes."),
    ] = None,
    no_write: Annotated[bool, typer.Option("--no-write", help="Refuse files that the script opens to write.")] = False,
    as_json: AsJson = False,
    timeout: Timeout = None,
) -> Result:
    """Find numbers that a graph has baked in and nobody watches; exit with 1 if there are any."""
    variables = dict(_variable(pair) for pair in env or ())
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file `{script}`", param_hint="SCRIPT")

    from stepgraph.script.run import Script, run_script

    limit = {} if timeout is None else {"timeout": timeout}
    wanted = Script(script, tuple(args or ()), is_module=module, step=step, writes=not no_write, **limit)
    outcome = run_script(wanted, _PROBE, {"env": variables, "step": step is not None}, stdout_to_stderr=as_json)
    result = _result(wanted, outcome)
    if not outcome.is_first_rank:
        raise typer.Exit(result.exit_code)
    return result


def _result(script: Script, outcome: Outcome) -> Result:
    from rich.console import Group, RenderableType
    from rich.text import Text

    from stepgraph.inspect.frozen_report import FrozenReport
    from stepgraph.script.run import Status

    reports = [FrozenReport.from_dict(values) for values in outcome.result.get("reports", ())]
    has_failed = outcome.status in (Status.FAILED, Status.TIMED_OUT)
    unjudged = list(outcome.cannot_judge)
    if not reports and not unjudged and not has_failed:
        unjudged.append(_NO_STEP if script.step is None else f"{script.step} was not called twice")
    exit_code = ExitCode.FINDINGS if unjudged or any(report.findings for report in reports) else ExitCode.OK
    parts: list[RenderableType] = [*reports, *(Text(f"Not judged: {what}", style="bold") for what in unjudged)]
    parts += [Text(f"Note: {note}") for note in outcome.notes]
    parts += [Text(f"Written: {file.path}{' (refused)' if file.refused else ''}") for file in outcome.files]
    if has_failed:
        exit_code = ExitCode.SCRIPT
        parts += [Text(f"The script {outcome.status.value.replace('_', ' ')}."), Text(outcome.exception)]
    values = {
        "script": str(script),
        "status": outcome.status.value,
        "steps": [report.to_dict() for report in reports],
        "findings": sum(len(report.findings) for report in reports),
        "not_judged": unjudged,
        "notes": list(outcome.notes),
        "files": [file.path for file in outcome.files],
        "exception": outcome.exception,
    }
    return Result(values, Group(*parts), next="stepgraph rules host-value", exit_code=exit_code)


_NO_STEP = "the script calls no captured step twice; name a function with --step, or capture one (stepgraph.capture)"


def _variable(pair: str) -> tuple[str, str]:
    name, has_value, value = pair.partition("=")
    if not name or not has_value:
        raise typer.BadParameter(f"`{pair}` is not NAME=VALUE", param_hint="--env")
    return name, value
