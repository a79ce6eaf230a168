"""What a replay costs the host: stepgraph against a bare input copy and `replay()` of the very same graph.

    python benchmarks/host_cost.py

A chain of small linear layers with 150 and with 1,000 parameters, fused AdamW inside the graph. Both ways replay one
and the same graph, in turn, so that the difference is stepgraph's own work: looking the call up, asking the guards,
copying the result. The queue is drained before each call. Each turn gives a median; of many short turns the lowest
median counts, for both ways, because other work on the machine slows whole turns down by a factor of two and more. The
parts are timed on their own as well.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stepgraph

TARGET_US = 60.0
"""The most that stepgraph may add at 150 parameters."""
REFERENCE_US = 14.0
"""What the bare copy and replay take on the machine that the target was set for."""
TURNS = 40


def median_us(call: Callable[[], Any], calls: int, *, drained: bool = False) -> float:
    """Median host time of a call in microseconds."""
    times = []
    for index in range(calls + 20):
        if drained:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if index >= 20:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(num_parameters: int, calls: int) -> dict[str, Any]:
    """Time one model's captured step, its bare graph, and the parts of the difference."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(num_parameters // 2))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(4, 16, device="cuda")
    static = x.clone()
    with stepgraph.capture(train_step) as step:
        for _ in range(6):
            step(x)
        (site,) = step._sites.values()
        (call,) = site.calls
        recorded = call.chain.links[0].graph
        graph = recorded._graph  # torch's own
        leaves, likeness = [x], step._last.likeness

        def bare() -> None:
            static.copy_(x)
            graph.replay()

        ours, base = [], []
        for _ in range(TURNS):  # in turn, so that both see the machine in the same mood
            base.append(median_us(bare, calls, drained=True))
            ours.append(median_us(lambda: step(x), calls, drained=True))
        parts = {
            "arguments": lambda: likeness.leaves_of((x,), {}),
            "flags of the process": step._ambient.read,
            "gradients and their flags": call._steady.hold,
            "model": lambda: call.guards.model.changed(flags_seen=True),
            "optimizer numbers": call.guards.numbers[0].changed,
            "host values": call.guards.values.changed,
            "all guards": call.is_untouched,
            "copy in": lambda: call.inputs.load(leaves),
            "copy out": call.outputs.copies,
        }
        return {
            "parameters": num_parameters,
            "nodes": recorded.nodes,
            "bare_us": min(base),
            "ours_us": min(ours),
            "added_us": min(ours) - min(base),
            "median_turn_us": {"bare": statistics.median(base), "stepgraph": statistics.median(ours)},
            "parts_us": {name: median_us(part, calls) for name, part in parts.items()},
            "watched_values": len(call.guards.values),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="calls a turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [measure(count, args.calls) for count in (150, 1000)]
    scaled = results[0]["added_us"] * REFERENCE_US / results[0]["bare_us"]
    record = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/host_cost.py",
        "results": results,
        "target": {
            "added_us_at_150": TARGET_US,
            "where_bare_us": REFERENCE_US,
            "added_us_scaled": scaled,
            "reached": results[0]["added_us"] < TARGET_US,
        },
    }
    text = json.dumps(record, indent=2)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "host_cost.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
