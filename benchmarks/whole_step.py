"""A whole training step, from eager to captured: time, memory and equality, in one command.

    python benchmarks/whole_step.py

The step is four microbatches of forward and backward, then fused AdamW, on a bf16 GPT of GPT-2-small's shape, with one
sequence a microbatch (the host cannot launch fast enough) and with eight (the GPU is the limit). Every variant trains
the same model from the same seed on the same batches. Each runs in a process of its own, so that no variant inherits
another's allocator, compile cache in memory or CUDA context. They are forked one after the other from a server that has
imported torch and touched no GPU (`stepgraph.lab.bench.server`).

What the columns mean:

- step: median time of 20 steps after 8 warm ones, from CUDA events between steps, with no synchronisation inside the
  block. `again` is a second block of 20 in the same process: the difference is the run's own spread.
- busy: union of the GPU's kernel, copy and fill intervals in one profiled step. A step that runs the same kernels
  cannot be shorter, save by running some side by side.
- host: median time until the call returns, the queue drained before it.
- capture: wall clock of the call that captured, its first replay included; the same definition for every variant.
- reserved, allocated: peaks of torch's allocator from before the model is built to the end.
- loss: after 48 steps (8 + 20 + 20). Graphs should change it no more than eager's own noise; compiled kernels may.

Equality is a claim under deterministic algorithms: two eager runs and one captured run of 100 steps each, from one
seed, compared bit by bit. The same without deterministic algorithms shows the noise that eager has against itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch
from whole_step_report import (
    EQUALITY,
    TIMED,
    WORKLOADS,
    Record,
    Rows,
    error_line,
    markdown,
    sections,
    summarise,
)
from whole_step_variants import measure_job

from stepgraph import StepgraphWarning
from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.jobs import JobServer
from stepgraph.lab.bench.server import attempted

ROOT = Path(__file__).resolve().parent.parent
PASSED_ON = ("steps", "equality_steps", "layers")
"""The options that a worker needs."""

Job = tuple[str, str]


def plan(workloads: Sequence[str], variants: Sequence[str]) -> list[Job]:
    """Return the jobs in order. Equality is run on the first workload: on a GPU-bound one it takes minutes.

    Each has the GPU to itself, the equality runs too: beside another process, atomics add in another order.
    """
    timed = [(w, v) for w in workloads for v in TIMED if v in variants]
    return timed + [(workloads[0], v) for v in EQUALITY if v in variants]


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure one variant; return its record."""
    workload, variant, args = request["workload"], request["variant"], argparse.Namespace(**request["options"])
    known = {"workload": workload, "variant": variant, "layers": args.layers}
    return attempted(known, lambda: measure_job(workload, variant, args))


def attempted_with_warnings(record: Record, measuring: Callable[[], Record]) -> Record:
    """Return a record with what was measured, or with the error, and with what stepgraph warned of, each text once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StepgraphWarning)
        record = attempted(record, measuring)
    said = [error_line(str(w.message)) for w in caught if issubclass(w.category, StepgraphWarning)]
    return record | {"warnings": list(dict.fromkeys(said))[:8]}


def request_of(job: Job, args: argparse.Namespace, names: Sequence[str]) -> Record:
    """Return what a worker is asked for: its job, and the options of these names."""
    given = {name: getattr(args, name) for name in names}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return {"workload": job[0], "variant": job[1], "device": getattr(args, "device", "cuda"), "options": options}


def run_alone(run: Callable[[Record], Record], args: argparse.Namespace, names: Sequence[str]) -> int:
    """Measure the job of `--worker` in this process, and print its record as one line of JSON."""
    record = run(request_of(args.worker, args, names))
    print(json.dumps(record, default=str), flush=True)
    return 1 if "error" in record else 0


def run_all(
    module: str,
    jobs: Sequence[Job],
    args: argparse.Namespace,
    names: Sequence[str],
    publish: Callable[[list[Record]], Record],
    outcome: Callable[[Record], str],
) -> list[Record]:
    """Run every job of a benchmark's module in turn, each in a process of its own.

    How it went is said on stderr, and what there is is published, after each.
    """
    records: list[Record] = []
    with JobServer(module, (ROOT, ROOT / "benchmarks")) as server:
        for job in jobs:
            found = server.run(request_of(job, args, names), args.timeout)
            records.append({"workload": job[0], "variant": job[1]} | found)
            print(progress(records[-1], len(records), len(jobs), outcome), file=sys.stderr, flush=True)
            publish(records)
    return records


def progress(record: Record, index: int, total: int, outcome: Callable[[Record], str]) -> str:
    """Return one line on how a worker went."""
    told = f"failed: {record['error']}" if "error" in record else outcome(record)
    return f"[{index}/{total}] {record['workload']} {record['variant']}: {told} ({record.get('worker_s', 0):.0f} s)"


def told_outcome(record: Record) -> str:
    """Return what was measured, in a few words."""
    if "pairs" not in record:
        return f"{record['step_ms']:.2f} ms"
    return ", ".join(
        f"{pair}: {sum(g['differing'] for g in groups.values())} tensors differ"
        for pair, groups in record["pairs"].items()
    )


def machine_facts() -> Record:
    """Return what a reader needs to know of the machine and its software; touches no GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = error_line(subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError):
        answer = "unknown, unknown"
    gpu, _, driver = answer.partition(", ")
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "date": datetime.date.today().isoformat(),
        "GPU": gpu,
        "driver": driver,
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
    }


