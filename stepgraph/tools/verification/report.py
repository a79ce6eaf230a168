"""The report of a verification: the verdict first, then what was compared, where it differs and why, and the costs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from stepgraph.core import catalogue
from stepgraph.core.errors import Location
from stepgraph.core.wording import counted
from stepgraph.engine.call.report import render, size_of
from stepgraph.tools.verification.compare import Comparison
from stepgraph.tools.verification.costs import Cost
from stepgraph.tools.verification.trace import Row

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["ADVICE", "Verdict", "VerifyReport", "out_of_reach"]

ADVICE = (
    "bits cannot match where eager differs from eager. First make eager equal to itself "
    "(torch.use_deterministic_algorithms(True), one thread on the CPU; docs/equality.md).",
    "where that is not possible, compare losses over some 20 steps with a lower learning rate or a larger batch, on "
    "fixed data: with a full learning rate two runs drift apart after about 10 steps, whether or not a graph is wrong.",
    "then bound the difference by what eager shows: rtol= and atol= of verify.",
)
"""What to do where values differ within noise."""


class Verdict(enum.Enum):
    """The outcome in a word."""

    EQUAL = "equal"
    WITHIN = "within bounds"
    """Some bits differ, by no more than the user allows."""
    DIFFERENT = "different"
    CANNOT_JUDGE = "cannot judge"
    """Eager differs from eager by as much, nothing was replayed, or a call writes to memory that nothing names."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome of `stepgraph.verify`. `print(report)` shows a table, `report.to_dict()` is for machines."""

    subject: str
    kind: str
    """captured step, function, graphed modules or graphed callable."""
    backend: str
    replays: int
    """Graphs that one graphed step launches; of a script, replays in all its steps."""
    comparison: Comparison

    @property
    def verdict(self) -> Verdict:
        """The outcome in a word."""
        found = self.comparison
        if found.unsaved:
            return Verdict.CANNOT_JUDGE
        if not found.equal:
            return Verdict.CANNOT_JUDGE if found.within_spread else Verdict.DIFFERENT
        if not self.replays:
            return Verdict.CANNOT_JUDGE
        return Verdict.WITHIN if any(found.bounds) else Verdict.EQUAL

    @property
    def equal(self) -> bool:
        """True if the graphed step does what the eager one does, and something was replayed."""
        return self.verdict in (Verdict.EQUAL, Verdict.WITHIN)

    def __bool__(self) -> bool:
        return self.equal

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        found, values = self.comparison, sum(row.num_values for row in self.comparison.rows)
        compared = f"{self.subject}: {counted(values, 'values')} after each of {counted(found.steps, 'steps')}"
        match self.verdict:
            case Verdict.EQUAL:
                return f"{compared} have eager's bits"
            case Verdict.WITHIN:
                return f"{compared} are within rtol={found.bounds[0]:g}, atol={found.bounds[1]:g} of eager's"
            case Verdict.DIFFERENT:
                assert found.cause is not None
                what = f"differs from eager at step {found.first.step}" if found.first else "differs from eager"
                return f"{self.subject} {what}   [{found.cause.rule}]"
        if found.unsaved:
            return f"{self.subject} {out_of_reach(found.unsaved)}"
        if found.equal:
            return f"{self.subject}: nothing was replayed, so eager was compared with eager"
        return f"{self.subject}: eager differs from eager by as much as the graphed run does"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        found = self.comparison
        cause = found.cause
        return {
            "verdict": self.verdict.value,
            "equal": self.equal,
            "sentence": self.sentence,
            "subject": self.subject,
            "kind": self.kind,
            "backend": self.backend,
            "steps": found.steps,
            "replays": self.replays,
            "rtol": found.bounds[0],
            "atol": found.bounds[1],
            "compared": [_row(row) for row in found.rows],
            "spread": [_row(row) for row in found.spread],
            "first_difference": asdict(found.first) if found.first is not None else None,
            "first_module": found.module,
            "cause": None if cause is None else _explained(cause.rule, cause.what, cause.where),
            "costs": [asdict(cost) for cost in found.costs],
            "notes": list(found.notes),
            "unsaved": [None if one is None else str(one) for one in found.unsaved],
            "advice": list(self.advice),
        }

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do where eager differs from eager."""
        return () if self.comparison.spread_is_zero else ADVICE

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        found = self.comparison
        yield Text(f"{self.verdict.value.upper()}: {self.sentence}", style="bold")
        table = Table(title=f"{self.kind} on {self.backend}", title_justify="left")
        for name in ("compared with eager", "values", "steps", "graphed", "eager again"):
            table.add_column(name, justify="right" if name in ("values", "steps") else "left", overflow="fold")
        spread = {row.kind: row for row in found.spread}
        for row in found.rows:
            cells = (row.kind, str(row.num_values), str(row.num_steps), _outcome(row), _outcome(spread.get(row.kind)))
            table.add_row(*map(Text, cells))
        yield table
        for line in self._lines():
            yield Text(line)
        if any(cost.replays is not None for cost in found.costs):
            yield _cost_table(found.costs)

    def _lines(self) -> Iterator[str]:
        found = self.comparison
        if found.first is not None:
            yield f"First difference: {found.first}"
        if found.module is not None:
            yield f"First module: {found.module}"
        if found.cause is not None:
            told = _explained(found.cause.rule, found.cause.what, found.cause.where)
            yield f"Cause: {told['what']}   [{told['rule']}]"
            yield from ([f"  at {told['where']}"] if told["where"] else [])
            yield f"Why: {told['why']}"
            yield f"Fix: {told['fix']}"
        yield from (f"Note: {note}" for note in found.notes)
        yield from (f"Advice: {line}" for line in self.advice)

    def __str__(self) -> str:
        return render(self)


def out_of_reach(lines: Iterable[Location | None]) -> str:
    """Say that these lines write to memory that was not compared."""
    told = ", ".join("a backward" if one is None else f"{one.file}:{one.line}" for one in lines)
    return f"writes to memory that nothing in its reach holds, at {told}: it was not compared"


def _explained(rule: str, what: str, where: Any) -> dict[str, Any]:
    why, fix = catalogue.entry(rule).reason_and_fix()
    return {"rule": rule, "what": what, "where": None if where is None else str(where), "why": why, "fix": fix}


def _row(row: Row) -> dict[str, Any]:
    return asdict(row)


def _outcome(row: Row | None) -> str:
    if row is None or not row.num_differing:
        return "equal"
    gap = row.largest.gap if row.largest is not None else None
    by = f", max {gap.max_abs:.3g}" if gap is not None and gap.max_abs is not None else ""
    return f"{row.num_differing} differ{by}"


def _cost_table(costs: Sequence[Cost]) -> Any:
    """A row for each side. The tape's times and memory say nothing about a GPU's, and are left to `to_dict`."""
    from rich.table import Table
    from rich.text import Text

    on_gpu = any(cost.busy is not None for cost in costs)
    columns: dict[str, Callable[[Cost], str]] = {
        "a step": lambda cost: cost.side,
        "kernels" if on_gpu else "operations": lambda cost: "" if cost.launches is None else str(cost.launches),
        "graph launches": lambda cost: "" if cost.replays is None else str(cost.replays),
    }
    if on_gpu:
        columns |= {
            "GPU busy": lambda cost: "" if cost.busy is None else f"{cost.busy:.0%}",
            "time": lambda cost: "" if cost.step_ms is None else f"{cost.step_ms:.2f} ms",
            "peak memory": lambda cost: "" if cost.peak_bytes is None else size_of(cost.peak_bytes),
        }
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name == "a step" else "right")
    for cost in costs:
        table.add_row(*(Text(cell(cost)) for cell in columns.values()))
    return table
