"""How the demo looks in a terminal: a progress bar while it runs, one table and one sentence after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stepgraph.bench.demo import DemoResult

__all__ = ["demo_progress", "render_demo"]


@contextmanager
def demo_progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    """Show one bar for each run and yield the function that advances them, to be passed as `on_step`."""
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {phase: progress.add_task(phase, total=steps, start=False) for phase in ("eager", "graphed")}

        def advance(phase: str) -> None:
            progress.start_task(tasks[phase])
            progress.advance(tasks[phase])

        yield advance


def render_demo(result: DemoResult) -> RenderableType:
    """Return the table of a result and the sentence that says what it shows."""
    table = Table(title=f"A small GPT, {result.steps} steps, eager and graphed, from seed {result.seed}")
    table.add_column("")
    table.add_column("eager", justify="right")
    table.add_column("graphed", justify="right")
    table.add_row("step time (median)", f"{result.eager_step_ms:.2f} ms", f"{result.graphed_step_ms:.2f} ms")
    table.add_row("speed-up", "", "needs a GPU" if result.speedup is None else f"{result.speedup:.2f}x")
    table.add_row("loss of the last step", f"{result.eager_loss:.6f}", f"{result.graphed_loss:.6f}")
    table.add_row(
        "loss difference, all steps", "", _verdict(f"{result.loss_difference:g}", result.loss_difference == 0)
    )
    table.add_row("parameters equal (bitwise)", "", _verdict(_parameters(result), result.parameters_equal))
    table.add_row("peak memory", _mebibytes(result.eager_peak_bytes), _mebibytes(result.graphed_peak_bytes))
    table.add_section()
    table.add_row("steps replayed", "", str(result.replays))
    table.add_row("graphs", "", str(result.graphs))
    table.add_row("segments", "", str(result.segments))
    table.add_row("nodes", "", "-" if result.nodes is None else str(result.nodes))
    table.add_row("capture time", "", f"{result.capture_seconds:.3f} s")
    table.caption = f"{result.device}, backend {result.backend}, torch {result.torch_version}"
    return Group(table, _sentence(result))


def _sentence(result: DemoResult) -> Text:
    if not result.equal:
        why = "no step was replayed" if result.replays == 0 else "the graphed run differs from the eager one"
        return Text(f"Not equal: {why}.", style="bold red")
    if result.speedup is None:
        return Text(
            "Without a GPU the step is recorded and replayed on the CPU tape, op by op: speed needs a GPU. "
            "Equality is what this shows: every loss, and at the end every parameter, has the eager run's bits."
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


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f} MiB"