def command_line(script: str, options: Sequence[str], folders: Sequence[str] = ("--out",)) -> str:
    """Return the command as typed, but for folders, which only say where this machine keeps things."""
    words = ["python", f"benchmarks/{script}", *options]
    for i, word in enumerate(words):
        option, is_joined, _ = word.partition("=")
        if option not in folders:
            continue
        if is_joined:
            words[i] = f"{option}=DIR"
        elif i + 1 < len(words):
            words[i + 1] = "DIR"
    return shlex.join(words)


def default_folder(facts: Record) -> Path:
    """Return the dated folder of this GPU's results."""
    gpu = re.sub(r"[^a-z0-9]+", "-", facts["GPU"].lower().replace("nvidia", "")).strip("-")
    return ROOT / "benchmarks" / "results" / f"{facts['date']}-{gpu}"


def write_report(folder: Path, name: str, summary: Record, text: str) -> None:
    """Write what was measured as JSON, and the tables beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)


def show(tables: Sequence[tuple[str, Rows]], text: str, width: int = 170) -> None:
    """Print the report's tables, or its text where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(text)
        return
    console = Console(width=None if sys.stdout.isatty() else width)
    for title, rows in tables:
        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows[1:]:
            table.add_row(*map(Text, row))  # plain: a rule in brackets is no markup
        console.print(table)


def name_list(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argument's type: names from `known`, separated by commas, in the known order."""
    known = list(known)

    def parse(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",") if name.strip()]
        if wrong := sorted(set(given) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not among {', '.join(known)}")
        return [name for name in known if name in given]

    return parse


def count(text: str) -> int:
    """Parse a positive number of things."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    every = [*TIMED, *EQUALITY]
    parser = argparse.ArgumentParser(description="Time, memory and equality of a whole training step, every way.")
    parser.add_argument("--workloads", type=name_list(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--variants", type=name_list(every), default=every, help=", ".join(every))
    parser.add_argument("--steps", type=count, default=20, help="steps a timed block (20)")
    parser.add_argument("--equality-steps", type=count, default=100, help="steps compared (100)")
    parser.add_argument("--layers", type=count, default=12, help="layers of the model (12); fewer for a quick test")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a worker may take (150)")
    parser.add_argument("--out", type=Path, help="folder for the reports (benchmarks/results/DATE-GPU)")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "VARIANT"), help="measure one variant, print JSON")
    return checked(parser, argv, WORKLOADS, every)


def checked(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, workloads: Collection[str], variants: Collection[str]
) -> argparse.Namespace:
    """Return the options of a benchmark whose workloads all have the same variants; refuse those that name nothing."""
    args = parser.parse_args(argv)
    if not args.workloads or not args.variants:
        parser.error("name at least one workload and one variant")
    if args.worker and (args.worker[0] not in workloads or args.worker[1] not in variants):
        parser.error(f"--worker takes a workload ({', '.join(workloads)}) and a variant ({', '.join(variants)})")
    return args


def begin(args: argparse.Namespace, tiny: str) -> tuple[Record, Path | None] | None:
    """Return the machine and the folder for the reports of a benchmark with `--device`; None where it cannot run.

    `tiny` is what runs on the CPU.
    """
    if args.device == "cpu":
        return machine_facts() | {"GPU": f"none: {tiny} on the tape", "driver": "none"}, args.out
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch finds none here. --device cpu tries it.", file=sys.stderr)
        return None
    facts = machine_facts()
    return facts, args.out or default_folder(facts)


def run_and_report(
    name: str,
    run: Callable[[Callable[[list[Record]], Record]], list[Record]],
    summarise: Callable[[list[Record], Record], Record],
    sections: Callable[[Record], Sequence[tuple[str, Rows]]],
    markdown: Callable[[Record], str],
    facts: Record,
    folder: Path | None,
    width: int = 170,
) -> int:
    """Run all jobs, write the report as far as it goes after each, show it at the end; return 1 if one failed."""
    started = time.perf_counter()

    def publish(records: list[Record]) -> Record:
        gpu = next((r["gpu"] for r in records if "gpu" in r), facts["GPU"])
        summary = summarise(records, facts | {"GPU": gpu, "seconds in all": round(time.perf_counter() - started)})
        if folder is not None:
            write_report(folder, name, summary, markdown(summary))
        return summary

    records = run(publish)
    summary = publish(records)
    show(sections(summary), markdown(summary), width)
    return 1 if any("error" in r for r in records) else 0


def run_here(jobs: Sequence[Job], measure: Callable[[Job], Record], outcome: Callable[[Record], str]) -> list[Record]:
    """Measure all jobs in this process: on the CPU there is nothing to keep apart."""
    torch.set_num_threads(1)
    records = []
    for index, job in enumerate(jobs, 1):
        records.append(measure(job))
        print(progress(records[-1], index, len(jobs), outcome), file=sys.stderr)
    return records


def main() -> int:
    """Run the benchmark; return 1 if a variant failed."""
    args = parse_arguments()
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch finds none here.", file=sys.stderr)
        return 2
    facts, command = machine_facts() | {"layers": args.layers}, command_line("whole_step.py", sys.argv[1:])
    jobs = plan(args.workloads, args.variants)
    return run_and_report(
        "whole_step",
        lambda publish: run_all("whole_step", jobs, args, PASSED_ON, publish, told_outcome),
        lambda records, facts: summarise(records, args.workloads, facts, command),
        sections,
        markdown,
        facts,
        args.out or default_folder(facts),
    )


if __name__ == "__main__":
    sys.exit(main())
