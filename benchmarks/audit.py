"""What audits cost: the log of a call's operations, one audit, and all audits of a long training.

    python benchmarks/audit.py                 # GPT-2-small, the workload of whole_step.py, on the GPU
    python benchmarks/audit.py --device cpu    # a tiny GPT on the tape

An audit records the call once more, which has no effect, compares its operations with those of the graph, and replays.
All figures are from one process. What they are:

- log: microseconds that the log adds to an eager call, for each operation.
- audit: seconds of a call with an audit (`audit=1`) less those of a replay, the median of several.
- share: what the audits of `audit="auto"` add to 100,000 replays, in percent. The target is 0.5.
- memory: bytes reserved at their peak in warm-up, after the capture, and after the audits; and one set of gradients,
  which is what audits may add to the peak of warm-up.
- host: host time of a replay with `audit="auto"`, between two audits, over one with `audit=False`. The two take short
  turns; the median of the ratios counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from whole_step import begin, command_line
from whole_step_report import Record, as_page, number
from whole_step_variants import build_batches, build_model, fused_adamw, plain_step

import stepgraph
from stepgraph.engine.call.proof import next_audit
from stepgraph.engine.oplog import OpLog, Vocabulary
from stepgraph.tools.measure import wall_ms

STEPS = 100_000
TARGET_PERCENT = 0.5
CALLS, TURNS = 20, 60


def tiny_training() -> tuple[torch.nn.Module, Callable[..., Any], tuple[torch.Tensor, ...]]:
    """A GPT of four layers on the CPU."""
    from stepgraph.lab.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(GPTConfig.tiny())
    tokens = torch.randint(GPTConfig.tiny().vocab_size, (4, 2, GPTConfig.tiny().max_seq_len))
    return model, plain_step(model, fused_adamw(model)), (tokens, tokens)


def training(device: str) -> tuple[torch.nn.Module, Callable[..., Any], tuple[torch.Tensor, ...]]:
    """The model, its step and a batch."""
    if device == "cpu":
        return tiny_training()
    model = build_model(12)
    return model, plain_step(model, fused_adamw(model)), build_batches("gpt2-small", 1)[0]


def drain(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str, calls: int) -> float:
    """The median time of a call, the device idle before and after."""
    return statistics.median(wall_ms(call, torch.device(device)) for _ in range(calls)) / 1e3


def peak(device: str) -> int | None:
    """The peak of reserved bytes since the last look."""
    if device == "cpu":
        return None
    found = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return found


def num_audits(steps: int) -> int:
    """How many audits `audit="auto"` makes in so many replays."""
    count, due = 0, next_audit("auto", 0)
    while due < steps:
        count, due = count + 1, next_audit("auto", due)
    return count


def host_ratio(one: Callable[[], Any], other: Callable[[], Any], device: str) -> float:
    """Host time of one call over that of another, in turns."""
    ratios = []
    for _ in range(TURNS):
        times = []
        for call in (one, other):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append(time.perf_counter() - start)
            drain(device)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def measure(device: str) -> Record:
    """All figures, in the order in which memory is looked at."""
    model, step, batch = training(device)
    peak(device)
    vocabulary = Vocabulary()

    def logged() -> int:
        with OpLog(vocabulary, batch) as log:
            step(*batch)
        return len(log.finish())

    for _ in range(3):
        step(*batch)
    eager_s, operations = seconds(lambda: step(*batch), device, 5), logged()
    log_s = seconds(logged, device, 5)
    peak(device)
    audited = stepgraph.capture(step, audit=1)
    for _ in range(3):
        audited(*batch)
    memory = {"warm-up": peak(device)}
    audited(*batch)
    memory["capture"] = peak(device)
    audit_s = seconds(lambda: audited(*batch), device, 7)
    memory["audits"] = peak(device)
    memory["one set of gradients"] = sum(p.numel() * p.element_size() for p in model.parameters())
    audits_seen = audited.report().audits
    audited.close()
    auto, never = stepgraph.capture(step), stepgraph.capture(step, audit=False)
    for captured in (auto, never):
        for _ in range(70):  # past the audit at replay 64: none in the turns that follow up to 128, one later
            captured(*batch)
    replay_s = seconds(lambda: never(*batch), device, 20)
    ratio = host_ratio(lambda: auto(*batch), lambda: never(*batch), device)
    count = num_audits(STEPS)
    return {
        "operations": operations,
        "eager_ms": eager_s * 1e3,
        "log_us_per_operation": (log_s - eager_s) / operations * 1e6,
        "replay_ms": replay_s * 1e3,
        "audit_s": audit_s - replay_s,
        "audits_seen": audits_seen,
        "audits_in_100000": count,
        "share_percent": 100 * count * (audit_s - replay_s) / (STEPS * replay_s),
        "target_percent": TARGET_PERCENT,
        "memory_bytes": memory,
        "host_ratio": ratio,
    }


def rows_of(record: Record) -> list[list[str]]:
    """The figures as a table."""
    mib = {name: "" if value is None else f"{value / 2**20:.0f} MiB" for name, value in record["memory_bytes"].items()}
    return [
        ["figure", "value"],
        ["operations", str(record["operations"])],
        ["eager, replay", f"{number(record['eager_ms'], 2)} ms, {number(record['replay_ms'], 2)} ms"],
        ["log", f"{number(record['log_us_per_operation'], 1)} us an operation"],
        ["audit", f"{number(record['audit_s'], 3)} s"],
        ["share of 100,000 replays", f"{record['share_percent']:.3f} % ({record['audits_in_100000']} audits)"],
        *([f"reserved, {name}", value] for name, value in mib.items()),
        ["host time, auto / False", number(record["host_ratio"], 3)],
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="What audits cost.")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help="cpu: a tiny model on the tape")
    parser.add_argument("--out", type=Path, help="folder for the report; without it nothing is written")
    args = parser.parse_args(argv)
    begun = begin(args, "a tiny GPT")
    if begun is None:
        return 2
    facts, _ = begun
    record = measure(args.device)
    command = command_line("audit.py", sys.argv[1:] if argv is None else argv)
    summary = {"environment": facts, "command": command, **record}
    page = as_page("Audits", summary, [("One process", rows_of(record))], "benchmarks/audit.py")
    print(page)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "audit.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
        (args.out / "audit.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
