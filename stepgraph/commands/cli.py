"""The command line: `stepgraph COMMAND`. What all commands share stands in `commands/base.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from stepgraph import __version__
from stepgraph.commands.advise import advise
from stepgraph.commands.base import CONTEXT_SETTINGS, Command, Group, Result
from stepgraph.commands.bench import bench
from stepgraph.commands.check import check
from stepgraph.commands.demo import demo
from stepgraph.commands.doctor import doctor
from stepgraph.commands.explain import explain
from stepgraph.commands.frozen import frozen
from stepgraph.commands.native import native
from stepgraph.commands.recipes import recipes
from stepgraph.commands.rules import rules
from stepgraph.commands.train import train
from stepgraph.commands.verify import verify

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: dict[str, tuple[Callable[..., Result], ...]] = {
    "Decide": (advise, bench),
    "Check": (check, verify, frozen),
    "Understand": (explain, rules, doctor),
    "Train": (train, recipes),
    "Set-up": (demo, native),
}
"""The functions of all commands, by the panel of `stepgraph --help` that lists them. A new command is added here."""

app = typer.Typer(
    name="stepgraph",
    cls=Group,
    help="Capture a PyTorch training step as CUDA graphs, replay it, and prove that nothing changed but the time.",
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _panel, _functions in COMMANDS.items():
    for _function in _functions:
        app.command(cls=Command, rich_help_panel=_panel)(_function)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"stepgraph {__version__}")
        raise typer.Exit


@app.callback()
def stepgraph(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Define the options before a command."""


def main() -> None:
    """Run the command line."""
    hook = sys.excepthook
    try:
        app()
    finally:
        sys.excepthook = hook  # typer leaves its own there


if __name__ == "__main__":
    main()
