"""`stepgraph recipes`: the configurations of published models in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgraph.commands.base import AsJson, Result
from stepgraph.core.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The recipe to show; without it, all recipes.")
    ] = None,
    as_json: AsJson = False,
) -> Result:
    """List the recipes with their sizes and what of them is captured, or show one with its reason and settings."""
    from stepgraph.lab.recipes.listing import record, records, settings

    if name is None:
        listed = records()
        return Result({"recipes": listed}, _table(listed), next="stepgraph recipes llama3_8b")
    found = record(name)
    changed = settings(name)
    values = {"recipes": [{**found, "settings": changed}]}
    following = f"stepgraph train --recipe {found['name']} --fit" if found["is_trained"] else "stepgraph recipes"
    return Result(values, _details(found, changed), next=following)


def _table(listed: list[dict[str, Any]]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("recipe", no_wrap=True, style="bold")
    table.add_column("size", no_wrap=True, justify="right")
    table.add_column("captured", no_wrap=True)
    table.add_column("reason")
    for row in listed:
        table.add_row(row["name"], row["size"], "\n".join([row["impl"], *row["scope"]]), Text(row["reason"]))
        table.add_section()
    return table


def _details(found: dict[str, Any], changed: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    scope = ", ".join(found["scope"])
    published, built = found["parameters"], found["built_parameters"]
    size = f"{published:,} parameters" + ("" if built == published else f" published, {built:,} built here")
    lines = [
        ("Model", found["description"]),
        ("Size", f"{size}, {counted(found['num_layers'], 'layers')}, {found['task']}"),
        ("Captured", f"{found['impl']}: {scope}"),
        ("Reason", f"{found['reason']}."),
        ("Shape from", found["source"]),
    ]
    parts: list[RenderableType] = [Text(found["name"], "bold")]
    parts += [Text.assemble((f"{title}: ", "bold"), text) for title, text in lines]
    if not found["is_trained"]:
        parts.append(Text("Not trained by `stepgraph train`: its data, images and text, is not made here.", "bold"))
    parts.append(Text("Settings other than the defaults:", "bold"))
    parts += [Text(f"  {setting} = {value}") for setting, value in changed.items()]
    return Group(*parts)
