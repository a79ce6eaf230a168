"""`stepgraph advise SCRIPT`: what graphs would win for a script, measured on its own steps; "do not" included."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, code_line
from stepgraph.commands.script_options import command_on, takes_script
from stepgraph.core.wording import counted
from stepgraph.tools.script.request import Script

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stepgraph.tools.advice.advise import AdviceReport
    from stepgraph.tools.advice.decide import Measured

_GIB = 2**30
_MAX_LINES = 6


@takes_script
def advise(
    wanted: Script,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Timed steps. Ten more run before and after them.")] = 20,
    tries: Annotated[
        bool, typer.Option("--try", help="Capture the step for real in two more runs, and measure it.")
    ] = False,
    as_json: AsJson = False,
) -> Result:
    """Measure a script's training step and say whether graphs pay, of what, and how to begin."""
    from stepgraph.tools.advice.advise import advise_script

    report = advise_script(wanted, steps=steps, tries=tries, stdout_to_stderr=as_json)
    code = ExitCode.FINDINGS if report.advice is None else ExitCode.OK
    return Result(report.to_dict(), render(report), next=_next(report), exit_code=code)


def _next(report: AdviceReport) -> str:
    """The command to run next: what `check` has said in this run need not be asked again."""
    from stepgraph.tools.advice.advise import is_no

    if is_no(report):
        return "stepgraph bench --fit --compare"
    if report.step and report.checked is not None and report.checked.fits:
        return command_on("verify", report.script, "--step", report.step)
    named = ("--step", report.script.step) if report.script.step is not None else ()
    return command_on("check", report.script, *named)


def render(report: AdviceReport) -> RenderableType:
    """The advice for people."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    if report.measured is not None and report.advice is not None:
        parts += [_figures(report, report.measured), *_waits(report), Text(), _scopes(report, report.measured)]
        parts += [Text(line) for line in (*_legend(report), *_optimizers(report.measured))]
        parts += [Text(), *_verdict(report)]
    else:
        parts += [Text("It cannot be judged whether graphs pay:", style="bold")]
        parts += [Text(f"  {reason}.") for reason in report.cannot_judge]
        parts += [Text(line) for line in _without_a_gpu(report)]
    parts += [Text(f"note: {note}") for note in report.outcome.notes]
    if report.ladder:
        parts += [Text(line) for line in _guide(report)]
        parts += [Text(), Text("To bring graphs up, one step at a time:", style="bold"), *_ladder(report)]
    elif not report.trials:
        parts += [Text("To capture it nevertheless, and measure that:"), code_line(f"    {report.try_command}")]
    if report.paste:
        parts += [Text(), Text("To paste:", style="bold"), *(code_line(f"    {line}") for line in report.paste)]
    parts += [
        Text(),
        Text("To see the step itself:", style="bold"),
        code_line(f"    {report.nsys}"),
    ]
    return Group(*parts)


def _table(*columns: str, shows_header: bool = True) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if shows_header else box.SIMPLE, show_edge=False, show_header=shows_header)
    for name in columns:
        table.add_column(name)
    return table


def _figures(report: AdviceReport, measured: Measured) -> Table:
    facts, times = report.facts, report.times
    assert times is not None
    table = _table("", "", shows_header=False)
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    idle = max(0.0, measured.step_ms - measured.busy_ms)
    rows = [
        (
            "step time",
            f"{times.median:.2f} ms (p10 {times.p10:.2f}, p90 {times.p90:.2f}, {counted(len(times.each), 'steps')})",
        ),
        ("GPU busy", f"{100 * measured.busy_fraction:.1f} % ({measured.busy_ms:.2f} ms)"),
        ("kernels", f"{measured.kernels} a step, {measured.small_kernels} under 50 us"),
        ("gaps", f"{facts['gaps']}, {idle:.2f} ms idle"),
        ("host", f"{measured.host_ms:.2f} ms in the step, {measured.outside_ms:.2f} ms between steps"),
        ("memory", _memory(measured)),
    ]
    if facts["graph_launches"]:
        rows.append(("graphs", f"{facts['graph_launches']} launched in a step already"))
    for row in rows:
        table.add_row(*row)
    return table


def _memory(measured: Measured) -> str:
    used, total = measured.used_bytes / _GIB, measured.total_bytes / _GIB
    return f"{used:.2f} of {total:.1f} GiB reserved, {measured.activation_bytes / _GIB:.2f} GiB made by a step"


def _waits(report: AdviceReport) -> Iterator[RenderableType]:
    """The lines at which the host waits."""
    from rich.text import Text

    facts = report.facts
    for name, place in (("waits_inside", "in the step"), ("waits_outside", "between steps")):
        rows = facts[name]
        if not rows:
            continue
        yield Text(f"The host waits for the GPU {place}:", style="bold")
        for row in rows[:_MAX_LINES]:
            where = f"{os.path.relpath(row['file'])}:{row['line']}" if row["file"] else "a line that is not Python's"
            yield Text(
                f"  {where}  {row['source']}" + (f"  ({counted(row['times'], 'times')})" if row["times"] > 1 else "")
            )
        if len(rows) > _MAX_LINES:
            yield Text(f"  and {len(rows) - _MAX_LINES} more lines: --json lists them")
    if not facts["waits_inside"] and not facts["waits_outside"]:
        yield Text("The host never waits for the GPU.")


def _scopes(report: AdviceReport, measured: Measured) -> Table:
    assert report.advice is not None
    table = _table("scope", "ms", "gain", "memory", "forbidden by")
    for one in report.advice.predictions:
        memory = f"+{one.extra_bytes / _GIB:.2f} GiB"
        forbidden = "; ".join(_shortened(why) for why in one.forbidden)
        table.add_row(one.scope, f"{one.step_ms:.2f}", f"{100 * one.gain:.0f} %", memory, forbidden or "-")
    tried = {trial.name: trial for trial in report.trials}
    for trial in report.trials:
        if trial.step_ms is None:
            table.add_row(f"{trial.name}, tried", "-", "-", "-", trial.error)
        else:
            gain = f"{100 * (1 - trial.step_ms / measured.step_ms):.0f} %"
            more = "" if trial.used_bytes is None else f"{(trial.used_bytes - measured.used_bytes) / _GIB:+.2f} GiB"
            table.add_row(f"{trial.name}, tried", f"{trial.step_ms:.2f}", gain, more, "-")
    if "whole step + compile" not in tried:
        table.add_row("whole step + compile", "not predicted", "", "", "--try measures it")
    return table


def _shortened(why: str) -> str:
    """A reason with its path relative to here."""
    head, at, where = why.partition(" at ")
    return f"{head} at {os.path.relpath(where)}" if at and os.path.isabs(where) else why


def _legend(report: AdviceReport) -> Sequence[str]:
    from stepgraph.tools.advice.decide import GUIDES_MEMORY, MEASURED_MEMORY

    assert report.advice is not None
    found = [
        f"Predicted; memory beside eager's. NVIDIA's guides name {GUIDES_MEMORY}. "
        f"Here {MEASURED_MEMORY} were measured (docs/advise.md)."
    ]
    if report.facts["has_compiled_code"]:
        found.append("Compiled code runs in the step, so its parts were not measured one by one.")
    return [*found, *report.advice.warnings]


def _guide(report: AdviceReport) -> Iterator[str]:
    """What NVIDIA's guides say to such a model, and what they ask that a run does not show."""
    guide = report.guide
    if guide is None:
        return
    if guide.impl == "none":
        yield f"NVIDIA's guides for Megatron would not begin yet: {guide.reason}."
    else:
        yield f"NVIDIA's guides for Megatron begin such a model with {', '.join(guide.scope)}: {guide.reason}."
    yield "Recomputation, offloading, packed sequences and NaN checks are not seen in a run (docs/advise.md)."


