"""From the records of `whole_step.py` to figures, targets and tables: pure functions, nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
MICROBATCHES = 4

WORKLOADS = {"gpt2-small": 1, "gpt2-small-mb8": 8}
"""Name of each workload and its sequences a microbatch."""

TIMED = (
    "eager",
    "compile",
    "reduce-overhead",
    "hand-full",
    "hand-full+opt",
    "compile+hand-full+opt",
    "ours",
    "ours+compile",
)
EQUALITY = ("equality", "equality-nondeterministic")

Record = dict[str, Any]
State = dict[str, dict[str, Tensor]]


def error_line(text: str, limit: int = 240) -> str:
    """Return the first non-empty line of an error's text, shortened."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:limit]


def find(records: Sequence[Record], workload: str, variant: str) -> Record:
    """Return the record of one worker, empty where it did not run or failed."""
    for record in records:
        if (record["workload"], record["variant"]) == (workload, variant) and "error" not in record:
            return record
    return {}


def ratio(records: Sequence[Record], workload: str, variant: str, base: str, figure: str) -> float | None:
    """Return a figure of one variant over that of another, or None where either is missing."""
    upper, lower = find(records, workload, variant).get(figure), find(records, workload, base).get(figure)
    return upper / lower if upper is not None and lower else None


def bits_of(tensor: Tensor) -> Tensor:
    """View a tensor as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(widths[tensor.element_size()])


def compare(left: State, right: State) -> dict[str, Record]:
    """Compare two states bit by bit; for each group: tensors, how many differ, the first that does, the widest gap."""
    result = {}
    for group in left:
        differing, widest = [], 0.0
        names = sorted(left[group].keys() | right[group].keys())
        for name in names:
            a, b = left[group].get(name), right[group].get(name)
            if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
                differing.append(name)
            elif not torch.equal(bits_of(a), bits_of(b)):
                differing.append(name)
                widest = max(widest, (a.double() - b.double()).abs().max().item())
        first = differing[0] if differing else None
        result[group] = {"tensors": len(names), "differing": len(differing), "first": first, "widest_gap": widest}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Targets


@dataclass(frozen=True)
class Target:
    """One figure to reach, what was measured, and whether that reaches it."""

    workload: str
    name: str
    limit: str
    measured: str
    reached: bool


RATIO_TARGETS = (
    ("ours", "hand-full+opt", "step_ms", "<=", 1.01),
    ("ours+compile", "reduce-overhead", "step_ms", "<", 1.0),
    ("ours", "eager", "reserved_bytes", "<=", 1.10),
)
"""A variant, the one it is held against, the figure, and the limit of their ratio."""


def ratio_target(records: Sequence[Record], workload: str, target: tuple[str, str, str, str, float]) -> Target:
    """Judge one of `RATIO_TARGETS` on one workload."""
    variant, base, figure, sign, limit = target
    value = ratio(records, workload, variant, base, figure)
    reached = value is not None and (value < limit if sign == "<" else value <= limit)
    name = f"{variant} / {base}: {'step time' if figure == 'step_ms' else 'peak reserved memory'}"
    return Target(workload, name, f"{sign} {limit:.2f}", "not measured" if value is None else f"{value:.4f}", reached)


def capture_target(records: Sequence[Record], workload: str) -> Target:
    """Judge the seconds of capture for each layer."""
    value = find(records, workload, "ours").get("capture_s_per_layer")
    measured = "not measured" if value is None else f"{value:.4f} s"
    reached = value is not None and bool(value < 0.05)
    return Target(workload, "ours: capture, for each layer", "< 0.05 s", measured, reached)


def equality_target(record: Record) -> Target:
    """Judge bit-equality after the run; a run that never replayed, or that lost its numbers to NaN, proves nothing."""
    groups = record["pairs"]["eager vs ours"]
    judged = [groups[g] for g in ("losses", "parameters", "optimizer")]
    differing, tensors = sum(g["differing"] for g in judged), sum(g["tensors"] for g in judged)
    replays = record["engine"].get("replays", 0)
    measured = f"{differing} of {tensors} differ, {replays} replays" + ("" if record["finite"] else ", not finite")
    name = f"ours: losses, parameters, optimizer state bit-equal to eager after {record['steps']} steps"
    reached = differing == 0 and tensors > 0 and replays > 0 and record["finite"]
    return Target(record["workload"], name, "0 differ", measured, reached)


def judge(records: Sequence[Record], workloads: Sequence[str], equality_on: str) -> list[Target]:
    """Return every target with what was measured."""
    targets = []
    for workload in workloads:
        targets += [ratio_target(records, workload, target) for target in RATIO_TARGETS]
        targets.append(capture_target(records, workload))
    record = find(records, equality_on, "equality")
    missing = Target(equality_on, "ours: bit-equal to eager", "0 differ", "not measured", reached=False)
    return [*targets, equality_target(record) if record else missing]


# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows of strings, for the terminal and for Markdown alike

Rows = list[list[str]]

# fmt: off
STEP_HEADER = (
    "variant", "step ms", "again ms", "busy ms", "step/busy", "vs eager", "host ms", "capture s", "s/layer",
    "reserved GiB", "allocated GiB", "loss",
)
ENGINE_KEYS = (
    "graphs", "segments", "nodes", "captures", "recaptures", "replays", "eager_calls", "eager_reasons",
    "capture_seconds", "pool_bytes", "static_bytes",
)
# fmt: on


def number(value: float | None, digits: int) -> str:
    """Format a figure, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def step_rows(records: Sequence[Record], workload: str) -> Rows:
    """Return the rows of one workload's table under `STEP_HEADER`; a failed variant's row is its error."""
    rows = [[*STEP_HEADER]]
    for r in records:
        if r["workload"] != workload or r["variant"] in EQUALITY:
            continue
        if "error" in r:
            rows.append([r["variant"], f"failed: {r['error']}", *[""] * (len(STEP_HEADER) - 2)])
            continue
        slower = ratio(records, workload, "eager", r["variant"], "step_ms")
        rows.append(
            [
                r["variant"],
                number(r["step_ms"], 2),
                number(r["again_ms"], 2),
                number(r["busy_ms"], 2),
                number(r["step_ms"] / r["busy_ms"] if r["busy_ms"] else None, 3),
                "" if slower is None else f"{slower:.2f}x",
                number(r["host_ms"], 2),
                number(r["capture_s"], 3),
                number(r["capture_s_per_layer"], 4),
                number(r["reserved_bytes"] / GIB, 3),
                number(r["allocated_bytes"] / GIB, 3),
                number(r["loss"], 6),
            ]
        )
    return rows


