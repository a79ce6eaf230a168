"""From the records of `modules.py` to targets and tables: pure functions, nothing is measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from whole_step_report import (
    GIB,
    MICROBATCHES,
    Record,
    Rows,
    Target,
    as_page,
    engine_rows,
    find,
    number,
    ratio,
    target_rows,
)

EQUALITY = "equality"
PAIR = "pair"


@dataclass(frozen=True)
class Workload:
    """A model and the ways it is trained."""

    title: str
    layers: int
    sequence: int
    bases: Mapping[str, str]
    """Each timed variant, and the eager one that it is held against: that one itself where it is eager."""
    equality: bool = False
    """Whether a run compares every variant with its base, bit by bit."""

    @property
    def variants(self) -> list[str]:
        """The variants in order, equality last."""
        return [*self.bases, *([EQUALITY] if self.equality else [])]


def _moe(sequence: int, *, equality: bool) -> Workload:
    bases = {
        "eager-loop": "eager-loop",
        "ours-partial": "eager-loop",
        "eager-grouped": "eager-grouped",
        "ours-layers": "eager-grouped",
        "ours-step": "eager-grouped",
    }
    return Workload("Qwen3-30B-A3B's shape", 4, sequence, bases, equality)


_OF_GPT = ("eager", "torch-layers", "ours-layers", "ours-attn", "ours-attn+mlp", "ours-step")
_OF_MEGATRON = ("eager", "megatron-layers", "ours-layers")

WORKLOADS = {
    "gpt2-small": Workload("GPT-2-small", 12, 1024, dict.fromkeys(_OF_GPT, "eager"), equality=True),
    "qwen3-moe-1024": _moe(1024, equality=True),
    "qwen3-moe-4096": _moe(4096, equality=False),
    "megatron-gpt2-small": Workload(
        "megatron-core's GPTModel, GPT-2-small's sizes", 12, 1024, dict.fromkeys(_OF_MEGATRON, "eager"), equality=True
    ),
    "host-pair": Workload("four linear layers of width 8", 1, 4, {PAIR: PAIR}),
}
"""What is measured, in order."""

VARIANTS = list(dict.fromkeys(variant for workload in WORKLOADS.values() for variant in workload.variants))

BUSY_LIMIT = 1.07
MEMORY_LIMIT = 1.15
CAPTURE_LIMIT_S = 0.05
PAIR_LIMIT = 0.5


def merged_engine(report: Record) -> Record:
    """Return stepgraph's report with what it says module by module also added up."""
    modules = report.get("modules")
    if modules is None:
        return report
    sums = {key: sum(m[key] or 0 for m in modules) for key in ("nodes", "backwards", "static_bytes")}
    reasons: dict[str, Counter[str]] = {"eager_reasons": Counter(), "recapture_reasons": Counter()}
    for module in modules:
        for key, counter in reasons.items():
            counter.update(module[key])
    return report | sums | {key: dict(counter) for key, counter in reasons.items()}


def eager_parts(report: Record, steps: int) -> dict[str, str]:
    """Return the graphed parts that ran eagerly more than once a step after all, each with the reason."""
    parts = report.get("modules") or [{"path": "the step", "eager_reasons": report.get("eager_reasons", {})}]
    return {
        part["path"]: reason
        for part in parts
        for reason, count in part["eager_reasons"].items()
        if reason != "warm-up" and count > steps
    }


# ---------------------------------------------------------------------------------------------------------------------
# Targets


def is_ours(variant: str) -> bool:
    """Whether a variant graphs modules with stepgraph."""
    return variant.startswith("ours-") and variant != "ours-step"


def limited(workload: str, name: str, limit: float, value: float | None, unit: str = "", sign: str = "<=") -> Target:
    """Judge one figure."""
    reached = value is not None and (value < limit if sign == "<" else value <= limit)
    measured = "not measured" if value is None else f"{value:.4f}{unit}"
    return Target(workload, name, f"{sign} {limit:.2f}{unit}", measured, reached)


def step_over_busy(record: Record) -> float | None:
    """Return the step's time over the time the GPU worked in it."""
    busy = record.get("busy_ms")
    return record["step_ms"] / busy if busy else None


