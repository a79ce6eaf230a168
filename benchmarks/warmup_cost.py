"""What warm-up and capture cost against eager calls of the same step, for models whose code is long.

    python benchmarks/warmup_cost.py                     # on the GPU, or on the tape where there is none
    python benchmarks/warmup_cost.py --device cpu --models gpt,llama

The step is zero_grad, forward, backward and fused AdamW of a model of four layers, hidden 128: stepgraph's own GPT, and
Hugging Face's Llama, BERT and ViT from their configs where transformers is installed. It is captured whole, and by
layer. What the columns mean:

- eager: median time of one eager call, after three others. On the tape all times are the processor's.
- calls: seconds of each call from the first to the one that captures, the device idle before and after each.
- recording: the seconds of it that the report counts as capture.
- beyond: the rest, in eager calls: warm-up with its observation. Three calls of it are the eager calls that warm-up is,
  one is the replay that follows the capture.

Each model and way runs in a process of its own, which has captured a step of one layer before: what a process does once
(imports, loading kernels) is counted there. Attention masks are made outside of the step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from whole_step import (
    Job,
    begin,
    command_line,
    count,
    name_list,
    run_all,
    run_alone,
    run_and_report,
)
from whole_step_report import Record, Rows, as_page, number

import stepgraph
from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.server import attempted

MODELS = {"gpt": None, "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}
"""Each model, and its class in transformers."""
WAYS = ("whole step", "by layer")
PASSED_ON = ("device", "layers", "hidden")
WARMUP = 3
VOCABULARY, SEQUENCE, BATCH, IMAGE, LABELS = 256, 32, 2, 16, 8


def build_model(name: str, num_layers: int, hidden: int) -> nn.Module:
    """Return the model, always with the same weights."""
    torch.manual_seed(0)
    if name == "gpt":
        from stepgraph.lab.models import GPT, GPTConfig

        return GPT(replace(GPTConfig.tiny(), num_layers=num_layers, max_seq_len=SEQUENCE, vocab_size=VOCABULARY))
    import transformers

    sizes = {"num_hidden_layers": num_layers, "hidden_size": hidden, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 2 * hidden}
    tokens = {"vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "use_cache": False}
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**sizes, **tokens, num_key_value_heads=2),
        "bert": lambda: transformers.BertConfig(**sizes, **tokens),
        "vit": lambda: transformers.ViTConfig(**sizes, image_size=IMAGE, patch_size=4, num_labels=LABELS),
    }
    model: nn.Module = getattr(transformers, MODELS[name])(configs[name]())
    return model.train()


def build_step(name: str, model: nn.Module, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the step and its batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randint(VOCABULARY, (BATCH, SEQUENCE), device=device)
    mask = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device)
    classes = torch.zeros(BATCH, dtype=torch.long, device=device)
    if name == "llama":
        mask = mask.tril()
    elif name == "vit":
        batch = torch.randn(BATCH, 3, IMAGE, IMAGE, device=device)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "gpt": lambda given: model(given, given),
        "llama": lambda given: model(given, labels=given, attention_mask=mask).loss,
        "bert": lambda given: model(given, labels=given, attention_mask=mask).loss,
        "vit": lambda given: model(given, labels=classes).loss,
    }
    loss_of = losses[name]

    def train_step(given: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(given)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step, batch


def layers_of(model: nn.Module, num_layers: int) -> str:
    """Return the glob of the model's layers."""
    lists = (
        path for path, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers
    )
    return f"{next(lists)}.*"


