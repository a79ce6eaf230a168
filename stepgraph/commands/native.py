"""`stepgraph native`: the optional part in C++."""

from __future__ import annotations

from typing import Annotated

import typer

from stepgraph.commands.base import AsJson, Result, Timeout


def native(
    build: Annotated[bool, typer.Option("--build", help="Compile it for this torch and this Python.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Delete it.")] = False,
    as_json: AsJson = False,
    timeout: Timeout = None,
) -> Result:
    """Show, build or delete the optional part in C++, which lowers the host time of replays."""
    if build and remove:
        raise typer.BadParameter("pass only one of the two", param_hint="--build and --remove")
    from rich.console import Console
    from rich.text import Text

    from stepgraph.engine.backends.native import library

    if remove:
        library.remove()
    if build:
        with Console(stderr=True).status("compiling, takes half a minute"):
            library.build()
    where = library.location()
    is_there = library.is_built()
    told = f"built: {where}" if is_there else "not built: guards run in Python, with the same results but slower"
    following = "stepgraph demo" if is_there or remove else "stepgraph native --build"
    return Result({"built": is_there, "path": str(where)}, Text(told, overflow="fold"), next=following)
