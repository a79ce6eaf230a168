"""What a replay costs the host: stepgraph against a bare input copy and `replay()` of the very same graph.

    python benchmarks/host_cost.py --build
    python benchmarks/host_cost.py --against OTHER_CHECKOUT

A chain of small linear layers with 150 and with 1,000 parameters, fused AdamW inside the graph. All ways replay one
and the same graph, in turn, so that the difference is stepgraph's own work: looking the call up, asking the guards,
copying the result. The guards are asked in C++ where that library was built (`--build` builds it first), and in Python.
The queue is drained before each call. Each turn gives a median; of many short turns the lowest median counts, for each
way, because other work on the machine slows whole turns down by a factor of two and more. The parts are timed on their
own as well.

`--against` compares this checkout with another one by public names only: the host time of one replay of a whole step,
of a module's forward and backward, and of an ahead-of-time callable's. Each checkout has a process of its own; the two
take short turns, so that both see the machine in the same mood, and the ratio is the median over all pairs of turns.
That is done with several pairs of processes, because where a process finds its memory is a matter of luck, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
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
ROUNDS = 5
"""How many pairs of processes `--against` starts."""
PAIR_TURNS = 100
"""How many turns each process of a pair gets."""


def median_us(call: Callable[[], Any], calls: int, *, drained: bool = False) -> float:
    """Median host time of a call in microseconds."""
    times = []
    for index in range(calls + 20):
        if drained and torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if index >= 20:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def rows_of(call: Any) -> dict[str, Callable[[], bool]]:
    """What is asked before a replay, in each way there is."""
    from stepgraph.native import library, row

    rows = {}
    for way in ("python", "cpp") if library.native_row() is not None else ("python",):
        row.native_row = library.native_row if way == "cpp" else lambda: None
        written = row.GuardRow()
        call._expect(written)
        rows[way] = written.question()
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
        recorded = call.parts.chain.links[0].graph
        graph = recorded._graph  # torch's own
        leaves, fast_match = [x], step._last.fast_match

        def bare() -> None:
            static.copy_(x)
            graph.replay()

        rows = rows_of(call)
        turns: dict[str, list[float]] = {"bare": [], **{way: [] for way in rows}}
        for _ in range(TURNS):  # in turn, so that all see the machine in the same mood
            turns["bare"].append(median_us(bare, calls, drained=True))
            for way, call._fast.holds in rows.items():
                turns[way].append(median_us(lambda: step(x), calls, drained=True))
        parts = {
            "arguments": lambda: fast_match.leaves_of((x,), {}),
            "flags of the process": step._ambient.read,
            "modes, gradients and their flags": call.start.fits,
            **{type(guard).__name__: guard.changed for guard in call.guards.guards},
            **{f"all guards, {way}": row for way, row in rows.items()},
            "copy in": lambda: call.parts.inputs.load(leaves),
            "copy out": call.hand_out,
        }
        return {
            "parameters": num_parameters,
            "nodes": recorded.nodes,
            "bare_us": min(turns["bare"]),
            "added_us": {way: min(turns[way]) - min(turns["bare"]) for way in rows},
            "median_turn_us": {way: statistics.median(times) for way, times in turns.items()},
            "parts_us": {name: median_us(part, calls) for name, part in parts.items()},
            "watched_values": len(call.labels),
        }


def small_layers(count: int, device: str) -> torch.nn.Sequential:
    """A chain of linear layers, two parameters each."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(count))).to(device)