def seconds_of(call: Callable[[], Tensor], device: torch.device) -> float:
    """Return the seconds of one call, the device idle before and after.

    On the CPU these are the processor's: what else runs on the machine does not count.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def capture_something(device: torch.device) -> float:
    """Capture a step of one layer: what a process does once (imports, loading kernels) is no model's cost."""
    layer = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    batch = torch.randn(2, 4, device=device)

    def train_step(given: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layer(given).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with stepgraph.capture(train_step, warmup=WARMUP) as captured:
        return sum(seconds_of(lambda: captured(batch), device) for _ in range(WARMUP + 2))


def measure(name: str, way: str, device: torch.device, num_layers: int, hidden: int) -> Record:
    """Run one model one way, until it has captured and replayed."""
    once = capture_something(device)
    model = build_model(name, num_layers, hidden).to(device)
    step, batch = build_step(name, model, device)
    eager = [seconds_of(lambda: step(batch), device) for _ in range(WARMUP + 10)][WARMUP:]
    handle: Any
    if way == "whole step":
        handle = run = stepgraph.capture(step, warmup=WARMUP)
    else:
        handle, run = stepgraph.graph_modules(model, [layers_of(model, num_layers)], warmup=WARMUP), step
    calls = []
    while not handle.report().replays:
        calls.append(seconds_of(lambda: run(batch), device))
        if len(calls) > 20:
            raise RuntimeError(f"nothing was replayed in 20 calls: {handle.report().to_dict()}")
    report = handle.report()
    replays = [seconds_of(lambda: run(batch), device) for _ in range(10)]
    handle.close()
    eager_s = statistics.median(eager)
    recording_s = min(report.capture_seconds, calls[-1])
    return {
        "eager_s": eager_s,
        "calls_s": calls,
        "warmup_and_capture_s": sum(calls),
        "recording_s": recording_s,
        "ratio": sum(calls) / eager_s,
        "beyond_eager_calls": (sum(calls) - recording_s) / eager_s,
        "replay_s": statistics.median(replays),
        "eager_calls": report.eager_calls,
        "first_capture_of_the_process_s": once,
    }


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure one model one way; return its record."""
    name, way, args = request["workload"], request["variant"], argparse.Namespace(**request["options"])
    if args.device == "cpu":
        torch.set_num_threads(1)
    known = {"workload": name, "variant": way, "layers": args.layers, "hidden": args.hidden}
    return attempted(known, lambda: measure(name, way, torch.device(args.device), args.layers, args.hidden))


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the table; a failed run's row is its error."""
    rows = [
        ["model", "way", "eager ms", "calls s", "recording s", "all / eager call", "beyond, eager calls", "replay ms"]
    ]
    for r in records:
        if "error" in r:
            rows.append([r["workload"], r["variant"], f"failed: {r['error']}", *[""] * 5])
            continue
        rows.append(
            [
                r["workload"],
                r["variant"],
                number(r["eager_s"] * 1e3, 2),
                ", ".join(f"{seconds:.3f}" for seconds in r["calls_s"]),
                number(r["recording_s"], 3),
                number(r["ratio"], 0),
                number(r["beyond_eager_calls"], 0),
                number(r["replay_s"] * 1e3, 2),
            ]
        )
    return rows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Seconds of warm-up and capture against one eager call.")
    parser.add_argument("--models", type=name_list(MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help="cpu: on the tape")
    parser.add_argument("--layers", type=count, default=4, help="layers of each model (4)")
    parser.add_argument("--hidden", type=count, default=128, help="width of Hugging Face's models (128)")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a model may take (150)")
    parser.add_argument("--out", type=Path, help="folder for the report; without it nothing is written")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "WAY"), help="measure one model, print JSON")
    args = parser.parse_args(argv)
    if args.worker and (args.worker[0] not in MODELS or args.worker[1] not in WAYS):
        parser.error(f"--worker takes a model ({', '.join(MODELS)}) and a way ({', '.join(WAYS)})")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a model failed."""
    args = parse_arguments(argv)
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    begun = begin(args, "small models")
    if begun is None:
        return 2
    facts, _ = begun
    try:
        facts |= {"transformers": importlib.metadata.version("transformers")}
        names = args.models
    except importlib.metadata.PackageNotFoundError:
        names = [name for name in args.models if MODELS[name] is None]
        print("transformers is not installed: its models are left out", file=sys.stderr)
    command = command_line("warmup_cost.py", sys.argv[1:] if argv is None else argv)
    jobs: list[Job] = list(itertools.product(names, WAYS))

    def outcome(record: Record) -> str:
        return f"{record['warmup_and_capture_s']:.2f} s, {record['ratio']:.0f} eager calls"

    def sections(summary: Record) -> list[tuple[str, Rows]]:
        return [(f"{args.layers} layers", rows_of(summary["records"]))]

    return run_and_report(
        "warmup_cost",
        lambda publish: run_all("warmup_cost", jobs, args, PASSED_ON, publish, outcome),
        lambda records, facts: {"environment": facts, "command": command, "records": records},
        sections,
        lambda summary: as_page("Warm-up and capture", summary, sections(summary), "benchmarks/warmup_cost.py"),
        facts,
        args.out,
    )


if __name__ == "__main__":
    sys.exit(main())
