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
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from whole_step import (
    Job,
    command_line,
    count,
    machine_facts,
    run_all,
    run_alone,
    run_and_report,
    show,
    write_report,
)
from whole_step_report import Record, Rows, as_page, number

import stepgraph
from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.server import attempted
from stepgraph.tools.measure import host_ms

PARAMETERS = ("150", "1000")
PASSED_ON = ("calls",)
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
    device = torch.device("cuda" if drained and torch.cuda.is_available() else "cpu")
    times = [host_ms(call, device) for _ in range(calls + 20)][20:]
    return statistics.median(times) * 1e3


def guard_rows(call: Any) -> dict[str, Callable[[], bool]]:
    """What is asked before a replay, in each way there is."""
    from stepgraph.engine.backends.native import library, row

    rows = {}
    for way in ("python", "cpp") if library.native_row() is not None else ("python",):
        row.native_row = library.native_row if way == "cpp" else lambda: None
        written = row.GuardRow()
        call._expect(written)
        rows[way] = written.question()
        assert rows[way]()
    return rows


def measure(num_parameters: int, calls: int) -> Record:
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

        rows = guard_rows(call)
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


def against(other: Path, args: argparse.Namespace) -> Record:
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
        [sys.executable, str(Path(__file__).with_name("host_cost_replays.py"))],
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


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure one model; return its record."""
    count, options = int(request["variant"]), request["options"]
    known = {"workload": request["workload"], "variant": request["variant"], "gpu": torch.cuda.get_device_name()}
    return attempted(known, lambda: measure(count, options["calls"]))


def target_of(records: Sequence[Record]) -> Record:
    """What stepgraph adds to a bare copy and replay at 150 parameters, beside the target."""
    first = next((r for r in records if r["variant"] == PARAMETERS[0] and "error" not in r), None)
    wanted = {"added_us_at_150": TARGET_US, "where_bare_us": REFERENCE_US}
    if first is None:
        return wanted | {"added_us_scaled": {}, "reached": {}}
    scaled = {way: us * REFERENCE_US / first["bare_us"] for way, us in first["added_us"].items()}
    reached = {way: us < TARGET_US and scaled[way] < TARGET_US for way, us in first["added_us"].items()}
    return wanted | {"added_us_scaled": scaled, "reached": reached}


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the table; a failed model's row is its error."""
    rows = [["parameters", "guards", "bare us", "added us", "median turn us", "watched values"]]
    for r in records:
        if "error" in r:
            rows.append([r["variant"], f"failed: {r['error']}", *[""] * 4])
            continue
        for way, added in r["added_us"].items():
            figures = [number(us, 1) for us in (r["bare_us"], added, r["median_turn_us"][way])]
            rows.append([r["variant"], way, *figures, str(r["watched_values"])])
    return rows


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """The figures, and the target for each way to ask the guards."""
    target = summary["target"]
    rows = [["guards", "added us, scaled", "reached"]]
    rows += [[way, number(us, 1), str(target["reached"][way])] for way, us in target["added_us_scaled"].items()]
    title = f"Target: under {TARGET_US:.0f} us at 150 parameters where the bare replay takes {REFERENCE_US:.0f} us"
    return [("One replay", rows_of(summary["records"])), (title, rows)]


def sections_against(summary: Record) -> list[tuple[str, Rows]]:
    """One row for each engine."""
    rows = [["engine", "now / before", "of each pair of processes", "before us", "now us"]]
    for name, ratio in summary["ratios"].items():
        pairs = ", ".join(f"{one:.3f}" for one in summary["ratios_of_pairs"][name])
        medians = [number(summary["median_us"][tree][name], 1) for tree in ("before", "now")]
        rows.append([name, f"{ratio:.3f}", pairs, *medians])
    return [("Host time of one replay", rows)]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description="What a replay costs the host.")
    parser.add_argument("--calls", type=count, default=60, help="calls a turn (60)")
    parser.add_argument("--build", action="store_true", help="build the part in C++ first")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with another checkout, in turn")
    parser.add_argument("--rounds", type=count, default=ROUNDS, help=f"pairs of processes, of `--against` ({ROUNDS})")
    parser.add_argument("--turns", type=count, default=PAIR_TURNS, help=f"turns a process, of it ({PAIR_TURNS})")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a model may take (300)")
    parser.add_argument("--out", type=Path, help="folder for the report; without it nothing is written")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "PARAMETERS"), help="measure one model, print JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a model failed."""
    args = parse_arguments(argv)
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    command = command_line("host_cost.py", sys.argv[1:] if argv is None else argv, ("--out", "--against"))
    facts = machine_facts()
    if args.against is not None:
        summary = {"environment": facts, "command": command, **against(args.against, args)}
        tables = sections_against(summary)
        page = as_page("Host cost, against another checkout", summary, tables, "benchmarks/host_cost.py")
        if args.out is not None:
            write_report(args.out, "host_cost_against", summary, page)
        show(tables, page)
        return 0
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch finds none here. --against runs on a CPU.", file=sys.stderr)
        return 2
    if args.build:
        from stepgraph.engine.backends.native import library

        library.build()
    jobs: list[Job] = [("linear layers", count) for count in PARAMETERS]
    return run_and_report(
        "host_cost",
        lambda publish: run_all("host_cost", jobs, args, PASSED_ON, publish, outcome),
        lambda records, facts: {
            "environment": facts,
            "command": command,
            "target": target_of(records),
            "records": records,
        },
        sections,
        lambda summary: as_page("Host cost", summary, sections(summary), "benchmarks/host_cost.py"),
        facts,
        args.out,
    )


def outcome(record: Record) -> str:
    """How it went, in a few words."""
    return ", ".join(f"{way} {us:.0f} us" for way, us in record["added_us"].items())


if __name__ == "__main__":
    sys.exit(main())
