"""A step that cannot be captured: eager against `capture(on_error="modules")`, for models with experts in a host loop.

    python benchmarks/on_error_modules.py                            # Mixtral and Qwen3-MoE, small, from configs
    python benchmarks/on_error_modules.py --layers 4 --hidden 256 --out DIR
    python benchmarks/on_error_modules.py --device cpu --steps 2     # does it run at all? No GPU needed

The models are Hugging Face's, their experts a loop over those that got tokens, which reads on the host. The step is
zero_grad, forward, backward and fused AdamW. Each model has a process of its own. What the columns mean:

- eager_ms, modules_ms: median time of a step without an audit; the two run in turn, in blocks, on the same batches.
- speed_up: the first by the second.
- audits: the steps in which a module was recorded again (at its replays 1, 2, 4, ...), and the seconds that they added.
  with audits: the speed-up by the mean of all steps. The more steps a training has, the nearer it is to speed_up.
- graphed: the modules with graphs, as a scope. left_out: the modules that stayed eager, with the reason.
- search_s: seconds from the failed capture to the first call that replays, with the search.
- equal: whether losses and parameters of the measured steps have eager's bits. Where eager differs from itself, false.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from whole_step import Job, begin, command_line, count, name_list, run_all, run_alone, run_and_report
from whole_step_report import Record, Rows, as_page, number

import stepgraph
from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.server import attempted
from stepgraph.tools.measure import wall_ms

MODELS = ("mixtral", "qwen3_moe")
WAY = "modules"
SIZES = {"layers": 4, "hidden": 256, "sequence": 256, "batch": 2, "steps": 20, "blocks": 8}
PASSED_ON = ("device", *SIZES)
VOCABULARY, EXPERTS = 1024, 8


def build(name: str, options: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the model, always with the same weights, and its step."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "intermediate_size": 2 * options.hidden,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": options.sequence,
        "use_cache": False,
    }
    if name == "mixtral":
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=EXPERTS))
    else:
        routed = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": options.hidden}
        config = transformers.Qwen3MoeConfig(**sizes, **routed, head_dim=options.hidden // 8)
        made = transformers.Qwen3MoeForCausalLM(config)
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model: torch.nn.Module = made.to(options.device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def measure(name: str, options: argparse.Namespace) -> Record:
    """Train two equal models, one eager and one with graphs for modules, and time them in turn."""
    device = torch.device(options.device)
    draw = torch.Generator().manual_seed(1)
    shape = (options.batch, options.sequence)
    batches = [torch.randint(VOCABULARY, shape, generator=draw).to(options.device) for _ in range(8)]
    (eager_model, eager), (model, plain) = build(name, options), build(name, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        with stepgraph.capture(plain, on_error="modules") as graphed:
            equal = True

            def search() -> None:
                nonlocal equal
                calls = 0
                while (found := graphed.report().modules) is None or (found.replays == 0 and calls < 20):
                    equal = torch.equal(eager(batches[calls % 8]), graphed(batches[calls % 8]))
                    calls += 1

            search_s = wall_ms(search, device) / 1e3
            times: dict[str, list[float]] = {"eager": [], "modules": []}
            audited: list[float] = []
            for block in range(options.blocks):
                losses: dict[str, list[torch.Tensor]] = {}
                for way, step in (("eager", eager), ("modules", graphed)):
                    losses[way] = []
                    for index in range(options.steps):
                        given, before = batches[(block + index) % 8], graphed.report().modules.audits
                        took_ms = wall_ms(lambda: losses[way].append(step(given)), device)  # noqa: B023
                        has_audit = way == "modules" and graphed.report().modules.audits > before
                        (audited if has_audit else times[way]).append(took_ms)
                equal = equal and all(map(torch.equal, losses["eager"], losses["modules"]))
            pairs = zip(eager_model.parameters(), model.parameters(), strict=True)
            equal = equal and all(torch.equal(one, two) for one, two in pairs)
            report = graphed.report().modules
    eager_ms, modules_ms = statistics.median(times["eager"]), statistics.median(times["modules"] or audited)
    all_ms = statistics.fmean([*times["modules"], *audited])
    return {
        "eager_ms": round(eager_ms, 4),
        "modules_ms": round(modules_ms, 4),
        "speed_up": round(eager_ms / modules_ms, 3),
        "audited_steps": len(audited),
        "audits_s": round(sum(took - modules_ms for took in audited) / 1e3, 3),
        "speed_up_with_audits": round(statistics.fmean(times["eager"]) / all_ms, 3),
        "steps_ms": {way: [round(value, 3) for value in found] for way, found in times.items()},
        "graphed": [row.path for row in report.rows if row.forwards],
        "replays": report.replays,
        "left_out": report.left_out,
        "search_s": round(search_s, 3),
        "equal": bool(equal),
    }


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure one model; return its record."""
    name, args = request["workload"], argparse.Namespace(**request["options"])
    if args.device == "cpu":
        torch.set_num_threads(1)
    return attempted({"workload": name, "variant": request["variant"]}, lambda: measure(name, args))


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the table; a failed model's row is its error."""
    head = ["model", "eager ms", "modules ms", "speed-up", "audits", "with audits", "graphed", "left out"]
    rows = [[*head, "search s", "equal"]]
    for r in records:
        if "error" in r:
            rows.append([r["workload"], f"failed: {r['error']}", *[""] * 8])
            continue
        counts = [str(len(r["graphed"])), str(len(r["left_out"]))]
        times = [number(r["eager_ms"], 2), number(r["modules_ms"], 2), number(r["speed_up"], 2)]
        times += [f"{r['audited_steps']}: {r['audits_s']:.2f} s", number(r["speed_up_with_audits"], 2)]
        rows.append([r["workload"], *times, *counts, number(r["search_s"], 2), "yes" if r["equal"] else "no"])
    return rows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="A step that cannot be captured: eager against its modules.")
    parser.add_argument("--models", type=name_list(MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help="cpu: on the tape")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=count, default=default, help=f"({default})")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a model may take (300)")
    parser.add_argument("--out", type=Path, help="folder for the report; without it nothing is written on a CPU")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "WAY"), help=f"measure one model, {WAY!r}, print JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a model failed."""
    args = parse_arguments(argv)
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    begun = begin(args, "small models")
    if begun is None:
        return 2
    facts, folder = begun
    facts |= {"transformers": importlib.metadata.version("transformers")}
    facts |= {"sizes": ", ".join(f"{name} {getattr(args, name)}" for name in SIZES)}
    command = command_line("on_error_modules.py", sys.argv[1:] if argv is None else argv)
    jobs: list[Job] = [(name, WAY) for name in args.models]

    def outcome(record: Record) -> str:
        return f"{record['eager_ms']:.2f} ms, modules {record['modules_ms']:.2f} ms"

    def sections(summary: Record) -> list[tuple[str, Rows]]:
        return [("Eager against modules", rows_of(summary["records"]))]

    return run_and_report(
        "on_error_modules",
        lambda publish: run_all("on_error_modules", jobs, args, PASSED_ON, publish, outcome),
        lambda records, facts: {"environment": facts, "command": command, "records": records},
        sections,
        lambda summary: as_page("Modules of a step", summary, sections(summary), "benchmarks/on_error_modules.py"),
        facts,
        folder,
    )


if __name__ == "__main__":
    sys.exit(main())