def module_targets(records: Sequence[Record], workload: str, variants: Sequence[str]) -> list[Target]:
    """Judge memory and capture time of every variant that graphs modules with stepgraph."""
    targets = []
    for variant in filter(is_ours, variants):
        base = WORKLOADS[workload].bases[variant]
        memory = ratio(records, workload, variant, base, "reserved_bytes")
        seconds = find(records, workload, variant).get("capture_s_per_layer")
        targets.append(limited(workload, f"{variant} / {base}: peak reserved memory", MEMORY_LIMIT, memory))
        name = f"{variant}: capture, for each layer"
        targets.append(limited(workload, name, CAPTURE_LIMIT_S, seconds, " s", "<"))
    return targets


def equality_target(records: Sequence[Record], workload: str) -> Target:
    """Judge bit-equality; what was not replayed, or has lost its numbers to NaN, proves nothing."""
    record = find(records, workload, EQUALITY)
    ours = {pair: groups for pair, groups in record.get("pairs", {}).items() if "ours-" in pair}
    if not ours:
        return Target(workload, "ours: bit-equal to eager", "0 differ", "not measured", reached=False)
    groups = [group for pair in ours.values() for group in pair.values()]
    differing, tensors = sum(g["differing"] for g in groups), sum(g["tensors"] for g in groups)
    idle = [pair for pair in ours if not record["replays"][pair]]
    eager = sum(len(record["eager_parts"][pair]) for pair in ours)
    measured = f"{differing} of {tensors} differ" + (f", no replay in {', '.join(idle)}" if idle else "")
    measured += (f", {eager} parts stayed eager" if eager else "") + ("" if record["finite"] else ", not finite")
    name = f"ours: losses, parameters, gradients, optimizer state equal eager's after {record['steps']} steps"
    reached = differing == 0 and tensors > 0 and not idle and not eager and record["finite"]
    return Target(workload, name, "0 differ", measured, reached)


def pair_target(records: Sequence[Record]) -> Target:
    """Judge the host time of a forward+backward pair against torch's, both over an identity."""
    added = find(records, "host-pair", PAIR).get("added_us", {})
    value = added["ours"] / added["torch"] if added.get("torch") else None
    return limited("host-pair", "ours / torch: host time over an identity", PAIR_LIMIT, value, sign="<")


def judge(records: Sequence[Record], jobs: Sequence[tuple[str, str]], *, on_gpu: bool) -> list[Target]:
    """Return the target of every job that has one, with what was measured; without a GPU equality alone."""
    targets = []
    for workload in dict.fromkeys(w for w, _ in jobs):
        variants = [v for w, v in jobs if w == workload]
        if EQUALITY in variants:
            targets.append(equality_target(records, workload))
        if not on_gpu:
            continue
        if workload == "gpt2-small" and "ours-layers" in variants:
            value = step_over_busy(find(records, workload, "ours-layers"))
            targets.append(limited(workload, "ours-layers: step/busy", BUSY_LIMIT, value))
        targets += module_targets(records, workload, variants)
        if PAIR in variants:
            targets.append(pair_target(records))
    return targets


# ---------------------------------------------------------------------------------------------------------------------
# Tables: rows of strings, for the terminal and for Markdown alike

# fmt: off
STEP_HEADER = (
    "variant", "step ms", "again ms", "busy ms", "step/busy", "vs eager", "host ms", "capture s", "s/layer",
    "reserved GiB", "/ eager", "allocated GiB", "/ eager", "loss", "eager's loss",
)
ENGINE_KEYS = (
    "graphs", "nodes", "recaptures", "recapture_reasons", "replays", "backwards", "eager_calls", "eager_reasons",
    "capture_seconds", "pool_bytes", "static_bytes",
)
# fmt: on


def step_rows(records: Sequence[Record], workload: str) -> Rows:
    """Return the rows of one workload's table under `STEP_HEADER`; a failed variant's row is its error."""
    rows = [[*STEP_HEADER]]
    for r in records:
        variant = r["variant"]
        if r["workload"] != workload or variant in (EQUALITY, PAIR):
            continue
        if "error" in r:
            rows.append([variant, f"failed: {r['error']}", *[""] * (len(STEP_HEADER) - 2)])
            continue
        base = WORKLOADS[workload].bases[variant]
        faster = ratio(records, workload, base, variant, "step_ms")
        memory = (
            number(value, digits)
            for figure in ("reserved_bytes", "allocated_bytes")
            for value, digits in (
                (None if r[figure] is None else r[figure] / GIB, 3),
                (ratio(records, workload, variant, base, figure), 3),
            )
        )
        rows.append(
            [
                variant,
                number(r["step_ms"], 2),
                number(r["again_ms"], 2),
                number(r["busy_ms"], 2),
                number(step_over_busy(r), 3),
                "" if faster is None else f"{faster:.2f}x",
                number(r["host_ms"], 2),
                number(r["capture_s"], 3),
                number(r["capture_s_per_layer"], 4),
                *memory,
                number(r["loss"], 6),
                same_loss(records, r, base),
            ]
        )
    return rows


