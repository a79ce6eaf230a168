"""From the records of `pipeline.py` to targets and tables: pure functions, nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from modules_report import equality_rows, limited, same_loss, step_over_busy, warning_rows
from whole_step_report import GIB, Record, Rows, Target, as_page, engine_rows, find, number, ratio, target_rows

from stepgraph.engine.order import (
    convert_schedule_table_to_order,
    count_microbatches,
    get_schedule_table,
    num_warmup_microbatches,
    plan_buffers,
)

EQUALITY = "equality"
TIMED = ("eager", "ours", "ours-no-reuse", "whole-step")
VARIANTS = (*TIMED, EQUALITY)
STAGES, RANK, CHUNKS = 4, 0, 2
"""The rank that is run: the first of four stages has the most microbatches in flight."""
LAYERS = 4
"""Layers a chunk."""


@dataclass(frozen=True)
class Workload:
    """How many microbatches a step has, all beyond the schedule's depth, and of how many tokens each is."""

    microbatches: int
    tokens: int = 1024


WORKLOADS = {f"interleaved-{count}": Workload(count) for count in (8, 16, 32)}
WORKLOADS["interleaved-8-long"] = Workload(8, 4096)

BUSY_LIMIT = 1.07
CAPTURE_LIMIT_S = 0.05
MIB = 2**20


def order_of(microbatches: int) -> list[int]:
    """Return the interleaved order of the rank."""
    warmup = num_warmup_microbatches(microbatches, CHUNKS, STAGES, STAGES, RANK)
    return convert_schedule_table_to_order(warmup, CHUNKS, get_schedule_table(microbatches, CHUNKS, STAGES))


# ---------------------------------------------------------------------------------------------------------------------
# Buffers: what the plan says, in bytes


@dataclass(frozen=True)
class Plan:
    """An order, its layers, and the buffers that its static inputs need."""

    name: str
    order: Sequence[int]
    layers: Sequence[int]
    signatures: Sequence[str] | None = None

    def row(self, buffer_bytes: int) -> Record:
        """Return how many buffers there are without and with sharing, in bytes of one activation each."""
        planned = plan_buffers(self.order, self.layers, self.signatures)
        samples, unique = len(planned), len(set(planned))
        return {
            "schedule": self.name,
            "layers": list(self.layers),
            "microbatches": count_microbatches(self.order),
            "samples": samples,
            "unique": unique,
            "bytes": samples * buffer_bytes,
            "unique_bytes": unique * buffer_bytes,
        }


def table_order(microbatches: int, chunks: int, group: int, stages: int, rank: int) -> list[int]:
    """Return the order of a rank."""
    warmup = num_warmup_microbatches(microbatches, chunks, group, stages, rank)
    return convert_schedule_table_to_order(warmup, chunks, get_schedule_table(microbatches, chunks, group))


def plans() -> list[Plan]:
    """Return the schedules whose buffer counts are known: the reference ones, and the one that is run."""
    uneven = table_order(5, 2, 3, 2, 0)
    return [
        Plan("1F1B, stage 0 of 2", table_order(4, 1, 2, 2, 0), [2]),
        Plan("one stage", table_order(4, 1, 1, 1, 0), [2]),
        Plan("interleaved in groups of 3, stage 0 of 2", uneven, [1, 1]),
        Plan("the same, another shape in each chunk", uneven, [1, 1], ["a"] * 5 + ["b"] * 5),
        Plan("interleaved, stage 0 of 2", table_order(4, 2, 2, 2, 0), [1, 2]),
        *(
            Plan(f"1F1B, stage {rank} of 4", table_order(microbatches, 1, 4, 4, rank), [2])
            for rank in range(4)
            for microbatches in (16, 64, 256)
        ),
        *(
            Plan("interleaved, stage 0 of 4 (the one that is run)", order_of(microbatches), [LAYERS] * CHUNKS)
            for microbatches in (4, 8, 16, 32, 64)
        ),
    ]