def engine_rows(records: Sequence[Record], keys: Sequence[str] = ENGINE_KEYS) -> Rows:
    """Return what stepgraph's own report said in each run that used it."""
    rows = [["workload", "variant", *keys]]
    for r in records:
        if r.get("engine"):
            rows.append([r["workload"], r["variant"], *(short(r["engine"].get(key)) for key in keys)])
    return rows


def short(value: Any) -> str:
    """Format one value of the engine's report for a table's cell."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {short(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return str(len(value))
    return "" if value is None else str(value)


def equality_rows(records: Sequence[Record]) -> Rows:
    """Return one row for each pair of runs and each group of tensors compared."""
    rows = [["algorithms", "pair", "compared", "tensors", "differing", "widest gap", "first that differs"]]
    for r in records:
        if r["variant"] not in EQUALITY:
            continue
        label = "deterministic" if r["variant"] == "equality" else "default"
        if "error" in r:
            rows.append([label, f"failed: {r['error']}", *[""] * 5])
            continue
        for pair, groups in r["pairs"].items():
            for group, g in groups.items():
                counts = [str(g["tensors"]), str(g["differing"]), f"{g['widest_gap']:.3g}", g["first"] or ""]
                rows.append([label, pair, group, *counts])
    return rows


def memory_rows(records: Sequence[Record], workloads: Sequence[str]) -> Rows:
    """Return ours over eager, peak reserved and peak allocated."""
    rows = [["workload", "reserved, ours / eager", "allocated, ours / eager"]]
    for w in workloads:
        figures = (ratio(records, w, "ours", "eager", f) for f in ("reserved_bytes", "allocated_bytes"))
        rows.append([w, *("not measured" if f is None else f"{f:.4f}" for f in figures)])
    return rows


def target_rows(targets: Sequence[Target]) -> Rows:
    """Return the targets' table."""
    rows = [["workload", "target", "limit", "measured", "reached"]]
    return rows + [[t.workload, t.name, t.limit, t.measured, "yes" if t.reached else "no"] for t in targets]


def markdown_table(rows: Rows) -> str:
    """Render rows, the first being the header, as a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """Return the report's tables in order, each with its title; empty ones are left out."""
    records, workloads = summary["records"], summary["workloads"]
    tables = [(f"{w}: {MICROBATCHES} microbatches of {WORKLOADS[w]}", step_rows(records, w)) for w in workloads]
    tables.append(("Memory", memory_rows(records, workloads)))
    tables.append(("What stepgraph reported", engine_rows(records)))
    tables.append((f"Equality on {summary['equality_on']}, bit by bit", equality_rows(records)))
    tables.append(("Targets", target_rows([Target(**t) for t in summary["targets"]])))
    return [(title, rows) for title, rows in tables if len(rows) > 1]


def markdown(summary: Record) -> str:
    """Render the whole report."""
    return as_page("Whole step", summary, sections(summary), "benchmarks/whole_step.py")


def as_page(name: str, summary: Record, tables: Sequence[tuple[str, Rows]], script: str) -> str:
    """Render a report: what it was measured on, the command, the tables."""
    facts = [f"- {key}: {value}" for key, value in summary["environment"].items()]
    parts = [f"# {name}", "\n".join(facts), f"`{summary['command']}`"]
    for title, rows in tables:
        parts += [f"## {title}", markdown_table(rows)]
    parts.append(f"The columns are explained at the head of `{script}`.")
    return "\n\n".join(parts) + "\n"


def summarise(records: list[Record], workloads: list[str], environment: Record, command: str) -> Record:
    """Put records, environment and judged targets together: what is written as JSON and rendered as Markdown."""
    equality_on = workloads[0]
    return {
        "environment": environment,
        "command": command,
        "workloads": workloads,
        "equality_on": equality_on,
        "memory": {w: ratio(records, w, "ours", "eager", "reserved_bytes") for w in workloads},
        "targets": [asdict(t) for t in judge(records, workloads, equality_on)],
        "records": records,
    }
