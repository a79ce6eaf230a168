"""What `stepgraph advise` predicts against what is measured, for six trainings.

    python benchmarks/advise.py                               # all six, on the GPU; about 4 minutes on an H200
    python benchmarks/advise.py --only rl,hugging_face        # some of them
    python benchmarks/advise.py --device cpu --only rl        # does it run at all? No GPU needed, nothing is predicted

Each training is a plain script (`advise_scripts.py`), written to a temporary folder. `stepgraph advise SCRIPT --json`
runs on it as a process. Then the same script runs in a process of its own with the lines that `advise` gives to paste
above its loop. Where it says "do not", the whole step is captured: that is what it spoke of. What the columns mean:

- eager: median time of an eager step, as `advise` measured it; and as the second process did, its graphs closed.
- predicted, measured: median time of a step with graphs. Measured from CUDA events between 24 steps, with nothing in
  between. These are steps 41 to 64: audits come at replays 1, 2, 4, ..., 32 and 64, so there is none among them, and
  `audits` counts those that the report shows nevertheless.
- error: predicted less measured, in percent of measured.
- memory: the peak of torch's reserved bytes, from the beginning of the process to the last of those steps; predicted is
  eager's peak, as `advise` measured it, and the bytes it adds. Ratio: measured by eager's.
- gain: the part of an eager step that graphs save; measured within the second process.
- right: what was advised was right. "Capture" is right if the measured gain is 5 % or more, "do not" if it is less. A
  verdict that contradicts it is wrong too: launch-bound with less than 5 %, GPU-bound with 5 % or more.

The targets are 10 % for the time, 15 % for memory, and right in all. The processes that measure are forked from one
that has imported torch (`stepgraph.lab.bench.server`); only one process at a time uses the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from advise_scripts import WORKLOADS, with_lines
from whole_step import ROOT, begin, command_line, name_list, progress, run_and_report
from whole_step_report import Record, Rows, as_page, number

from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.jobs import JobServer
from stepgraph.lab.bench.server import attempted
from stepgraph.tools.advice.decide import DO_NOT, WHOLE_STEP, WORTHWHILE, Bound
from stepgraph.tools.measure import elapsed_ms, mark, peaks_of

TIME_TARGET, MEMORY_TARGET = 10.0, 15.0
"""Percent."""
SETTLE, TIMED, EAGER = 40, 24, 20
"""Steps before the timed ones, timed ones, and eager ones after them."""
MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------------
# What was advised, and whether it was right: pure


def subject_of(advice: Mapping[str, Any]) -> str:
    """Return what to capture: what was advised, or else the whole step."""
    choice = advice.get("choice")
    return WHOLE_STEP if choice in (None, DO_NOT) else str(choice)


def percent(predicted: float, measured: float) -> float:
    """Return how far a prediction is off, in percent of what was measured.

    Example:
        >>> percent(11.0, 10.0)
        10.0
    """
    return 100 * (predicted - measured) / measured


def is_right(verdict: str, choice: str, gain: float) -> bool:
    """Whether the advice fits the gain that was measured; see the head of this file.

    Example:
        >>> is_right("launch-bound", "whole step", gain=0.8)
        True
    """
    pays = gain >= WORTHWHILE
    if (choice != DO_NOT) != pays:
        return False
    return verdict != (Bound.GPU if pays else Bound.LAUNCHES).value


def judged(advice: Mapping[str, Any], found: Mapping[str, Any]) -> Record:
    """Compare the JSON of `advise` with what was measured."""
    scope = subject_of(advice)
    record: Record = {"verdict": advice["verdict"], "choice": advice["choice"], "scope": scope, **found}
    row = next((one for one in advice["predictions"] if one["scope"] == scope), None)
    if row is None:
        return record | {"cannot_judge": advice["cannot_judge"]}
    eager = advice["measured"]
    gain = 1 - found["measured_ms"] / found["eager_again_ms"]
    predicted_bytes = eager["used_bytes"] + row["extra_bytes"]
    return record | {
        "busy_fraction": eager["busy_fraction"],
        "kernels": eager["kernels"],
        "eager_ms": eager["step_ms"],
        "eager_bytes": eager["used_bytes"],
        "predicted_ms": row["step_ms"],
        "time_error": percent(row["step_ms"], found["measured_ms"]),
        "predicted_bytes": predicted_bytes,
        "memory_error": percent(predicted_bytes, found["measured_bytes"]),
        "predicted_gain": row["gain"],
        "measured_gain": gain,
        "forbidden": row["forbidden"],
        "right": is_right(advice["verdict"], advice["choice"], gain),
        "facts": advice["measured"] | {"model": advice["facts"]["model"]},
    }


def targets_of(records: Sequence[Record]) -> Record:
    """Return how many of the workloads that could be judged reached each target, as [reached, judged]."""
    known = [r for r in records if "time_error" in r]
    return {
        f"time within {TIME_TARGET:.0f} %": [sum(abs(r["time_error"]) <= TIME_TARGET for r in known), len(known)],
        f"memory within {MEMORY_TARGET:.0f} %": [
            sum(abs(r["memory_error"]) <= MEMORY_TARGET for r in known),
            len(known),
        ],
        "verdict right": [sum(r["right"] for r in known), len(known)],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Running `advise`


def advised(script: Path, device: str, timeout: float) -> Record:
    """Return the JSON of `stepgraph advise` on a script."""
    command = [sys.executable, "-m", "stepgraph", "advise", script.name, "--json", "--timeout", f"{timeout:g}"]
    if device == "cpu":
        command += ["--steps", "3"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True)
    try:
        found: Record = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(f"advise exited with {done.returncode}: {done.stderr[-2000:]}") from None
    if found.get("error"):
        raise RuntimeError(f"advise: {found['error']}")
    return found


def with_graphs(name: str, text: str, advice: Mapping[str, Any]) -> str:
    """Return a workload's script with graphs, and with the line by which its steps are measured."""
    step = WORKLOADS[name].step
    lines = advice.get("paste") or ["import stepgraph", "", f"{step} = stepgraph.capture({step})"]
    graphs = step if subject_of(advice) == WHOLE_STEP else "graphs"
    return with_lines(text, "\n".join([f"eager = {step}", *lines, f"{step} = measured({step}, eager, {graphs})"]))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring: inside a worker


