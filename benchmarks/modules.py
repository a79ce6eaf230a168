"""Graphs for the modules of a model: time, memory and equality against eager and other graphs, in one command.

    python benchmarks/modules.py
    python benchmarks/modules.py --megatron PATH       # with megatron-core's own model, from the folder it is in

The step is four microbatches of one sequence, forward and backward, then fused AdamW, in bf16. The models: a GPT of
GPT-2-small's shape; 4 layers of Qwen3-30B-A3B's shape at sequence 1024 and 4096, with experts in a loop that reads on
the host and with experts that do not; and megatron-core's own GPTModel with GPT-2-small's sizes. Every variant of a
model trains the same weights on the same batches, each in a process of its own, one after the other.

What the columns mean:

- step: median time of 10 steps after 6 warm ones, from CUDA events between steps, with no synchronisation inside the
  block. `again` is a second block of 10 in the same process: the difference is the run's own spread.
- busy: union of the GPU's kernel, copy and fill intervals in one profiled step.
- host: median time until the call returns, the queue drained before it.
- capture: seconds spent on capturing, eager warm-up steps left out; for torch, the call of make_graphed_callables, its
  own warm-up included. `s/layer` is that over the number of layers.
- reserved, allocated: peaks of torch's allocator from after the model is built to the end; `/ eager` against the
  eager variant with the same experts.
- loss: after 26 steps (6 + 10 + 10), and whether it has the very bits of eager's, under torch's default algorithms.

`torch-layers` has its gradients allocated beforehand and zeroed in place: without that make_graphed_callables trains on
wrong gradients when they accumulate. No other variant needs it.

Equality is a claim under deterministic algorithms: each variant against its eager base, 20 steps from one seed, every
loss compared bit by bit, and at the end every parameter, gradient and optimizer state. It counts only where every part
was replayed. Megatron's own graphs are left out of it: they are globals, which a second model would meet.

The host's cost of a forward+backward pair is measured with four linear layers of width 8, too small to hide it: host
time of module, sum and backward, in turn in one process, against the same with an identity in the module's place.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from modules_report import EQUALITY, PAIR, VARIANTS, WORKLOADS, markdown, sections, summarise
from whole_step import (
    Job,
    attempted_with_warnings,
    begin,
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

PASSED_ON = ("device", "steps", "equality_steps", "layers", "megatron")


def plan(args: argparse.Namespace) -> tuple[list[Job], dict[str, str]]:
    """Return the jobs in order, and what is left out with the reason."""
    jobs, skipped = [], {}
    for workload in args.workloads:
        for variant in WORKLOADS[workload].variants:
            if variant not in args.variants:
                continue
            if workload.startswith("megatron") and (args.megatron is None or args.device == "cpu"):
                skipped[workload] = "needs a GPU, and megatron-core: --megatron PATH"
            elif variant == "torch-layers" and args.device == "cpu":
                skipped[f"{workload} {variant}"] = "torch's graphed callables need a GPU"
            else:
                jobs.append((workload, variant))
    return jobs, skipped


def measure(job: Job, args: argparse.Namespace) -> Record:
    """Measure one job in this process; return its record."""
    workload, variant = job
    layers = min(args.layers or WORKLOADS[workload].layers, 2 if args.device == "cpu" else 10**6)

    def measuring() -> Record:
        from modules_measure import measure_job
        from modules_variants import Setting

        setting = Setting(workload, torch.device(args.device), layers)
        record["sequence"] = setting.sequence
        found = measure_job(setting, variant, args.steps, args.equality_steps)
        return found | ({"gpu": torch.cuda.get_device_name()} if setting.is_on_gpu else {})

    record: Record = {"workload": workload, "variant": variant, "layers": layers}
    return attempted_with_warnings(record, measuring)


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()
    importlib.import_module("modules_measure")


def run(request: Record) -> Record:
    """Measure one variant; return its record."""
    workload, variant, args = request["workload"], request["variant"], argparse.Namespace(**request["options"])
    if variant == EQUALITY:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with a fixed workspace
    if workload.startswith("megatron"):
        sys.path.insert(0, str(args.megatron))
    return measure((workload, variant), args)


def outcome(record: Record) -> str:
    """Return what was measured, in a few words."""
    if record["variant"] != PAIR:
        return told_outcome(record)
    return ", ".join(f"{way} {us:.0f} us" for way, us in record["median_us"].items())


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description="Time, memory and equality of graphs for modules, every way.")
    parser.add_argument("--workloads", type=name_list(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--variants", type=name_list(VARIANTS), default=VARIANTS, help=", ".join(VARIANTS))
    parser.add_argument("--steps", type=count, default=10, help="steps a timed block (10)")
    parser.add_argument("--equality-steps", type=count, default=20, help="steps compared (20)")
    parser.add_argument("--layers", type=count, help="layers of every model (12 and 4); fewer for a quick test")
    parser.add_argument("--megatron", type=Path, help="folder that `megatron` can be imported from")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models on the tape")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a worker may take (120)")
    parser.add_argument("--out", type=Path, help="folder for the reports (benchmarks/results/DATE-GPU)")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "VARIANT"), help="measure one variant, print JSON")
    args = parser.parse_args(argv)
    if not args.workloads or not args.variants:
        parser.error("name at least one workload and one variant")
    if args.worker and args.worker[1] not in getattr(WORKLOADS.get(args.worker[0]), "variants", ()):
        known = "; ".join(f"{name}: {', '.join(workload.variants)}" for name, workload in WORKLOADS.items())
        parser.error(f"--worker takes a workload and one of its variants ({known})")
    if args.megatron is not None:
        args.megatron = args.megatron.resolve()
        if not (args.megatron / "megatron" / "core").is_dir():
            parser.error(f"--megatron {args.megatron}: there is no megatron/core in it")
    elif args.worker and args.worker[0].startswith("megatron"):
        parser.error(f"{args.worker[0]} needs --megatron PATH")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a variant failed."""
    args = parse_arguments(argv)
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    begun = begin(args, "tiny models")
    if begun is None:
        return 2
    facts, folder = begun
    given = sys.argv[1:] if argv is None else argv
    command = command_line("modules.py", given, ("--out", "--megatron"))
    jobs, skipped = plan(args)
    for what, why in skipped.items():
        print(f"{what}: left out, {why}", file=sys.stderr)

    def run_jobs(publish: Callable[[list[Record]], Record]) -> list[Record]:
        if args.device == "cpu":
            return run_here(jobs, lambda job: measure(job, args), outcome)
        return run_all("modules", jobs, args, PASSED_ON, publish, outcome)

    def told(records: list[Record], facts: Record) -> Record:
        return summarise(records, jobs, skipped, facts, command, on_gpu=args.device == "cuda")

    return run_and_report("modules", run_jobs, told, sections, markdown, facts, folder, width=200)


if __name__ == "__main__":
    sys.exit(main())