def buffer_rows(summary: Record) -> Rows:
    """Return the table of planned buffers."""
    rows = [["schedule", "layers a chunk", "microbatches", "samples", "MiB", "unique buffers", "MiB with sharing"]]
    for plan in summary["buffers"]:
        rows.append(
            [
                plan["schedule"],
                ",".join(map(str, plan["layers"])),
                str(plan["microbatches"]),
                str(plan["samples"]),
                number(plan["bytes"] / MIB, 2),
                str(plan["unique"]),
                number(plan["unique_bytes"] / MIB, 2),
            ]
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Targets


def growth_target(records: Sequence[Record], workloads: Sequence[str], figure: str, what: str) -> Target | None:
    """Judge whether a figure is the same for all numbers of microbatches beyond the schedule's depth."""
    found = {w: find(records, w, "ours").get("engine", {}).get(figure) for w in workloads}
    if len(found) < 2:
        return None
    known = [value for value in found.values() if value is not None]
    measured = ", ".join(f"{w}: {value / MIB:.2f} MiB" for w, value in found.items() if value is not None)
    reached = len(known) == len(found) and max(known) <= min(known) * 1.01
    name = f"ours: {what} does not grow with microbatches"
    return Target("all", name, "the same within 1%", measured or "not measured", reached)


def equality_target(record: Record) -> Target:
    """Judge bit-equality; what was not replayed, or has lost its numbers to NaN, proves nothing."""
    groups = [group for pair in record["pairs"].values() for group in pair.values()]
    differing, tensors = sum(g["differing"] for g in groups), sum(g["tensors"] for g in groups)
    idle = [pair for pair, replays in record["replays"].items() if not replays]
    measured = f"{differing} of {tensors} differ" + (f", no replay in {', '.join(idle)}" if idle else "")
    name = f"ours: results, parameters, gradients, optimizer state equal eager's after {record['steps']} steps"
    reached = differing == 0 and tensors > 0 and not idle and record["finite"]
    return Target(
        record["workload"], name, "0 differ", measured + ("" if record["finite"] else ", not finite"), reached
    )


def judge(records: Sequence[Record], jobs: Sequence[tuple[str, str]], *, on_gpu: bool) -> list[Target]:
    """Return the target of every job that has one; without a GPU those that do not depend on speed."""
    targets = [equality_target(r) for r in records if r["variant"] == EQUALITY and "error" not in r]
    workloads = [w for w in WORKLOADS if (w, "ours") in jobs]
    alike = [w for w in workloads if WORKLOADS[w].tokens == Workload.tokens]
    for figure, what in (("static_bytes", "static memory"), ("pool_bytes", "the graphs' pool")):
        target = growth_target(records, alike, figure, what)
        targets += [target] if target is not None else []
    if not on_gpu:
        return targets
    for workload in workloads:
        record = find(records, workload, "ours")
        value = step_over_busy(record) if record else None
        targets.append(limited(workload, "ours: step/busy", BUSY_LIMIT, value))
        seconds = record.get("capture_s_per_graph")
        name = "ours: capture, for each layer and microbatch"
        targets.append(limited(workload, name, CAPTURE_LIMIT_S, seconds, " s", "<"))
    return targets


# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows of strings, for the terminal and for Markdown alike

# fmt: off
STEP_HEADER = (
    "variant", "step ms", "again ms", "busy ms", "step/busy", "vs eager", "host ms", "capture s", "s/layer, microbatch",
    "reserved GiB", "/ eager", "allocated GiB", "/ eager", "result", "eager's result",
)
ENGINE_KEYS = (
    "num_samples", "num_graphs", "num_buffers", "static_bytes", "pool_bytes", "capture_seconds", "forwards",
    "backwards",
)
# fmt: on


def step_rows(records: Sequence[Record], workload: str) -> Rows:
    """Return the rows of one workload's table under `STEP_HEADER`; a failed variant's row is its error."""
    rows = [[*STEP_HEADER]]
    for r in records:
        if r["workload"] != workload or r["variant"] == EQUALITY:
            continue
        if "error" in r:
            rows.append([r["variant"], f"failed: {r['error']}", *[""] * (len(STEP_HEADER) - 2)])
            continue
        faster = ratio(records, workload, "eager", r["variant"], "step_ms")
        memory = [
            number(value, 3)
            for figure in ("reserved_bytes", "allocated_bytes")
            for value in (
                None if r[figure] is None else r[figure] / GIB,
                ratio(records, workload, r["variant"], "eager", figure),
            )
        ]
        rows.append(
            [
                r["variant"],
                number(r["step_ms"], 2),
                number(r["again_ms"], 2),
                number(r["busy_ms"], 2),
                number(step_over_busy(r), 3),
                "" if faster is None else f"{faster:.2f}x",
                number(r["host_ms"], 2),
                number(r["capture_s"], 3),
                number(r["capture_s_per_graph"], 4),
                *memory,
                number(r["loss"], 6),
                same_loss(records, r, "eager"),
            ]
        )
    return rows


def workload_title(records: Sequence[Record], workload: str) -> str:
    """Return what a workload's table is of, with the sizes that were run."""
    run: Record = next((r for r in records if r["workload"] == workload and "sequence" in r), {})
    return (
        f"{workload}: stage {RANK} of {STAGES}, {CHUNKS} chunks of {run.get('layers')} layers, "
        f"{WORKLOADS[workload].microbatches} microbatches of 1 x {run.get('sequence')}, {run.get('entries')} entries"
    )


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """Return the report's tables in order, each with its title; empty ones are left out."""
    records = summary["records"]
    tables = [(workload_title(records, w), step_rows(records, w)) for w in WORKLOADS]
    tables.append(("What stepgraph reported", engine_rows(records, ENGINE_KEYS)))
    tables.append(
        (f"Buffers of static inputs, by the plan, at {summary['buffer_bytes']} bytes each", buffer_rows(summary))
    )
    tables.append(("Equality under deterministic algorithms, bit by bit", equality_rows(records)))
    tables.append(("Warnings", warning_rows(records)))
    tables.append(("Targets", target_rows([Target(**t) for t in summary["targets"]])))
    return [(title, rows) for title, rows in tables if len(rows) > 1]


def markdown(summary: Record) -> str:
    """Render the whole report."""
    return as_page("Pipeline", summary, sections(summary), "benchmarks/pipeline.py")


def summarise(
    records: list[Record],
    jobs: Sequence[tuple[str, str]],
    environment: Record,
    command: str,
    buffer_bytes: int,
    *,
    on_gpu: bool,
) -> Record:
    """Put records, environment and judged targets together: what is written as JSON and rendered as Markdown."""
    return {
        "environment": environment,
        "command": command,
        "jobs": [list(job) for job in jobs],
        "buffer_bytes": buffer_bytes,
        "buffers": [plan.row(buffer_bytes) for plan in plans()],
        "targets": [asdict(t) for t in judge(records, jobs, on_gpu=on_gpu)],
        "records": records,
    }