def replay_ways(device: str) -> dict[str, Callable[[], Any]]:
    """One replay through each engine, by public names only, warmed up."""
    x = torch.randn(4, 16, device=device)
    model = small_layers(75, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    @stepgraph.capture
    def whole_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    part = small_layers(4, device)
    handle = stepgraph.graph_modules(torch.nn.Sequential(part), scope=["0"])
    callable_ = stepgraph.make_graphed_callables(small_layers(4, device), (x.clone().requires_grad_(),))
    argument = x.clone().requires_grad_()
    ways: dict[str, Callable[[], Any]] = {
        "whole step": lambda: whole_step(x),
        "module pair": lambda: part(argument).sum().backward(),
        "callable pair": lambda: callable_(argument).sum().backward(),
    }
    for call in ways.values():
        for _ in range(8):
            call()
    counts = (whole_step.report().replays, handle.report().replays)
    assert all(counts), "nothing was replayed"
    ways["handle"] = handle.report  # keeps it alive
    return ways


def take_turns() -> None:
    """In a process of `--against`: one turn for each line that comes in, its times as a line that goes out."""
    ways = replay_ways("cuda" if torch.cuda.is_available() else "cpu")
    ways.pop("handle")
    print(stepgraph.__file__, flush=True)
    for line in sys.stdin:
        calls = int(line)
        print(json.dumps({name: median_us(call, calls, drained=True) for name, call in ways.items()}), flush=True)


def against(other: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Let two checkouts take turns; the median ratio of their host times in each pair of processes."""
    trees = {"before": other.resolve(), "now": Path(__file__).resolve().parents[1]}
    pairs = []
    for _ in range(args.rounds):
        workers = {tree: _worker(path) for tree, path in trees.items()}
        times: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
        for turn in range(args.turns):
            for tree in reversed(workers) if turn % 2 else workers:
                times[tree].append(_turn(workers[tree], args.calls))
        for worker in workers.values():
            worker.communicate()
        pairs.append(times)
    ratios = {
        name: [
            statistics.median(now[name] / before[name] for before, now in zip(t["before"], t["now"], strict=True))
            for t in pairs
        ]
        for name in pairs[0]["now"][0]
    }
    medians = {
        tree: {name: statistics.median(turn[name] for t in pairs for turn in t[tree]) for name in ratios}
        for tree in trees
    }
    return {
        "ratios": {name: statistics.median(found) for name, found in ratios.items()},
        "ratios_of_pairs": ratios,
        "median_us": medians,
    }


def _worker(tree: Path) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, __file__, "--replays"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert Path(worker.stdout.readline().strip()).is_relative_to(tree), f"{tree} was not imported"
    return worker


def _turn(worker: subprocess.Popen[str], calls: int) -> dict[str, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{calls}\n")
    worker.stdin.flush()
    times: dict[str, float] = json.loads(worker.stdout.readline())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="calls a turn")
    parser.add_argument("--build", action="store_true", help="build the part in C++ first")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with another checkout, in turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pairs of processes, of `--against`")
    parser.add_argument("--turns", type=int, default=PAIR_TURNS, help="turns a process, of `--against`")
    parser.add_argument("--replays", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.replays:
        take_turns()
        return
    record = against(args.against, args) if args.against is not None else compare_with_bare(args)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {"gpu": device, "torch": torch.__version__, "python": platform.python_version()}
    command = "python benchmarks/host_cost.py" + " --build" * args.build
    command += " --against CHECKOUT" * (args.against is not None)
    record = {"date": datetime.date.today().isoformat(), **versions, "command": command, **record}
    text = json.dumps(record, indent=2)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        name = "host_cost.json" if args.against is None else "host_cost_against.json"
        (args.out / name).write_text(text + "\n")


def compare_with_bare(args: argparse.Namespace) -> dict[str, Any]:
    """What stepgraph adds to a bare copy and replay, beside the target."""
    if args.build:
        from stepgraph.native import library

        library.build()
    results = [measure(count, args.calls) for count in (150, 1000)]
    added = results[0]["added_us"]
    scaled = {way: us * REFERENCE_US / results[0]["bare_us"] for way, us in added.items()}
    return {
        "results": results,
        "target": {
            "added_us_at_150": TARGET_US,
            "where_bare_us": REFERENCE_US,
            "added_us_scaled": scaled,
            "reached": {way: us < TARGET_US and scaled[way] < TARGET_US for way, us in added.items()},
        },
    }


if __name__ == "__main__":
    main()
