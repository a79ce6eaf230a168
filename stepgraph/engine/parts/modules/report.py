"""A report has the counts of graphed modules, one row for each, as a table or as a dict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from stepgraph.core.wording import quantities
from stepgraph.engine.call.report import GraphReport, sum_known, with_counts
from stepgraph.engine.parts.modules.session import ModuleSession


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One graphed module or method."""

    path: str
    signatures: int
    """Kinds of calls that have graphs."""
    runners: int
    nodes: int | None
    """Nodes of all graphs; None if they cannot be counted."""
    forwards: int
    """Forwards that were replayed."""
    backwards: int
    eager_calls: int
    eager_reasons: dict[str, int]
    recapture_reasons: dict[str, int]
    refused: dict[str, int]
    """Calls that raised an error of stepgraph, by rule."""
    static_bytes: int
    """Memory at the graphs' edges: arguments and gradients of results."""

    def describe(self) -> str:
        """Return the counts in a few lines."""
        lines = [
            quantities(runners=self.runners, nodes=self.nodes, forwards=self.forwards, backwards=self.backwards),
            f"eager: {with_counts(self.eager_reasons)}" if self.eager_reasons else "",
            f"captured again: {with_counts(self.recapture_reasons)}" if self.recapture_reasons else "",
            f"refused: {with_counts(self.refused)}" if self.refused else "",
        ]
        return "\n".join(line for line in lines if line) or "no calls yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport(GraphReport):
    """The state of graphed modules. `print(report)` shows a table, `report.to_dict()` is for machines."""

    rows: tuple[ModuleRow, ...]
    fixed_order: int = 0
    """The number of forwards and backwards that share memory by a fixed order; 0 if any order is allowed."""

    derived = ("verdict", "graphs", "replays", "eager_calls", "recaptures")

    @property
    def graphs(self) -> int:
        """Runners of all modules."""
        return sum(row.runners for row in self.rows)

    @property
    def replays(self) -> int:
        """Forwards that were replayed, of all modules."""
        return sum(row.forwards for row in self.rows)

    @property
    def eager_calls(self) -> int:
        return sum(row.eager_calls for row in self.rows)

    @property
    def recaptures(self) -> int:
        return sum(sum(row.recapture_reasons.values()) for row in self.rows)

    def tally(self) -> tuple[int, Counter[str]]:
        return self.replays, sum((Counter(row.eager_reasons) for row in self.rows), Counter())

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        parts = [(row.path or "(the model)", row.describe()) for row in self.rows]
        return "graphed modules", [*parts, ("fixed order", quantities(forwards_and_backwards=self.fixed_order))]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = GraphReport.to_dict(self)
        return values | {"modules": values.pop("rows")}


def report_on(shared: ModuleSession) -> ModuleReport:
    """Make the report on a model's graphed modules."""
    rows = []
    for manager in shared.managers:
        runners = [runner for site in manager.sites.values() for runner in site.runners]
        graphs = [graph for runner in runners for graph in runner.graphs()]
        rows.append(
            ModuleRow(
                path=manager.name,
                signatures=sum(bool(site.runners) for site in manager.sites.values()),
                runners=len(runners),
                nodes=sum_known([graph.nodes for graph in graphs]),
                forwards=manager.forwards + sum(runner.forwards for runner in runners),
                backwards=manager.backwards + sum(runner.backward_runs for runner in runners),
                eager_calls=manager.eager_reasons.total(),
                eager_reasons=dict(manager.eager_reasons),
                recapture_reasons=dict(manager.recapture_reasons),
                refused=dict(manager.refused),
                static_bytes=sum(runner.static_bytes for runner in runners),
            )
        )
    kinds = [site.kind for manager in shared.managers for site in manager.sites.values() if site.runners]
    return ModuleReport(
        rows=tuple(rows),
        fixed_order=0 if shared.order is None else len(shared.order),
        **shared.facts(kinds, sum(row.static_bytes for row in rows)),
    )