class Enough(BaseException):
    """All steps were measured: the script ends here."""


class Measured:
    """Stands for the step in a script: calls it, times it, and then times the eager one."""

    def __init__(self, step: Callable[..., Any], eager: Callable[..., Any], graphs: Any, device: torch.device) -> None:
        self._step, self._eager, self._graphs, self._device = step, eager, graphs, device
        is_short = device.type == "cpu"
        self._settle, self._timed, self._after = (6, 3, 3) if is_short else (SETTLE, TIMED, EAGER)
        self._marks: list[Any] = []
        self._calls = self._audits = 0
        self.found: Record = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        self._calls += 1
        timed = self._calls - self._settle
        if timed == 1:
            self._audits = self._graphs.report().audits
        if timed == self._timed + 1:
            self._note_graphs()
            self._step = self._eager
        if timed == self._timed + 1 + 5:  # some eager ones, until caches are filled again
            self._marks.clear()
        if timed > 0:
            self._marks.append(mark(self._device))
        if timed == self._timed + 1 + 5 + self._after:
            self.found["eager_again_ms"] = self._median()
            raise Enough
        return self._step(*args, **kwargs)

    def _note_graphs(self) -> None:
        """After the last timed step: times, memory and the report; then free the graphs."""
        self._marks.append(mark(self._device))
        self.found["measured_ms"] = self._median()
        peaks = peaks_of(self._device)
        self.found |= {"measured_bytes": peaks.reserved, "measured_allocated_bytes": peaks.allocated}
        report = self._graphs.report()
        self.found["audits"] = report.audits - self._audits
        told = report.to_dict()
        kept = ("verdict", "replays", "eager_reasons", "segments", "nodes", "optimizers", "pool_bytes", "static_bytes")
        self.found["report"] = {name: told[name] for name in (*kept, "recapture_reasons", "guards") if name in told}
        self._graphs.close()
        self._marks.clear()

    def _median(self) -> float:
        return statistics.median(elapsed_ms(self._marks, self._device))


