"""Runs many generated programs, and prints the smallest script of each failure.

    python -m tests.generated --seeds 0:2000 --engine capture

Each program runs in a process of its own. The summary counts outcomes, the rules of refusals, and replays.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.generated.batch import run_all
from tests.generated.found import FOUND
from tests.generated.program import Program, draw, literal
from tests.generated.shrink import FAILED, TRIES, shrink
from tests.generated.source import as_script

IMPORTED = ("torch._dynamo", "torch.distributed.pipelining", "stepgraph.tools.script.steps")
ENGINES = ("capture", "modules", "callables", "stage")


def import_all(device: str) -> None:
    """Import in this process what each fork needs, without threads."""
    os.environ["GENERATED_DEVICE"] = device
    import torch

    torch.set_num_threads(1)
    for name in (*IMPORTED, "stepgraph", "tests.generated.execute", "tests.generated.runtime"):
        importlib.import_module(name)
    stepgraph = sys.modules["stepgraph"]
    for name in ("capture", "graph_modules", "make_graphed_callables", "graph_stage", "Session"):
        getattr(stepgraph, name)
    gc.collect()
    gc.freeze()


def job(program: Program, engine: str, folder: Path) -> Callable[[], dict[str, Any]]:
    """What a fork runs."""
    return functools.partial(sys.modules["tests.generated.execute"].execute, program, engine, folder)


def run_one(program: Program, engine: str, folder: Path) -> dict[str, Any]:
    """Run one program in a fork."""
    return next(run_all(iter([(None, job(program, engine, folder))]), 1))[1]


def run_programs(
    programs: Iterator[tuple[Any, Program]], engine: str, folder: Path, workers: int
) -> Iterator[tuple[Any, Program, dict[str, Any]]]:
    """Run programs in forks; yields the key, the program and the outcome of each."""
    there: dict[Any, Program] = {}

    def jobs() -> Iterator[tuple[Any, Callable[[], dict[str, Any]]]]:
        for key, program in programs:
            there[key] = program
            yield key, job(program, engine, folder)

    for key, outcome in run_all(jobs(), workers):
        yield key, there.pop(key), outcome


class Summary:
    """What came out of the programs of one engine."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.outcomes: Counter[str] = Counter()
        self.rules: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.replays = self.calls = 0
        self.cpu_s = 0.0

    def add(self, outcome: dict[str, Any]) -> None:
        name = outcome["outcome"]
        self.outcomes[name] += 1
        if "rule" in outcome:
            self.rules[f"{name}: {outcome['rule']}"] += 1
        self.warnings.update(outcome.get("warnings", {}))
        self.replays += outcome.get("replays", 0)
        self.calls += outcome.get("replays", 0) + outcome.get("eager_calls", 0)
        self.cpu_s += outcome.get("cpu_s", 0.0)

    def print(self, console: Console) -> None:
        total = self.outcomes.total()
        console.print(f"\n{self.engine}: {total} programs, {self.cpu_s:.0f} s of processor time")
        for name, count in self.outcomes.most_common():
            console.print(f"  {count:6d}  {name.upper() if name in FAILED else name}")
            for rule, number in self.rules.most_common():
                if rule.startswith(f"{name}: "):
                    console.print(f"          {number:6d}  {rule.removeprefix(f'{name}: ')}", markup=False)
        share = 100 * self.replays / self.calls if self.calls else 0.0
        console.print(f"  {share:.0f} % of {self.calls} calls were replayed")
        if self.warnings:
            told = ", ".join(f"{rule} {count}" for rule, count in self.warnings.most_common())
            console.print(f"  warnings: {told}", markup=False)


def show(program: Program, engine: str, outcome: dict[str, Any], out: Path | None, console: Console) -> None:
    """Print a failure, or write its script to a folder."""
    script = (
        f"# {outcome['outcome']}: {outcome.get('detail', '')!r}\n# {literal(program)}\n\n{as_script(program, engine)}"
    )
    if out is None:
        console.print(script, markup=False, highlight=False, soft_wrap=True)
        return
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{engine}_{program.seed}.py"
    file.write_text(script, encoding="utf-8")
    console.print(
        f"seed {program.seed}: {outcome['outcome']}, {file}: {outcome.get('detail', '')[-300:]}", markup=False
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="from:to, or one seed")
    parser.add_argument("--found", action="store_true", help="the programs of found.py instead of seeds")
    parser.add_argument("--engine", default="all", choices=("all", *ENGINES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shrink", type=int, default=3, help="how many failures are made smaller, of each engine")
    parser.add_argument("--tries", type=int, default=TRIES, help="programs tried to make one smaller")
    parser.add_argument("--scripts", type=Path, help="a folder for the scripts of failures, instead of printing them")
    parser.add_argument("--json", type=Path, help="a file for all outcomes, one line each")
    return parser.parse_args()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=False)  # no thread: this process forks


def run_engine(
    engine: str, programs: Iterator[tuple[Any, Program]], total: int, given: argparse.Namespace, console: Console
) -> int:
    """Run the programs of one engine and print what came out; the number of failures."""
    summary, failed = Summary(engine), []
    with tempfile.TemporaryDirectory() as name, _progress(console) as progress:
        task = progress.add_task(engine, total=total)
        for key, program, outcome in run_programs(programs, engine, Path(name), given.jobs):
            summary.add(outcome)
            progress.advance(task)
            progress.refresh()
            if given.json is not None:
                with given.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"seed": key, "engine": engine} | outcome) + "\n")
            if outcome["outcome"] in FAILED:
                failed.append((program, outcome))
                text = f"{key}: {outcome['outcome']}: {outcome.get('detail', '')[:150]}"
                progress.console.print(text, markup=False)
        judge = functools.partial(run_one, engine=engine, folder=Path(name))
        for program, outcome in failed[: given.shrink]:
            smaller, outcome = shrink(program, outcome, judge, given.tries)
            show(smaller, engine, outcome, given.scripts, progress.console)
    summary.print(console)
    return len(failed)


def main() -> int:
    given = parse()
    console = Console(soft_wrap=True)
    import_all(given.device)
    engines = ENGINES if given.engine == "all" else (given.engine,)
    failures = 0
    for engine in engines:
        if given.found:
            chosen = [(name, program) for name, (of, program) in FOUND.items() if of == engine]
        else:
            first, _, last = given.seeds.partition(":")
            chosen = [(seed, draw(seed, engine)) for seed in range(int(first), int(last or int(first) + 1))]
        if chosen:
            failures += run_engine(engine, iter(chosen), len(chosen), given, console)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
