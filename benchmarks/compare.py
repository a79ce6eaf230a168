"""`stepgraph bench --compare` for published models, cut to a few layers: eager, torch.compile, graphs, both.

    python benchmarks/compare.py                                   # all workloads, on the GPU
    python benchmarks/compare.py --only llama3_8b,nemotron_h       # some of them
    python benchmarks/compare.py --out DIR --resume                # go on from the rows that are in DIR
    python benchmarks/compare.py --out DIR --page-only             # write the page of the rows in DIR; no GPU needed
    python benchmarks/compare.py --device cpu --only gpt2_small --steps 2    # does it run at all? No GPU needed

Each workload is a recipe with fewer layers, a sequence length and a number of microbatches; the commands that run one
of them alone are in `compare.md`, beside the table. Rows are those of `bench --compare`: each mechanism in a process of
its own, in two passes, the second one in reverse order. All processes are forked from one server that has imported
torch. The rows of a workload are in its JSON file as soon as they are measured; timelines of kernels are left out. The
page has all workloads whose files are in the folder, also those of an earlier run.

What the columns mean:

- step ms: mean of the medians of both passes. passes: the larger by the smaller, less 1; empty after one pass.
- against eager: eager's step by this one's. eager's own spread, over its four runs, is below the table's title.
- GiB, of eager: the peak of torch's reserved memory, and its ratio to eager's.
- losses: how they compare with eager's over all iterations, warm-up and capture among them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from whole_step import begin, count, machine_facts, name_list
from whole_step_report import markdown_table

from stepgraph.config.container import ConfigContainer
from stepgraph.config.environment import Environment
from stepgraph.config.overrides import apply_overrides
from stepgraph.lab.bench.compare import Comparison, Row, compare, plan, run_all
from stepgraph.lab.bench.jobs import JobServer
from stepgraph.lab.bench.mechanisms import all_mechanisms, mechanisms_for, select
from stepgraph.lab.bench.report_html import losses_in_words, remarks
from stepgraph.lab.bench.results import ResultFile, write_whole
from stepgraph.lab.recipes import recipe
from stepgraph.lab.recipes.fit import fit

GIB = 2**30
_BASE = "eager,eager-again,compile,ours-whole,ours-whole-compile"


@dataclass(frozen=True)
class Workload:
    """A recipe, what is changed of it, and the mechanisms that are compared; None compares all."""

    recipe: str
    settings: tuple[str, ...]
    only: str | None = None

    def command(self, steps: int) -> str:
        """The command line that runs this workload alone."""
        only = f" --only {self.only}" if self.only else ""
        return f"stepgraph bench -mr {self.recipe} --steps {steps} --compare{only} {' '.join(self.settings)}"


def _sizes(layers: int, length: int, batch: int) -> tuple[str, ...]:
    sizes = (f"model.num_layers={layers}", f"model.seq_length={length}", f"train.global_batch_size={batch}")
    return (*sizes, "train.micro_batch_size=1")


_NEMOTRON = "M-M-M-M*-"
WORKLOADS = {
    "qwen3_30b_a3b-4096": Workload(
        "qwen3_30b_a3b", _sizes(4, 4096, 2), f"{_BASE},ours-te-attn+moe_router+moe_preprocess"
    ),
    "gpt_oss_20b": Workload("gpt_oss_20b", _sizes(2, 2048, 2), f"{_BASE},ours-te-attn+moe_router+moe_preprocess"),
    "llama3_8b": Workload("llama3_8b", _sizes(4, 2048, 2), f"{_BASE},ours-te-attn"),
    "nemotron_h": Workload(
        "nemotron_h",
        (*_sizes(len(_NEMOTRON), 2048, 2), f"model.hybrid_override_pattern={_NEMOTRON}"),
        f"{_BASE},ours-te-mamba+attn",
    ),
    "qwen3_30b_a3b-1024": Workload("qwen3_30b_a3b", _sizes(4, 1024, 4)),
    "gpt2_small": Workload("gpt2_small", ("train.global_batch_size=4", "train.micro_batch_size=1")),
}
"""Each workload by its name; four of them with the mechanisms that matter, two with all."""


def configuration(workload: Workload, device: torch.device) -> ConfigContainer:
    """The recipe with the workload's settings; on a CPU cut to what it can train."""
    cfg = recipe(workload.recipe)
    apply_overrides(cfg, list(workload.settings))
    return cfg if device.type == "cuda" else fit(cfg, 1 << 34, "cpu").config