def measure(script: Path, device: torch.device) -> Record:
    """Run a script that calls `measured`; return what was measured."""
    begun: list[Measured] = []

    def measured(step: Callable[..., Any], eager: Callable[..., Any], graphs: Any) -> Measured:
        begun.append(Measured(step, eager, graphs, device))
        return begun[-1]

    with contextlib.suppress(Enough):
        runpy.run_path(str(script), {"measured": measured}, run_name="__main__")
    return begun[-1].found


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure one script; return its record."""
    device = torch.device(request["device"])
    if device.type == "cpu":
        torch.set_num_threads(1)
    known = {"workload": request["workload"], "variant": "graphs"}
    return attempted(known, lambda: measure(Path(request["script"]), device))


# ---------------------------------------------------------------------------------------------------------------------
# All of it


def run_workload(name: str, server: JobServer, folder: Path, args: argparse.Namespace) -> Record:
    """Advise on a workload, measure it in a process of its own, and compare."""
    started = time.perf_counter()
    text = WORKLOADS[name].text(args.device)
    script, graphed = folder / name.replace("-", "_") / "train.py", folder / f"{name}.py".replace("-", "_")
    script.parent.mkdir()
    script.write_text(text)

    def compared() -> Record:
        advice = advised(script, args.device, args.timeout)
        took = time.perf_counter() - started
        graphed.write_text(with_graphs(name, text, advice))
        found = server.run({"workload": name, "device": args.device, "script": str(graphed)}, args.timeout)
        if "error" in found:
            raise RuntimeError(found["error"])
        kept = {key: value for key, value in found.items() if key not in ("workload", "variant", "worker_s", "process")}
        return judged(advice, kept) | {"advise_s": took, "paste": advice["paste"]}

    return attempted({"workload": name, "variant": "advise"}, compared)


def run_workloads(
    names: Sequence[str], args: argparse.Namespace, publish: Callable[[list[Record]], Record]
) -> list[Record]:
    """Run all workloads in turn."""
    records: list[Record] = []
    with (
        tempfile.TemporaryDirectory(prefix="advise-") as place,
        JobServer(Path(__file__).stem, (ROOT, ROOT / "benchmarks")) as server,
    ):
        for name in names:
            records.append(run_workload(name, server, Path(place), args))
            print(progress(records[-1], len(records), len(names), told), file=sys.stderr, flush=True)
            publish(records)
    return records


def told(record: Record) -> str:
    """Return how a workload went, in a few words."""
    if "time_error" not in record:
        return f"{record['verdict']}; {record['measured_ms']:.2f} ms with graphs"
    return (
        f"{record['verdict']}, {record['choice']}; predicted {record['predicted_ms']:.2f} ms, measured "
        f"{record['measured_ms']:.2f} ms ({record['time_error']:+.1f} %), memory {record['memory_error']:+.1f} %, "
        f"{'right' if record['right'] else 'WRONG'}"
    )


def rows_of(records: Sequence[Record]) -> Rows:
    """Return the table; a failed run's row is its error."""
    names = ["workload", "busy", "verdict", "advice", "eager ms", "predicted ms", "measured ms", "error"]
    names += ["eager MiB", "predicted MiB", "measured MiB", "ratio", "error", "gain", "right"]
    rows = [names]
    for r in records:
        if "error" in r:
            rows.append([r["workload"], f"failed: {r['error']}", *[""] * (len(names) - 2)])
        elif "time_error" not in r:
            eager, measured = number(r["eager_again_ms"], 2), number(r["measured_ms"], 2)
            rows.append([r["workload"], "", r["verdict"], "", eager, "", measured, *[""] * (len(names) - 7)])
        else:
            rows.append(_row(r))
    return rows


def _row(r: Record) -> list[str]:
    return [
        r["workload"],
        f"{100 * r['busy_fraction']:.0f} %",
        r["verdict"],
        r["choice"],
        f"{number(r['eager_ms'], 2)}, {number(r['eager_again_ms'], 2)}",
        number(r["predicted_ms"], 2),
        number(r["measured_ms"], 2),
        f"{r['time_error']:+.1f} %",
        *(f"{r[name] / MIB:.0f}" for name in ("eager_bytes", "predicted_bytes", "measured_bytes")),
        number(r["measured_bytes"] / r["eager_bytes"], 3),
        f"{r['memory_error']:+.1f} %",
        f"{100 * r['predicted_gain']:.1f} %, {100 * r['measured_gain']:.1f} %",
        "yes" if r["right"] else "NO",
    ]


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """Return the tables of the report."""
    targets = [["target", "reached"], *([name, f"{n} of {of}"] for name, (n, of) in summary["targets"].items())]
    return [("Predicted and measured", rows_of(summary["records"])), ("Targets", targets)]


def is_installed(name: str) -> bool:
    """Whether what a workload needs is there."""
    needs = WORKLOADS[name].needs
    return needs is None or importlib.util.find_spec(needs) is not None


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="What `stepgraph advise` predicts against what is measured.")
    parser.add_argument("--only", type=name_list(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help="cpu: tiny models on the tape")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a process may take (150)")
    parser.add_argument("--out", type=Path, help="folder for the report (benchmarks/results/DATE-GPU; none on a CPU)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a workload failed."""
    args = parse_arguments(argv)
    begun = begin(args, "tiny models")
    if begun is None:
        return 2
    facts, folder = begun
    names = [name for name in args.only if is_installed(name)]
    skipped = [name for name in args.only if name not in names]
    for name in skipped:
        print(f"{name} is left out: {WORKLOADS[name].needs} is not installed", file=sys.stderr)
    command = command_line("advise.py", sys.argv[1:] if argv is None else argv)
    return run_and_report(
        "advise",
        lambda publish: run_workloads(names, args, publish),
        lambda records, facts: {
            "environment": facts,
            "command": command,
            "skipped": skipped,
            "targets": targets_of(records),
            "records": records,
        },
        sections,
        lambda summary: as_page("Advice", summary, sections(summary), "benchmarks/advise.py"),
        facts,
        folder,
        width=220,
    )


if __name__ == "__main__":
    sys.exit(main())