def same_loss(records: Sequence[Record], record: Record, base: str) -> str:
    """Say whether a variant's loss is its base's, bit for bit; nothing for the base itself."""
    expected = find(records, record["workload"], base).get("loss")
    if expected is None or record["variant"] == base:
        return ""
    return "same bits" if record["loss"] == expected else "differs"


def equality_rows(records: Sequence[Record]) -> Rows:
    """Return one row for each pair of runs and each group of tensors compared."""
    rows = [["workload", "pair", "replays", "compared", "tensors", "differing", "widest gap", "first that differs"]]
    for r in records:
        if r["variant"] != EQUALITY:
            continue
        if "error" in r:
            rows.append([r["workload"], f"failed: {r['error']}", *[""] * 6])
            continue
        for pair, groups in r["pairs"].items():
            for group, g in groups.items():
                counts = [str(g["tensors"]), str(g["differing"]), f"{g['widest_gap']:.3g}", g["first"] or ""]
                rows.append([r["workload"], pair, short_count(r["replays"][pair]), group, *counts])
    return rows


def short_count(value: int | None) -> str:
    """Format a count that not every variant has."""
    return "" if value is None else str(value)


def pair_rows(records: Sequence[Record]) -> Rows:
    """Return the host time of each way to run the small module."""
    rows = [["way", "median us", "over an identity, us"]]
    for r in records:
        if r["variant"] != PAIR:
            continue
        if "error" in r:
            rows.append([f"failed: {r['error']}", "", ""])
            continue
        rows += [[way, number(us, 1), number(r["added_us"].get(way), 1)] for way, us in r["median_us"].items()]
    return rows


def warning_rows(records: Sequence[Record]) -> Rows:
    """Return what stepgraph warned of in each run, one line each."""
    rows = [["workload", "variant", "warning"]]
    return rows + [[r["workload"], r["variant"], text] for r in records for text in r.get("warnings", ())]


def workload_title(records: Sequence[Record], name: str) -> str:
    """Return what a workload's table is of, with the sizes that were run."""
    run: Record = next((r for r in records if r["workload"] == name and "sequence" in r), {})
    layers, sequence = run.get("layers"), run.get("sequence")
    return f"{name}: {WORKLOADS[name].title}, {layers} layers, {MICROBATCHES} microbatches of 1 x {sequence}"


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """Return the report's tables in order, each with its title; empty ones are left out."""
    records = summary["records"]
    tables = []
    for name in WORKLOADS:
        tables.append((workload_title(records, name), step_rows(records, name)))
    tables.append((f"Host time of a forward+backward pair: {WORKLOADS['host-pair'].title}", pair_rows(records)))
    tables.append(("What stepgraph reported", engine_rows(records, ENGINE_KEYS)))
    tables.append(("Equality under deterministic algorithms, bit by bit", equality_rows(records)))
    tables.append(("Warnings", warning_rows(records)))
    tables.append(("Left out", [["workload", "why"], *map(list, summary["skipped"].items())]))
    tables.append(("Targets", target_rows([Target(**t) for t in summary["targets"]])))
    return [(title, rows) for title, rows in tables if len(rows) > 1]


def markdown(summary: Record) -> str:
    """Render the whole report."""
    return as_page("Modules", summary, sections(summary), "benchmarks/modules.py")


def summarise(
    records: list[Record],
    jobs: Sequence[tuple[str, str]],
    skipped: Mapping[str, str],
    environment: Record,
    command: str,
    *,
    on_gpu: bool,
) -> Record:
    """Put records, environment and judged targets together: what is written as JSON and rendered as Markdown."""
    return {
        "environment": environment,
        "command": command,
        "jobs": [list(job) for job in jobs],
        "skipped": dict(skipped),
        "targets": [asdict(t) for t in judge(records, jobs, on_gpu=on_gpu)],
        "records": records,
    }
