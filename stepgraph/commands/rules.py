"""`stepgraph rules`: the catalogue in a terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.commands.base import AsJson, Result, code_line
from stepgraph.core import catalogue
from stepgraph.core.catalogue import KINDS, Entry
from stepgraph.core.errors import nearest
from stepgraph.core.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType


def rules(
    rule: Annotated[
        str | None, typer.Argument(metavar="ID", help="The rule to explain; without it, all rules.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help=f"Only rules of one kind: {', '.join(KINDS)}.")
    ] = None,
    as_json: AsJson = False,
) -> Result:
    """List the rules that stepgraph applies, or explain one: what is wrong, why, and how to fix it."""
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(_unknown("kind", kind, KINDS), param_hint="--kind")
    listed = catalogue.entries(kind)
    if rule is None and kind is not None and not listed:
        return Result({"rules": []}, f"there are no rules of the kind {kind} yet", next="stepgraph rules")
    if rule is None:
        values = {"rules": [dataclasses.asdict(entry) for entry in listed]}
        example = next((entry.id for entry in listed), "host-read")
        return Result(values, _table(listed), next=f"stepgraph rules {example}")
    wanted = rule.strip("[]").replace("_", "-")  # as an error prints it
    found = next((entry for entry in listed if entry.id == wanted), None)
    if found is None and kind is not None:
        others = [entry.kind for entry in catalogue.entries() if entry.id == wanted]
        if others:
            wrong = f"`{wanted}` is a rule of the kind {others[0]}, not {kind}; leave --kind out."
            raise typer.BadParameter(wrong, param_hint="ID")
    if found is None:
        raise typer.BadParameter(_unknown("rule", wanted, [entry.id for entry in listed]), param_hint="ID")
    return Result({"rules": [dataclasses.asdict(found)]}, _details(found), next=f"stepgraph rules --kind {found.kind}")


def _unknown(noun: str, given: str, known: list[str] | tuple[str, ...]) -> str:
    near = nearest(given, known)
    hint = (
        f"did you mean {near}?"
        if near
        else "`stepgraph rules` lists them."
        if noun == "rule"
        else f"use {', '.join(known)}."
    )
    return f"there is no {noun} `{given}`; {hint}"


def _table(listed: tuple[Entry, ...]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, caption=counted(len(listed), "rules"), caption_justify="left")
    table.add_column("id", no_wrap=True, style="bold")
    table.add_column("kind", no_wrap=True)
    table.add_column("what is wrong")
    last = None
    for entry in listed:
        if last is not None and entry.section != last.section:
            table.add_section()
        table.add_row(entry.id, entry.kind, Text(entry.what))
        last = entry
    return table


def _details(entry: Entry) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text.assemble((entry.id, "bold"), f"   {entry.kind}: {entry.section.lower()}, {entry.page}"),
    ]
    why, fix = entry.reason_and_fix()
    for name, text in (("What", f"{entry.what}."), ("Why", why), ("Fix", fix)):
        parts.append(Text.assemble((f"{name}: ", "bold"), text))
    if entry.code is not None:
        parts.append(Text.assemble(("CUDA: ", "bold"), f"{entry.code} {entry.name}"))
    if entry.texts:
        parts.append(Text.assemble(("Also reported as: ", "bold"), "; ".join(entry.texts)))
    if entry.example:
        helper = " (rule_of returns the id of the error that a capture raises)" if "rule_of" in entry.example else ""
        parts += [
            Text.assemble(("Example", "bold"), f"{helper}:"),
            *(code_line(f"  {line}") for line in entry.example.strip().splitlines()),
        ]
    return Group(*parts)
