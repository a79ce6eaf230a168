"""The command line: thin commands that import the library only when they run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="stepgraph",
    help="Capture a PyTorch training step as CUDA graphs, replay it, and prove that nothing changed but the time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"stepgraph {importlib.metadata.version('stepgraph')}")
        raise typer.Exit


@app.callback()
def stepgraph(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Define the options before a command."""


@app.command()
def demo(
    # The minimum is demo.MIN_STEPS, written out: importing it would import torch for `stepgraph --help`.
    steps: Annotated[int, typer.Option(min=6, help="Training steps in each run.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the data and the dropout.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one.")] = "auto",
    plot: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Picture of both runs (.png, .svg), or none; auto writes stepgraph-demo.png if there is matplotlib.",
        ),
    ] = "auto",
) -> None:
    """Train a small GPT eager and graphed from one seed and compare bit for bit; exit with 1 if they differ."""
    from rich.console import Console

    from stepgraph.bench.demo import resolve_device, run_demo
    from stepgraph.bench.demo_view import demo_progress, draw_demo, render_demo

    picture = _picture_path(plot, as_json)
    try:
        where = resolve_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    if as_json:
        result = run_demo(steps, seed, where)
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        console = Console()
        with demo_progress(console, steps) as on_step:
            result = run_demo(steps, seed, where, on_step)
        console.print(render_demo(result))
    if picture is not None:
        draw_demo(result, picture)
        typer.echo(f"Picture of both runs: {picture}", err=as_json)
    raise typer.Exit(0 if result.equal else 1)


def _picture_path(plot: str, as_json: bool) -> Path | None:
    """Return the path of the demo's picture, or None. Called before the runs, so that a bad path is refused at once."""
    if plot == "none" or (plot == "auto" and as_json):
        return None
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if plot == "auto":
        return Path("stepgraph-demo.png") if has_matplotlib else None
    if not has_matplotlib:
        raise typer.BadParameter("needs matplotlib: pip install 'stepgraph[plot]'", param_hint="--plot")
    path = Path(plot)
    if path.suffix not in (".png", ".svg") or not path.parent.is_dir():
        raise typer.BadParameter(f"`{plot}` is not a .png or .svg in an existing folder", param_hint="--plot")
    return path


@app.command()
def native(
    build: Annotated[bool, typer.Option("--build", help="Compile it for this torch and this Python.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Delete it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Show, build or delete the optional part in C++, which lowers the host time of replays."""
    from rich.console import Console

    from stepgraph.errors import BuildError
    from stepgraph.native import library

    if build and remove:
        raise typer.BadParameter("pass only one of the two", param_hint="--build and --remove")
    if remove:
        library.remove()
    if build:
        try:
            with Console(stderr=True).status("compiling, takes half a minute"):
                library.build()
        except BuildError as error:
            typer.echo(error, err=True)
            raise typer.Exit(1) from error
    where, is_there = library.location(), library.location().exists()
    if as_json:
        typer.echo(json.dumps({"built": is_there, "path": str(where)}, indent=2))
    elif is_there:
        typer.echo(f"built: {where}")
    else:
        typer.echo("not built: guards run in Python, with the same results but slower (`stepgraph native --build`)")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
