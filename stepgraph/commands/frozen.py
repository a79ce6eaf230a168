"""`stepgraph frozen SCRIPT`: the numbers that the graphs of a script's steps have baked in."""

from __future__ import annotations

from typing import Annotated

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, Timeout

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

    from rich.console import Group, RenderableType
    from rich.text import Text

    from stepgraph.script.run import Script, Status, run_script

    wanted = Script(script, tuple(args or ()), module, step, timeout or Script.__dataclass_fields__["timeout"].default)
    if no_write:
        wanted = Script(wanted.target, wanted.args, module, step, wanted.timeout, writes=False)
    outcome = run_script(wanted, _PROBE, {"env": variables, "step": step is not None}, stdout_to_stderr=as_json)

    from stepgraph.inspect.frozen import FrozenReport

    reports = [FrozenReport.from_dict(values) for values in outcome.result.get("reports", ())]
    unjudged = list(outcome.cannot_judge)
    if not reports and not unjudged and outcome.status in (Status.COMPLETED, Status.STOPPED):
        unjudged.append(_NO_STEP if step is None else f"{step} was not called twice")
    has_findings = bool(unjudged) or any(report.findings for report in reports)
    exit_code = ExitCode.FINDINGS if has_findings else ExitCode.OK
    parts: list[RenderableType] = [*reports, *(Text(f"Not judged: {what}", style="bold") for what in unjudged)]
    parts += [Text(f"Note: {note}") for note in outcome.notes]
    parts += [Text(f"Written: {file.path}{' (refused)' if file.refused else ''}") for file in outcome.files]
    if outcome.status in (Status.FAILED, Status.TIMED_OUT):
        exit_code = ExitCode.SCRIPT
        parts += [Text(f"The script {outcome.status.value.replace('_', ' ')}."), Text(outcome.exception)]
    values = {
        "script": str(wanted),
        "status": outcome.status.value,
        "steps": [report.to_dict() for report in reports],
        "findings": sum(len(report.findings) for report in reports),
        "not_judged": unjudged,
        "notes": list(outcome.notes),
        "files": [file.path for file in outcome.files],
        "exception": outcome.exception,
    }
    if not outcome.is_first_rank:
        raise typer.Exit(exit_code)
    return Result(values, Group(*parts), next="stepgraph rules host-value", exit_code=exit_code)


_NO_STEP = "the script calls no captured step twice; name a function with --step, or capture one (stepgraph.capture)"


def _variable(pair: str) -> tuple[str, str]:
    name, has_value, value = pair.partition("=")
    if not name or not has_value:
        raise typer.BadParameter(f"`{pair}` is not NAME=VALUE", param_hint="--env")
    return name, value
