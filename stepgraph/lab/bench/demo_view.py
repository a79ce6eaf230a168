"""The output of the demo: a progress bar while it runs; then a table, a small chart, a sentence and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stepgraph.core.wording import counted
from stepgraph.lab.bench.demo import SETTLING_STEPS, DemoResult

__all__ = ["demo_progress", "draw_demo", "render_demo"]

_COLORS = {"eager": "yellow", "graphed": "cyan"}
_LEVELS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
"""Columns of the chart in a terminal."""
_TAPE_TIMES = "The CPU tape replays operation by operation from Python: its step times say nothing about a GPU's."


@contextmanager
def demo_progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    """Show one bar for each run and yield the function that advances them, to be passed as `on_step`."""
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        total = steps + SETTLING_STEPS
        tasks = {phase: progress.add_task(phase, total=total, start=False) for phase in ("eager", "graphed")}

        def advance(phase: str) -> None:
            progress.start_task(tasks[phase])
            progress.advance(tasks[phase])

        yield advance


def render_demo(result: DemoResult) -> RenderableType:
    """Return the table, the chart and the conclusion of a result."""
    table = Table(
        title=f"A small GPT, {counted(result.total_steps, 'steps')}, eager and graphed, from seed {result.seed}"
    )
    table.add_column("")
    table.add_column("eager", justify="right")
    table.add_column("graphed", justify="right")
    table.add_row("step time (median)", f"{result.eager.step_ms:.2f} ms", f"{result.graphed.step_ms:.2f} ms")
    table.add_row("speed-up", "", "needs a GPU" if result.speedup is None else f"{result.speedup:.2f}x")
    table.add_row("loss of the last step", f"{result.eager.losses[-1]:.6f}", f"{result.graphed.losses[-1]:.6f}")
    table.add_row(
        "loss difference, all steps", "", _verdict(f"{result.loss_difference:g}", result.loss_difference == 0)
    )
    table.add_row("parameters equal (bitwise)", "", _verdict(_parameters(result), result.parameters_equal))
    peaks = [run.peak_bytes for run in (result.eager, result.graphed)]
    if None not in peaks:
        table.add_row("peak memory", *(f"{peak / 2**20:.1f} MiB" for peak in peaks if peak is not None))
    table.add_section()
    table.add_row("steps replayed", "", f"{result.replays} of {result.total_steps}")
    for name in ("graphs", "segments", "nodes"):
        if result.report[name] is not None:
            table.add_row(name, "", str(result.report[name]))
    table.add_row("capture time", "", f"{result.report['capture_seconds']:.3f} s")
    table.caption = f"{result.device}, backend {result.backend}, torch {result.torch_version}"
    return Group(table, _Chart(result), _sentence(result))


class _Chart:
    """The losses and the step times of both runs, one line each; empty if the terminal has only ASCII."""

    def __init__(self, result: DemoResult) -> None:
        self._result = result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.ascii_only:
            return
        runs = {"eager": self._result.eager, "graphed": self._result.graphed}
        slowest = max(run.step_ms for run in runs.values())
        grid = Table.grid(padding=(0, 1))
        for name, run in runs.items():
            line = Text(_line(run.losses), style=_COLORS[name])
            grid.add_row("loss" if name == "eager" else "", name, line, f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}")
        for name, run in runs.items():
            bar = Bar(slowest, 0, run.step_ms, width=_WIDTH, color=_COLORS[name])
            grid.add_row("step time" if name == "eager" else "", name, bar, f"{run.step_ms:.2f} ms")
        yield ""
        yield grid
        yield ""


def _line(values: Sequence[float]) -> str:
    """Return a row of blocks whose heights show the values."""
    width = min(_WIDTH, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    heights = [sum(part) / len(part) for part in parts]
    low, span = min(heights), max(heights) - min(heights)
    return "".join(_LEVELS[round((h - low) / span * (len(_LEVELS) - 1)) if span > 0 else 0] for h in heights)


def draw_demo(result: DemoResult, path: Path) -> None:
    """Write a picture of the losses and the step times of both runs; needs matplotlib (the extra `plot`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, time = figure.subplots(1, 2)
    for name, run, style in (("eager", result.eager, "-"), ("graphed", result.graphed, "--")):
        steps = range(1, result.total_steps + 1)
        loss.plot(steps, run.losses, style, linewidth=4 if name == "eager" else 1.5, label=name)
        time.plot(steps, run.times_ms, ".-", label=f"{name}, median {run.step_ms:.2f} ms")
    loss.set(title="loss: equal at every step" if result.equal else "loss", xlabel="step")
    time.set(title="step time (ms)", xlabel="step", yscale="log")
    time.axvspan(1, SETTLING_STEPS, color="0.9", label="warm-up and capture")
    loss.legend()
    time.legend()
    figure.suptitle(f"A small GPT on {result.device}, backend {result.backend}, torch {result.torch_version}")
    audits = counted(result.report["audits"], "audits, which record", "audit, which records")
    notes = [f"Peaks of the graphed run: its capture, and {audits} it again."]
    notes += [_TAPE_TIMES] if result.speedup is None else []
    figure.supxlabel("\n".join(notes), fontsize="small")
    figure.savefig(path)


def _sentence(result: DemoResult) -> Text:
    if not result.equal:
        why = "no step was replayed" if result.replays == 0 else "the graphed run differs from the eager one"
        return Text(f"Not equal: {why}.", style="bold red")
    if result.speedup is None:
        return Text(
            f"{_TAPE_TIMES} This run shows equality: every loss, and at the end every parameter, has the eager run's "
            "bits. To see speed, run it on a GPU."
        )
    return Text(
        f"The graphed run is {result.speedup:.2f} times as fast; its losses and parameters have the eager run's bits."
    )


def _parameters(result: DemoResult) -> str:
    if result.parameters_equal:
        return "yes"
    return f"no: {len(result.differing_parameters)}, first {result.differing_parameters[0]}"


def _verdict(text: str, is_good: bool) -> Text:
    return Text(text, style="green" if is_good else "bold red")
