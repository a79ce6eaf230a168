"""What a replay costs the host: stepgraph against a bare input copy and `replay()` of the very same graph.

    python benchmarks/host_cost.py --build

A chain of small linear layers with 150 and with 1,000 parameters, fused AdamW inside the graph. All ways replay one
and the same graph, in turn, so that the difference is stepgraph's own work: looking the call up, asking the guards,
copying the result. The guards are asked in C++ where that library was built (`--build` builds it first), and in Python.
The queue is drained before each call. Each turn gives a median; of many short turns the lowest median counts, for each
way, because other work on the machine slows whole turns down by a factor of two and more. The parts are timed on their
own as well.
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
from stepgraph.capture.site import CapturedCall
from stepgraph.native import library
from stepgraph.state import untouched

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


def rows_of(call: CapturedCall) -> dict[str, Callable[[], bool]]:
    """What is asked before a replay, in each way there is."""
    rows = {}
    for way in ("python", "cpp") if library.native_row() is not None else ("python",):
        untouched.native_row = library.native_row if way == "cpp" else lambda: None
        rows[way] = call._expectations()
        assert rows[way]()
    return rows


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

        rows = rows_of(call)
        turns: dict[str, list[float]] = {"bare": [], **{way: [] for way in rows}}
        for _ in range(TURNS):  # in turn, so that all see the machine in the same mood
            turns["bare"].append(median_us(bare, calls, drained=True))
            for way, call._row in rows.items():
                turns[way].append(median_us(lambda: step(x), calls, drained=True))
        parts = {
            "arguments": lambda: likeness.leaves_of((x,), {}),
            "flags of the process": step._ambient.read,
            "gradients and their flags": call._steady.hold,
            "model": lambda: call.guards.model.changed(flags_seen=True),
            "optimizer numbers": call.guards.numbers[0].changed,
            "host values": call.guards.values.changed,
            **{f"all guards, {way}": row for way, row in rows.items()},
            "copy in": lambda: call.inputs.load(leaves),
            "copy out": call.outputs.copies,
        }
        return {
            "parameters": num_parameters,
            "nodes": recorded.nodes,
            "bare_us": min(turns["bare"]),
            "added_us": {way: min(turns[way]) - min(turns["bare"]) for way in rows},
            "median_turn_us": {way: statistics.median(times) for way, times in turns.items()},
            "parts_us": {name: median_us(part, calls) for name, part in parts.items()},
            "watched_values": len(call.guards.values),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="calls a turn")
    parser.add_argument("--build", action="store_true", help="build the part in C++ first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.build:
        library.build()
    results = [measure(count, args.calls) for count in (150, 1000)]
    added = results[0]["added_us"]
    scaled = {way: us * REFERENCE_US / results[0]["bare_us"] for way, us in added.items()}
    record = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/host_cost.py" + " --build" * args.build,
        "results": results,
        "target": {
            "added_us_at_150": TARGET_US,
            "where_bare_us": REFERENCE_US,
            "added_us_scaled": scaled,
            "reached": {way: us < TARGET_US and scaled[way] < TARGET_US for way, us in added.items()},
        },
    }
    text = json.dumps(record, indent=2)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "host_cost.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