def _optimizers(measured: Measured) -> Iterator[str]:
    """The optimizers that a captured step leaves between its graphs, and what that costs."""
    for part in measured.eager_parts:
        yield (
            f"{part.name} would run between graphs ({part.reason}): {part.host_ms:.2f} ms of the host remain. "
            "docs/optimizers.md says what puts it inside."
        )


def _verdict(report: AdviceReport) -> Sequence[Any]:
    from rich.text import Text

    from stepgraph.tools.advice.decide import DO_NOT

    assert report.advice is not None
    assert report.api is not None
    choice = report.advice.choice
    if choice.choice == DO_NOT:
        return [Text.assemble((f"{report.verdict}: do not use graphs here", "bold"), f": {choice.reason}.")]
    return [
        Text.assemble((f"{report.verdict}: capture {_spoken(choice.choice)}", "bold"), f": {choice.reason}."),
        Text.assemble(("Use ", "bold"), (report.api.choice, "bold"), f": {report.api.reason}."),
    ]


def _spoken(choice: str) -> str:
    known = {"whole step": "the whole step", "stage": "the stages of the schedule"}
    return known.get(choice, f"the scope {choice}")


def _ladder(report: AdviceReport) -> Iterator[RenderableType]:
    from rich.text import Text

    for number, (what, how) in enumerate(report.ladder, 1):
        yield Text(f"  {number}. {what}")
        yield code_line(f"     {how}")


def _without_a_gpu(report: AdviceReport) -> list[str]:
    """What is known of a script without measuring it."""
    model, scopes = report.facts.get("model", {}), report.facts.get("scopes", ())
    found = []
    if model:
        others = f", the largest of {model['count']} models" if model.get("count", 1) > 1 else ""
        size = f"{model['parameters']:,} parameters"
        found.append(f"Seen: {counted(report.outcome.steps, 'steps')} of {model['class']}, {size}{others}.")
    if scopes:
        children = [f'"{one["scope"]}"' for one in scopes if one.get("is_child")]
        named = [one["scope"] for one in scopes if not one.get("is_child")]
        named += [f"its children {', '.join(children)}"] if children else []
        found.append(f"It has these scopes: {', '.join(named)}, and the whole step.")
    between = Counter((one["name"], one["reason"]) for one in report.facts.get("optimizers", ()) if not one["inside"])
    for (name, reason), count in between.items():
        whose = name if count == 1 else f"Each of {count} {name}"
        found.append(f"{whose} would run between graphs ({reason}): docs/optimizers.md.")
    if report.checked is not None:
        verdict = report.checked.verdict
        found.append(f"stepgraph check: {verdict.sentence} {verdict.reason[0].upper()}{verdict.reason[1:]}")
        found += [f"  {_shortened(str(one))}" for one in report.barriers[:_MAX_LINES]]
    return found
