"""One rank of an interleaved pipeline on one GPU: time, memory and equality, with graphs captured ahead and without.

    python benchmarks/pipeline.py

The rank is the first of four stages. It has two model chunks of four layers each, of GPT-2-small's shape, in bf16, and
runs the interleaved order of 8 microbatches of one sequence, then fused AdamW. There is no other rank: what neighbours
would send, inputs of chunks and gradients of their results, are tensors that are there already. 16 and 32 microbatches
of 1,024 tokens show what grows with their number, 8 of 4,096 what the same graphs cost beside longer kernels. Every
variant trains the same weights on the same tensors, each in a process of its own, one after the other.

- eager: the chunks as they are.
- ours: `stepgraph.TECudaGraphHelper`, a forward and a backward graph for each layer and microbatch, memory shared by
  lifetime in the order.
- ours-no-reuse: the same with `reuse_buffers=False`: every graph has memory of its own.
- whole-step: the rank's whole step as one graph, by `stepgraph.capture`. No rank that waits for others could run so; it
  shows how near to `busy` these kernels come with no launch between them.

What the columns mean:

- step: median time of 10 steps after 6 warm ones, from CUDA events between steps, with no synchronisation inside the
  block. `again` is a second block of 10 in the same process: the difference is the run's own spread.
- busy: union of the GPU's kernel, copy and fill intervals in one profiled step.
- host: median time until the call returns, the queue drained before it.
- capture: the whole of `create_cudagraphs()`, samples and warm-up included; also for each layer and microbatch.
- reserved, allocated: peaks of torch's allocator from after the chunks are built to the end, capture included.
- result: a mean over the last result after 26 steps (6 + 10 + 10), and whether it has the very bits of eager's, under
  torch's default algorithms.

The table of buffers is arithmetic: how many static inputs the plan of each schedule has, with and without sharing, at
the bytes of one input of a layer here. What the graphs of the run really keep is in stepgraph's own report.

Equality is a claim under deterministic algorithms: 20 steps from one seed, every result compared bit by bit, and at the
end every parameter, gradient and optimizer state. It counts only where graphs were replayed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pipeline_report import EQUALITY, LAYERS, VARIANTS, WORKLOADS, markdown, sections, summarise
from whole_step import (
    Job,
    attempted_with_warnings,
    begin,
    checked,
    command_line,
    count,
    name_list,
    run_all,
    run_alone,
    run_and_report,
    run_here,
    told_outcome,
)
from whole_step_report import Record

from stepgraph.lab.bench import worker as bench_worker

PASSED_ON = ("device", "steps", "equality_steps", "layers")


def plan(workloads: Sequence[str], variants: Sequence[str]) -> list[Job]:
    """Return the jobs in order; equality is run on the first workload."""
    timed = [(w, v) for w in workloads for v in variants if v != EQUALITY]
    return timed + ([(workloads[0], EQUALITY)] if EQUALITY in variants else [])


def measure(job: Job, args: argparse.Namespace) -> Record:
    """Measure one job in this process; return its record."""
    workload, variant = job

    def measuring() -> Record:
        from pipeline_measure import Setting, measure_job

        setting = Setting(workload, torch.device(args.device), args.layers)
        found = measure_job(setting, variant, args.steps, args.equality_steps)
        return found | ({"gpu": torch.cuda.get_device_name()} if setting.is_on_gpu else {})

    record: Record = {"workload": workload, "variant": variant, "layers": args.layers}
    return attempted_with_warnings(record, measuring)


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()
    importlib.import_module("pipeline_measure")


def run(request: Record) -> Record:
    """Measure one variant; return its record."""
    workload, variant, args = request["workload"], request["variant"], argparse.Namespace(**request["options"])
    if variant == EQUALITY:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with a fixed workspace
    return measure((workload, variant), args)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description="One rank of an interleaved pipeline, eager and with graphs.")
    parser.add_argument("--workloads", type=name_list(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--variants", type=name_list(VARIANTS), default=list(VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--steps", type=count, default=10, help="steps a timed block (10)")
    parser.add_argument("--equality-steps", type=count, default=20, help="steps compared (20)")
    parser.add_argument(
        "--layers", type=count, default=LAYERS, help=f"layers a chunk ({LAYERS}); fewer for a quick test"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny layers on the tape")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a worker may take (120)")
    parser.add_argument("--out", type=Path, help="folder for the reports (benchmarks/results/DATE-GPU)")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "VARIANT"), help="measure one variant, print JSON")
    return checked(parser, argv, WORKLOADS, VARIANTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a variant failed."""
    args = parse_arguments(argv)
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    begun = begin(args, "tiny layers")
    if begun is None:
        return 2
    facts, folder = begun
    command = command_line("pipeline.py", sys.argv[1:] if argv is None else argv)
    jobs = plan(args.workloads, args.variants)

    def run_jobs(publish: Callable[[list[Record]], Record]) -> list[Record]:
        if args.device == "cpu":
            return run_here(jobs, lambda job: measure(job, args), told_outcome)
        return run_all("pipeline", jobs, args, PASSED_ON, publish, told_outcome)

    def told(records: list[Record], facts: Record) -> Record:
        buffer_bytes = next((r["buffer_bytes"] for r in records if "buffer_bytes" in r), 0)
        return summarise(records, jobs, facts, command, buffer_bytes, on_gpu=args.device == "cuda")

    return run_and_report("pipeline", run_jobs, told, sections, markdown, facts, folder, width=200)


if __name__ == "__main__":
    sys.exit(main())