def run_workload(name: str, args: argparse.Namespace, server: JobServer) -> None:
    """Run what the workload's file does not have yet."""
    workload, file, device = WORKLOADS[name], _file(args.out, name), torch.device(args.device)
    cfg = configuration(workload, device)
    known = mechanisms_for(cfg, Environment.read(device.type))
    chosen = known if workload.only is None else select(workload.only, known)
    missing = [mechanism for mechanism in chosen if mechanism.missing(device, cfg) is not None]
    chosen = [mechanism for mechanism in chosen if mechanism not in missing]
    request = {"config": cfg.to_dict(), "device": str(device), "steps": args.steps}
    facts = {"command": workload.command(args.steps), "not run": [mechanism.name for mechanism in missing]}
    results = ResultFile(file, request, machine_facts() | facts)
    records = results.load() if args.resume else []

    def keep(record: dict[str, Any]) -> None:
        record.pop("timeline_us", None)
        records.append(record)
        results.save(records)
        told = record.get("error") or f"{record['step_ms']:.2f} ms"
        print(f"{file.stem} {record['mechanism']}: {told} ({record['job_s']:.0f} s)", flush=True)

    run_all(server, plan(chosen, records), request, args.job_timeout, keep)


def _file(folder: Path, name: str) -> Path:
    return folder / f"compare_{name}.json"


def cells(row: Row, eager: Row | None) -> list[str]:
    """The cells of one mechanism."""
    if row.step_ms is None:
        return [row.mechanism.name, "failed", "", "", "", "", "", row.error or ""]
    reserved = row.figures["memory"]["reserved"]
    base = eager.figures["memory"]["reserved"] if eager is not None and eager.figures else None
    busy = row.figures.get("busy_fraction")
    return [
        row.mechanism.name,
        f"{row.step_ms:.2f}",
        "" if row.spread is None else f"{100 * row.spread:.1f} %",
        f"{eager.step_ms / row.step_ms:.2f}" if eager is not None and eager.step_ms else "",
        "" if busy is None else f"{100 * busy:.0f} %",
        "" if reserved is None else f"{reserved / GIB:.2f}",
        f"{reserved / base:.2f}" if reserved and base else "",
        losses_in_words(row),
    ]


_TITLE = """# Comparisons

By `python benchmarks/compare.py`. The command above each table runs that workload alone.
"""
HEAD = ["mechanism", "step ms", "passes", "against eager", "busy", "GiB", "of eager", "losses against eager"]


def page(folder: Path) -> tuple[str, bool]:
    """What the files in a folder say, and whether a mechanism failed."""
    files = {name: _file(folder, name) for name in WORKLOADS}
    results = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}
    parts = [section(name, found) for name, found in results.items()]
    failed = any("error" in record for found in results.values() for record in found["records"])
    return "\n".join([_TITLE, *parts]), failed


def compared(name: str, results: dict[str, Any]) -> Comparison:
    """Put the rows of a workload's file together."""
    device = torch.device(results["request"]["device"])
    cfg, environment = configuration(WORKLOADS[name], device), Environment.read(device.type)
    measured = {record["mechanism"] for record in results["records"]}
    known = [mechanism for mechanism in all_mechanisms(cfg, environment) if mechanism.name in measured]
    return compare(known, results["records"])


def section(name: str, results: dict[str, Any]) -> str:
    """What was measured of one workload, as a part of the page."""
    facts, records = results["facts"], results["records"]
    found = compared(name, results)
    eager = found.row("eager")
    runs = sum(record["mechanism"] in ("eager", "eager-again") for record in records)
    losses = "their losses are equal" if found.eager_equals_eager else "their losses are not all equal"
    noise = f"The step times of eager's {runs} runs differ by {100 * found.noise:.1f} %; {losses}."
    lines = [
        f"## {name}",
        f"`{facts['command']}`",
        ", ".join(f"{fact} {facts[fact]}" for fact in ("date", "GPU", "driver", "CPU", "torch", "CUDA", "Python")),
        f"Recommended: {found.winner}, {found.reason}. {noise}",
        markdown_table([HEAD, *(cells(row, eager) for row in found.rows)]),
    ]
    said = [
        f"- {row.mechanism.name}: {words}" for row in found.rows if row.step_ms is not None and (words := remarks(row))
    ]
    if said:
        lines.append("\n".join(said))
    if facts.get("not run"):
        lines.append(f"Not run: {', '.join(facts['not run'])}.")
    return "\n\n".join(lines) + "\n"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=name_list(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=count, default=12, help="timed steps a run (12)")
    parser.add_argument("--job-timeout", type=float, default=300.0, help="seconds for one mechanism (300)")
    parser.add_argument("--resume", action="store_true", help="go on from the rows that are there")
    parser.add_argument("--page-only", action="store_true", help="write the page of the rows that are there")
    parser.add_argument("--out", type=Path, help="folder of the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all workloads, write their files and one page of tables; return 1 if a mechanism failed."""
    args = parse_arguments(argv)
    begun = begin(args, "small models") if not args.page_only else ({}, args.out)
    if begun is None:
        return 2
    args.out = begun[1] or Path.cwd()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.page_only:
        with JobServer() as server:
            for name in args.only:
                run_workload(name, args, server)
                write_whole(args.out / "compare.md", page(args.out)[0])
    text, failed = page(args.out)
    write_whole(args.out / "compare.md", text)
    print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
