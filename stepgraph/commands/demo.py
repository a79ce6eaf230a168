"""`stepgraph demo`: one training, eager and graphed, compared bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from stepgraph.commands.base import AsJson, Device, ExitCode, Result, Seed, Steps, Timeout, torch_device


def demo(
    device: Device = "auto",
    steps: Steps = 25,
    seed: Seed = 0,
    plot: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Picture of both runs (.png, .svg), or none; auto writes stepgraph-demo.png if there is matplotlib.",
        ),
    ] = "auto",
    as_json: AsJson = False,
    timeout: Timeout = None,
) -> Result:
    """Train a small GPT eager and graphed from one seed and compare bit for bit; exit with 1 if they differ."""
    picture = _picture_path(plot, as_json)
    where = torch_device(device)

    from rich.console import Console, Group
    from rich.text import Text

    from stepgraph.engine.backends.native import library
    from stepgraph.lab.bench.demo import run_demo
    from stepgraph.lab.bench.demo_view import demo_progress, draw_demo, render_demo

    with demo_progress(Console(stderr=True, quiet=as_json), steps) as on_step:
        result = run_demo(steps, seed, where, on_step)
    text = render_demo(result)
    if picture is not None:
        draw_demo(result, picture)
        text = Group(text, Text(f"Picture of both runs: {picture}"))
    return Result(
        result.to_dict() | {"picture": None if picture is None else str(picture)},
        text,
        next="stepgraph rules" if library.is_built() else "stepgraph native --build",
        exit_code=ExitCode.OK if result.equal else ExitCode.FINDINGS,
    )


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
