"""How long a training takes to end in order after SIGINT or SIGTERM: save, free graphs, leave the group, exit.

    python benchmarks/signal_exit.py                    # the recipe gpt2_small on the GPU, one rank
    python benchmarks/signal_exit.py --device cpu       # the same cut for a CPU, in fp32, on one and two gloo ranks
    python benchmarks/signal_exit.py --device cpu --places replay --ranks 2

A case is a place, a signal, an implementation and a number of ranks. Each rank is a process that trains with
`stepgraph.lab.train.pretrain` and parks at the place: before an eager iteration of the warm-up, before the capture,
before an iteration that replays, before a checkpoint is written. All ranks get the signal there and go on. What was
under way is finished first, as the training loop promises. `transformer_engine` is stopped at every place by both
signals, the other implementations by SIGTERM at a replay (`none`, which has none, at its third iteration).

- seconds: from the signal to the end of the last process, the interpreter's own end included.
- processor: the seconds of it that a processor worked for the ranks, which depends less on what else the machine does.
- exit codes: of all ranks; 130 or 143 is right.
- load: the machine's load average (1 minute) before the case.

A case must end with the right codes and a checkpoint, else it has failed. The target is 30 s. The exit status is 1 if a
case has failed or missed the target.

In bf16 a CPU without instructions for it computes about fifty times slower than in fp32, so the cut model has fp32.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from whole_step import Job, begin, command_line, name_list, run_all, run_alone, run_and_report
from whole_step_report import Record, Rows, as_page, number

from stepgraph.config.container import ConfigContainer
from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.server import attempted
from stepgraph.lab.recipes import recipe
from stepgraph.lab.recipes.fit import for_cpu
from stepgraph.lab.train import pretrain

IMPLEMENTATIONS: dict[str, tuple[str, list[str]]] = {
    "transformer_engine": ("transformer_engine", ["attn"]),
    "local": ("local", ["attn", "mlp"]),
    "full_iteration": ("local", ["full_iteration"]),
    "none": ("none", []),
}
PLACES = ("warmup", "capture", "replay", "checkpoint")
SIGNALS = ("SIGTERM", "SIGINT")
TARGET_S, END_LIMIT_S = 30.0, 90.0
"""What is wanted, and when a process that does not end is given up."""
WARMUP_STEPS, REPLAY = 2, 3
"""Eager iterations, and the iteration since the capture that counts as a replay: the first one may be the capture."""
PASSED_ON = ("device", "timeout", "settings")


# -- in a rank


def configuration(device: str, ranks: int) -> ConfigContainer:
    """The recipe, cut on a CPU; one microbatch of one sequence for each of two, on each rank."""
    cfg = recipe("gpt2_small")
    if device == "cpu":
        cfg = for_cpu(cfg)
        cfg.mixed_precision = "fp32"  # type: ignore[assignment]
    cfg.train.train_iters, cfg.train.micro_batch_size, cfg.train.global_batch_size = 1_000_000, 1, 2 * ranks
    cfg.model.cuda_graph_warmup_steps = WARMUP_STEPS
    cfg.checkpoint.save_interval = WARMUP_STEPS + 3
    return cfg


class Parked:
    """Waits once at a place until the folder has `go_on`; signals arrive meanwhile, and are only noted."""

    def __init__(self, folder: Path, place: str, implementation: str, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._place = "warmup" if implementation == "none" and place == "replay" else place
        self._visits_left = REPLAY if place == "replay" else 1

    def __call__(self, name: str, step: int) -> None:
        self._visits_left -= name == self._place
        if self._visits_left or name != self._place:
            return
        (self._folder / f"parked_{os.environ.get('RANK', '0')}").write_text(str(step))
        until = time.monotonic() + self._limit_s
        while not (self._folder / "go_on").exists() and time.monotonic() < until:
            time.sleep(0.005)


def train_parked(folder: Path, place: str, implementation: str, args: argparse.Namespace) -> None:
    """Train as one rank, parked at a place, until a signal ends it."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.device == "cpu":
        torch.set_num_threads(1)
    cfg = configuration(args.device, ranks).override(args.settings)
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = IMPLEMENTATIONS[implementation]
    cfg.logger.log_dir, cfg.checkpoint.save = str(folder), str(folder / "saved")
    pretrain(cfg, device=args.device, on_event=Parked(folder, place, implementation, args.timeout), quiet=True)


