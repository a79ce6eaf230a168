"""The training loop against a captured step of the same model, in one run.

    python benchmarks/train_loop.py                 # gpt2_small, full size, on the GPU
    python benchmarks/train_loop.py --device cpu    # the same cut for a CPU: does it run at all?

Every row trains `gpt2_small` (124 million parameters, sequence 1,024, four microbatches of one sequence, AdamW, no
clipping) from the same seed:

- capture: `stepgraph.capture` of a plain step, written as in whole_step.py, without a loop around it.
- loop: `stepgraph.lab.train.pretrain` with `local` and `full_iteration`: data, schedule, journal, NaN flag around it.
- loop, transformer_engine attn: the recipe's own setting.
- loop, eager: no graphs.

step ms of the loop is the median of its journal's rows after the capture. The target is loop / capture within 3 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from whole_step import begin, command_line
from whole_step_report import Record, as_page, number
from whole_step_variants import MICROBATCHES, fused_adamw, plain_step, time_block

import stepgraph
from stepgraph.config.container import ConfigContainer
from stepgraph.lab.recipes import recipe
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.recipes.fit import for_cpu
from stepgraph.lab.train import pretrain

LIMIT = 1.03
ROWS: dict[str, tuple[str, list[str]]] = {
    "loop": ("local", ["full_iteration"]),
    "loop, transformer_engine attn": ("transformer_engine", ["attn"]),
    "loop, eager": ("none", []),
}


def configuration(device: str, iterations: int) -> ConfigContainer:
    """The recipe with the batch of whole_step.py, without clipping."""
    cfg = recipe("gpt2_small")
    if device == "cpu":  # in fp32: without instructions for it bf16 takes about fifty times as long
        cfg = for_cpu(cfg)
        cfg.mixed_precision = "fp32"  # type: ignore[assignment]
    cfg.train.train_iters, cfg.train.micro_batch_size, cfg.train.global_batch_size = iterations, 1, MICROBATCHES
    cfg.optimizer.clip_grad = 0.0
    return cfg


def of_capture(device: str, steps: int) -> float:
    """Milliseconds of a captured step without a loop."""
    cfg = configuration(device, steps)
    torch.manual_seed(0)
    with torch.device(device):
        model = build_model(cfg.model)
    model = model.to(torch.bfloat16 if cfg.mixed_precision.bf16 else torch.float32)
    generator = torch.Generator(device).manual_seed(7)
    shape = (MICROBATCHES, 1, cfg.model.seq_length + 1)
    tokens = torch.randint(cfg.model.vocab_size, shape, device=device, generator=generator)
    batch = (tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())
    optimizer = fused_adamw(model) if device == "cuda" else torch.optim.AdamW(model.parameters(), lr=1e-4)
    with stepgraph.capture(plain_step(model, optimizer)) as step:
        for _ in range(8):
            step(*batch)
        times, _ = time_block(lambda: step(*batch), steps, torch.device(device))
    return statistics.median(times)


def of_loop(device: str, steps: int, impl: str, scope: list[str]) -> Record:
    """What a run of the loop reports, and the median of its step times."""
    cfg = configuration(device, steps + 12)
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = impl, scope
    with tempfile.TemporaryDirectory() as folder:
        cfg.logger.log_dir = folder
        report = pretrain(cfg, device=device, quiet=True)
        lines = [line for file in Path(folder).rglob("*.jsonl") for line in file.read_text().splitlines()]
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    times = [row["step_ms"] for row in rows if "step_ms" in row][12:]
    return {"step_ms": statistics.median(times), "replays": report.replays, "last_loss": report.final_loss}


def measure(device: str, steps: int) -> Record:
    """All rows, the captured step first and last."""
    first = of_capture(device, steps)
    loops = {name: of_loop(device, steps, *setting) for name, setting in ROWS.items()}
    again = of_capture(device, steps)
    bare = min(first, again)
    return {
        "capture": {"step_ms": first, "again_ms": again},
        **loops,
        "ratio": loops["loop"]["step_ms"] / bare if bare else None,
    }


def markdown(summary: Record) -> str:
    """Render the report."""
    figures = summary["figures"]
    rows = [["row", "step ms", "replays", "last loss"]]
    rows.append(
        ["capture", f"{number(figures['capture']['step_ms'], 2)}, {number(figures['capture']['again_ms'], 2)}", "", ""]
    )
    for name in ROWS:
        row = figures[name]
        rows.append([name, number(row["step_ms"], 2), str(row["replays"]), f"{row['last_loss']:.6f}"])
    ratio = figures["ratio"]
    rows.append(["loop / capture", "" if ratio is None else f"{ratio:.4f} (at most {LIMIT})", "", ""])
    return as_page("The training loop", summary, [("One run", rows)], "benchmarks/train_loop.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Step time of the training loop and of a captured step.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help="cpu: a cut model on the tape")
    parser.add_argument("--steps", type=int, default=30, help="timed steps a row (30)")
    parser.add_argument("--out", type=Path, help="folder for the report; without it nothing is written")
    args = parser.parse_args(argv)
    begun = begin(args, "gpt2_small, cut for a CPU,")
    if begun is None:
        return 2
    facts, _ = begun
    figures = measure(args.device, args.steps)
    command = command_line("train_loop.py", sys.argv[1:])
    summary = {"environment": facts, "command": command, "figures": figures}
    print(markdown(summary))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "train_loop.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
        (args.out / "train_loop.md").write_text(markdown(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
