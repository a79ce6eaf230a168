"""Transformer Engine's own layers: eager, under its own graphs, and under stepgraph's, in one command.

    python benchmarks/te_layers.py
    python benchmarks/te_layers.py --precisions bf16,fp8-delayed,fp8-current

The step is four microbatches of forward and backward through eight TransformerLayers (hidden 1024, 16 heads, causal,
sequence 512, batch 2, no dropout), then fused Adam, gradients set to None in between. Every variant trains the same
weights on the same batches, each in a process of its own; all variants run once, and then all again (the second pass),
so that a machine that gets slower shows.

The variants:

- eager: the step as written.
- te-graphs: `transformer_engine.pytorch.make_graphed_callables` around the layers, in the same loop.
- te-graphs-zeroed: the same with gradients allocated beforehand and zeroed in place. Transformer Engine's graphs return
  gradients in memory that the next replay overwrites; autograd keeps the first of them as `.grad` where that is None.
- ours-step: `stepgraph.capture` of the step.
- ours-modules: `stepgraph.graph_modules(model, ["layers.*"])`.

What the columns mean: step is the median time of 20 steps after 10 others, from CUDA events between steps; `again` a
second block of 20 in the same process. `losses` says whether the first 10 losses have the very bits of eager's in the
same pass. Both blocks and these losses come under torch's default algorithms.

This file must not be called like the package: a script's own folder comes first when it imports.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from whole_step import (
    Job,
    command_line,
    count,
    default_folder,
    machine_facts,
    name_list,
    run_all,
    run_alone,
    run_and_report,
)
from whole_step_report import GIB, Record, Rows, Target, as_page, engine_rows, error_line, find, number, target_rows
from whole_step_variants import time_block

from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.server import attempted
from stepgraph.tools.measure import peaks_of

HIDDEN, FFN, HEADS, SEQUENCE, BATCH, MICROBATCHES = 1024, 4096, 16, 512, 2, 4
BATCHES, FIRST_STEPS = 8, 10
PRECISIONS = ("bf16", "fp8-delayed", "fp8-current")
PASSES = ("first", "second")
PASSED_ON = ("steps", "layers")
WORKLOADS = tuple(f"{precision}/{turn}" for turn in PASSES for precision in PRECISIONS)
VARIANTS = ("eager", "te-graphs", "te-graphs-zeroed", "ours-step", "ours-modules")
OURS = ("ours-step", "ours-modules")
LIMIT = 1.01
"""Over Transformer Engine's own graphs: no slower, but for the spread of the measurement."""

Step = Callable[[Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring: inside a worker


class Layers(nn.Module):
    """Transformer Engine's layers, one after the other."""

    def __init__(self, num_layers: int) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN,
                FFN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                params_dtype=torch.bfloat16,
                self_attn_mask_type="causal",
                layer_number=number + 1,
                fuse_qkv_params=True,
            )
            for number in range(num_layers)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def recipe_of(precision: str) -> Any:
    """Return Transformer Engine's recipe; None for bf16."""
    from transformer_engine.common import recipe

    match precision:
        case "fp8-delayed":
            hybrid = recipe.Format.HYBRID
            return recipe.DelayedScaling(fp8_format=hybrid, amax_history_len=16, amax_compute_algo="max")
        case "fp8-current":
            return recipe.Float8CurrentScaling()
    return None


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any, *, set_to_none: bool) -> Step:
    """Return the step as a user of Transformer Engine writes it."""
    import transformer_engine.pytorch as te

    def train_step(batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        total = torch.zeros((), device=batch.device)
        for hidden in batch.unbind():
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = model(hidden)
            loss = out.float().pow(2).mean() / MICROBATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return train_step


def graph_by_te(model: Layers, recipe: Any) -> None:
    """Put Transformer Engine's graphs in the place of the layers' forwards."""
    import transformer_engine.pytorch as te

    def sample() -> tuple[Tensor]:
        return (torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True),)

    options = {} if recipe is None else {"enabled": True, "recipe": recipe}
    layers = tuple(model.layers)
    graphed = te.make_graphed_callables(layers, tuple(sample() for _ in layers), num_warmup_iters=3, **options)
    model.layers = nn.ModuleList(graphed)