# -- in the process of a case


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure one case; return its record."""
    place, variant, args = request["workload"], request["variant"], argparse.Namespace(**request["options"])
    return attempted({"workload": place, "variant": variant}, lambda: measure(place, variant, args))


def measure(place: str, variant: str, args: argparse.Namespace) -> Record:
    """Start the ranks of a case, send them the signal where they are parked, and wait for their ends."""
    implementation, name, ranks = variant.split(", ")[:3]
    number_of, count = signal.Signals[name], int(ranks.split()[0])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        processes, store = start_ranks(folder, place, implementation, count, args)
        try:
            for rank, process in enumerate(processes):
                wait_for(folder / f"parked_{rank}", process, folder / f"stderr_{rank}", args.timeout)
            step = int((folder / "parked_0").read_text())
            begun, used = time.perf_counter(), [processor_seconds(process.pid) for process in processes]
            for process in processes:
                process.send_signal(number_of)
            (folder / "go_on").touch()
            codes = [process.wait(END_LIMIT_S) for process in processes]
            seconds = time.perf_counter() - begun
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            del store
        saved = sorted(path.parent.name for path in (folder / "saved").glob("step_*/manifest.json"))
        if set(codes) != {128 + number_of} or not saved:
            raise RuntimeError(f"exit codes {codes}, saved {saved or 'nothing'}: {tail(folder / 'stderr_0')}")
    processor_s = ended.ru_utime + ended.ru_stime - sum(used)
    return {
        "seconds": seconds,
        "processor_s": processor_s,
        "codes": codes,
        "parked_at_step": step,
        "saved": saved[-1],
        "load": load,
    }


def start_ranks(
    folder: Path, place: str, implementation: str, ranks: int, args: argparse.Namespace
) -> tuple[list[subprocess.Popen[bytes]], Any]:
    """Start a process for each rank; return them, and the store over which they find each other."""
    words = ["--rank", str(folder), place, implementation, "--device", args.device, "--timeout", str(args.timeout)]
    command = [sys.executable, __file__, *words, *args.settings]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    processes = []
    for rank in range(ranks):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        if store is not None:
            group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        with (folder / f"stderr_{rank}").open("wb") as log:
            environment = os.environ | (group if ranks > 1 else {})
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return processes, store


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
    """Wait until a rank is parked."""
    until = time.monotonic() + limit_s
    while not path.exists():
        if process.poll() is not None:
            raise RuntimeError(f"a rank ended with {process.returncode} before it was parked: {tail(log)}")
        if time.monotonic() > until:
            raise RuntimeError(f"a rank was not parked within {limit_s:.0f} s: {tail(log)}")
        time.sleep(0.02)


def processor_seconds(pid: int) -> float:
    """The time that a processor has worked for a living process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def tail(log: Path) -> str:
    """The last line of what a rank wrote."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


# -- the report


def plan(args: argparse.Namespace) -> list[Job]:
    """Every place and signal with `transformer_engine`, the other implementations by SIGTERM at a replay."""
    jobs: list[Job] = []
    for ranks in args.ranks:
        for implementation in args.implementations:
            is_first = implementation == "transformer_engine"
            for place in args.places:
                signals = [name for name in args.signals if is_first or (place == "replay" and name == "SIGTERM")]
                jobs += [(place, f"{implementation}, {name}, {ranks} rank{'s' * (ranks > 1)}") for name in signals]
    return jobs


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the table; a failed case's row is its error."""
    rows = [["parked at", "implementation, signal, ranks", "seconds", "processor", "exit codes", "saved", "load"]]
    for r in records:
        if "error" in r:
            rows.append([r["workload"], r["variant"], f"failed: {r['error']}", *[""] * 4])
            continue
        codes = ", ".join(map(str, r["codes"]))
        place = f"{r['workload']}, step {r['parked_at_step']}"
        times = [number(r["seconds"], 2), number(r["processor_s"], 2)]
        rows.append([place, r["variant"], *times, codes, r["saved"], number(r["load"], 1)])
    return rows


def summary_of(records: list[Record], facts: Record, command: str) -> Record:
    """What is written: the machine, the command, the longest case against the target, and every record."""
    seconds = [r["seconds"] for r in records if "error" not in r]
    is_reached = len(seconds) == len(records) and max(seconds, default=TARGET_S) < TARGET_S
    target = {"limit_s": TARGET_S, "longest_s": max(seconds, default=None), "reached": is_reached}
    return {"environment": facts, "command": command, "target": target, "records": records}


def tables_of(summary: Record) -> list[tuple[str, Rows]]:
    """The cases, and the target."""
    target = summary["target"]
    reached = [["target", "longest case", "reached"]]
    longest = "none ended" if target["longest_s"] is None else f"{target['longest_s']:.2f} s"
    reached.append([f"exit 130 or 143 within {TARGET_S:.0f} s", longest, "yes" if target["reached"] else "no"])
    return [("Target", reached), ("From the signal to the end", rows_of(summary["records"]))]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Seconds from a signal to the end of a training.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help="cpu: a cut model on the tape")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], help="1 on a GPU, else 1,2")
    parser.add_argument("--places", type=name_list(PLACES), default=list(PLACES), help=", ".join(PLACES))
    parser.add_argument("--signals", type=name_list(SIGNALS), default=list(SIGNALS), help=", ".join(SIGNALS))
    names = list(IMPLEMENTATIONS)
    parser.add_argument("--implementations", type=name_list(names), default=names, help=", ".join(names))
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that a case may take (180)")
    parser.add_argument("--out", type=Path, help="folder for the report; without it nothing is written on a CPU")
    parser.add_argument("--worker", nargs=2, metavar=("PLACE", "CASE"), help="measure one case, print JSON")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="SECTION.FIELD=VALUE", help="settings over the recipe")
    args = parser.parse_args(argv)
    args.ranks = args.ranks or ([1] if args.device == "cuda" else [1, 2])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; return 1 if one failed or was too slow."""
    args = parse_arguments(argv)
    if args.rank:
        train_parked(Path(args.rank[0]), args.rank[1], args.rank[2], args)
        return 0
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    begun = begin(args, "gpt2_small, cut for a CPU, in fp32,")
    if begun is None:
        return 2
    facts, folder = begun
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    facts |= {"load average at the start (1, 5, 15 minutes)": loads}
    command = command_line("signal_exit.py", sys.argv[1:] if argv is None else argv)
    seen: list[Record] = []

    def summarised(records: list[Record], facts: Record) -> Record:
        seen[:] = [summary_of(records, facts, command)]
        return seen[0]

    code = run_and_report(
        "signal_exit",
        lambda publish: run_all("signal_exit", plan(args), args, PASSED_ON, publish, outcome),
        summarised,
        tables_of,
        lambda summary: as_page("The end after a signal", summary, tables_of(summary), "benchmarks/signal_exit.py"),
        facts,
        folder,
    )
    return code if seen[0]["target"]["reached"] else 1


def outcome(record: Record) -> str:
    """How a case went, in a few words."""
    return f"{record['seconds']:.2f} s, exit {', '.join(map(str, record['codes']))}"


if __name__ == "__main__":
    sys.exit(main())