def build_step(variant: str, precision: str, num_layers: int) -> tuple[Step, Callable[[], Record]]:
    """Return the step of a variant, and what gives stepgraph's report of it."""
    torch.manual_seed(0)
    model, recipe = Layers(num_layers).cuda(), recipe_of(precision)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    if variant.startswith("te-graphs"):
        graph_by_te(model, recipe)
    if variant == "te-graphs-zeroed":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    step = plain_step(model, optimizer, recipe, set_to_none=variant != "te-graphs-zeroed")
    if variant not in OURS:
        return step, dict
    import stepgraph

    handle: Any = stepgraph.capture(step) if variant == "ours-step" else stepgraph.graph_modules(model, ["layers.*"])
    return (handle if variant == "ours-step" else step), lambda: summary_of(handle.report().to_dict())


def summary_of(report: Record) -> Record:
    """Return a report with the reasons of all modules added up, where it is one of modules."""
    reasons: dict[str, int] = dict(report.get("eager_reasons", {}))
    for row in report.pop("modules", ()):
        for reason, calls in row["eager_reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + calls
    return report | {"eager_reasons": reasons}


def measure(precision: str, variant: str, steps: int, num_layers: int) -> Record:
    """Run one variant from the model's construction to its report."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (MICROBATCHES, SEQUENCE, BATCH, HIDDEN)
    batches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(BATCHES)]
    started = time.perf_counter()
    step, report = build_step(variant, precision, num_layers)
    endless = itertools.cycle(batches)
    losses = [step(next(endless)).clone() for _ in range(FIRST_STEPS)]
    first_losses = [loss.item() for loss in losses]
    ready = time.perf_counter() - started
    device = torch.device("cuda")
    first, _ = time_block(lambda: step(next(endless)), steps, device)
    second, last = time_block(lambda: step(next(endless)), steps, device)
    engine = report()
    return {
        "step_ms": statistics.median(first),
        "again_ms": statistics.median(second),
        "fastest_ms": min(first + second),
        "slowest_ms": max(first + second),
        "losses": first_losses,
        "last_loss": last.item(),
        "replays": engine.get("replays"),
        "first_steps_s": ready,
        "reserved_bytes": peaks_of(device).reserved,
        "engine": engine,
    }


def prepare() -> None:
    """Import what the workers need; Transformer Engine is imported by each, since it may start CUDA."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure one variant; return its record."""
    workload, variant, args = request["workload"], request["variant"], argparse.Namespace(**request["options"])

    def measuring() -> Record:
        found = measure(workload.partition("/")[0], variant, args.steps, args.layers)
        return found | {"gpu": torch.cuda.get_device_name()}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = attempted({"workload": workload, "variant": variant, "layers": args.layers}, measuring)
    said = [error_line(str(w.message)) for w in caught if w.category.__name__ == "StepgraphWarning"]
    return record | {"warnings": list(dict.fromkeys(said))[:8]}


# ---------------------------------------------------------------------------------------------------------------------
# The report


def same_losses(records: Sequence[Record], record: Record) -> str:
    """Say whether a variant's first losses are eager's, bit for bit, or where they leave them."""
    expected = find(records, record["workload"], "eager").get("losses")
    if expected is None or record["variant"] == "eager":
        return ""
    for number_of_step, (one, two) in enumerate(zip(expected, record["losses"], strict=True), 1):
        if one != two:
            return f"differ from step {number_of_step}: {one:.7g}, {two:.7g}"
    return "same bits"


def step_rows(records: Sequence[Record], workload: str) -> Rows:
    """Return one workload's table; a failed variant's row is its error."""
    rows = [["variant", "step ms", "again ms", "vs eager", "losses", "replays", "first 10 steps s", "reserved GiB"]]
    eager = find(records, workload, "eager").get("step_ms")
    for r in records:
        if r["workload"] != workload:
            continue
        if "error" in r:
            rows.append([r["variant"], f"failed: {r['error']}", *[""] * 6])
            continue
        rows.append(
            [
                r["variant"],
                number(r["step_ms"], 2),
                number(r["again_ms"], 2),
                "" if eager is None else f"{eager / r['step_ms']:.2f}x",
                same_losses(records, r),
                "" if r["replays"] is None else str(r["replays"]),
                number(r["first_steps_s"], 1),
                number(r["reserved_bytes"] / GIB, 3),
            ]
        )
    return rows


def judge(records: Sequence[Record], workloads: Sequence[str], variants: Sequence[str]) -> list[Target]:
    """Hold our variants against eager's bits and the time of Transformer Engine's graphs."""
    targets = []
    for workload, variant in itertools.product(workloads, [v for v in OURS if v in variants]):
        run = find(records, workload, variant)
        told = same_losses(records, run) if run else "not measured"
        reached = told == "same bits" and bool(run["replays"])
        targets.append(Target(workload, f"{variant}: losses of {FIRST_STEPS} steps", "eager's bits", told, reached))
        ours, theirs = (
            min(r["step_ms"], r["again_ms"]) if r else None for r in (run, find(records, workload, "te-graphs"))
        )
        ratio = ours / theirs if ours and theirs else None
        measured = "not measured" if ratio is None else f"{ratio:.4f}"
        is_fast = ratio is not None and ratio <= LIMIT
        targets.append(Target(workload, f"{variant} / te-graphs: step time", f"<= {LIMIT:.2f}", measured, is_fast))
    return targets


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """Return the report's tables in order, each with its title; empty ones are left out."""
    records = summary["records"]
    tables = [(f"{w} pass", step_rows(records, w)) for w in summary["workloads"]]
    keys = ("graphs", "replays", "recaptures", "eager_calls", "eager_reasons", "capture_seconds", "pool_bytes")
    tables.append(("What stepgraph reported", engine_rows(records, keys)))
    said = [[r["workload"], r["variant"], text] for r in records for text in r.get("warnings", ())]
    tables.append(("Warnings", [["workload", "variant", "warning"], *said]))
    tables.append(("Targets", target_rows([Target(**t) for t in summary["targets"]])))
    return [(title, rows) for title, rows in tables if len(rows) > 1]


def markdown(summary: Record) -> str:
    """Render the whole report."""
    return as_page("Transformer Engine's layers", summary, sections(summary), "benchmarks/te_layers.py")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description="Time and losses of Transformer Engine's layers, every way.")
    parser.add_argument("--precisions", type=name_list(PRECISIONS), default=["bf16"], help=", ".join(PRECISIONS))
    parser.add_argument("--variants", type=name_list(VARIANTS), default=list(VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--passes", type=int, choices=(1, 2), default=2, help="how often all variants run (2)")
    parser.add_argument("--steps", type=count, default=20, help="steps a timed block (20)")
    parser.add_argument("--layers", type=count, default=8, help="layers of the model (8)")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a worker may take (150)")
    parser.add_argument("--out", type=Path, help="folder for the reports (benchmarks/results/DATE-GPU)")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "VARIANT"), help="measure one variant, print JSON")
    args = parser.parse_args(argv)
    if not args.precisions or not args.variants:
        parser.error("name at least one precision and one variant")
    if args.worker and (args.worker[0] not in WORKLOADS or args.worker[1] not in VARIANTS):
        parser.error(f"--worker takes a workload ({', '.join(WORKLOADS)}) and a variant ({', '.join(VARIANTS)})")
    args.workloads = [f"{precision}/{turn}" for turn in PASSES[: args.passes] for precision in args.precisions]
    return args


def main() -> int:
    """Run the benchmark; return 1 if a variant failed."""
    args = parse_arguments()
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch finds none here.", file=sys.stderr)
        return 2
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        print("This benchmark needs Transformer Engine, which is not installed here.", file=sys.stderr)
        return 2
    facts = machine_facts() | {"Transformer Engine": version, "layers": args.layers}
    command = command_line("te_layers.py", sys.argv[1:])
    jobs: list[Job] = list(itertools.product(args.workloads, args.variants))

    def told(records: list[Record], facts: Record) -> Record:
        targets = [asdict(t) for t in judge(records, args.workloads, args.variants)]
        head = {"environment": facts, "command": command, "workloads": args.workloads}
        return head | {"targets": targets, "records": records}

    return run_and_report(
        "te_layers",
        lambda publish: run_all(
            *("te_layers", jobs, args, PASSED_ON, publish),
            lambda record: f"{record['step_ms']:.2f} ms",
        ),
        told,
        sections,
        markdown,
        facts,
        args.out or default_folder(facts),
    )


if __name__ == "__main__":
    sys.exit(main())
