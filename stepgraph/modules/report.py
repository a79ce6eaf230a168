"""A report counts what happened to graphed modules: one row for each, as a table or as a dict."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from stepgraph.modules.session import ModuleSession
from stepgraph.pair.proof import equality
from stepgraph.pair.runner import Runner


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One graphed module or method."""

    path: str
    signatures: int
    """Kinds of calls that have graphs."""
    runners: int
    nodes: int | None
    """Nodes of all graphs; None where they cannot be counted."""
    forwards: int
    """Forwards that were replayed."""
    backwards: int
    eager_calls: int
    eager_reasons: dict[str, int]
    recapture_reasons: dict[str, int]
    static_bytes: int
    """Memory at the graphs' edges: arguments and gradients of results."""


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The state of graphed modules. `print(report)` shows a table, `report.to_dict()` is for machines."""

    backend: str
    rows: tuple[ModuleRow, ...]
    capture_seconds: float
    pool_bytes: int
    fixed_order: int = 0
    """How many forwards and backwards share memory by the order they come in; 0 where any order is right."""
    audits: int = 0
    """How often all kinds of calls were recorded again and compared."""
    equality: str = ""
    """What is known of equality with eager."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "backend": self.backend,
            "graphs": self.graphs,
            "replays": self.replays,
            "eager_calls": self.eager_calls,
            "recaptures": self.recaptures,
            "capture_seconds": self.capture_seconds,
            "pool_bytes": self.pool_bytes,
            "fixed_order": self.fixed_order,
            "audits": self.audits,
            "equality": self.equality,
            "modules": [asdict(row) for row in self.rows],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = (
            f"graphed modules on {self.backend}: captured in {self.capture_seconds:.3f} s, "
            f"pool {self.pool_bytes / 2**20:.1f} MiB"
            + (f", a fixed order of {self.fixed_order}" if self.fixed_order else "")
        )
        table = Table(title=title, title_justify="left")
        for name in ("module", "runners", "nodes", "forwards", "backwards", "eager calls"):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in row.eager_reasons.items())
            again = "".join(f"\ncaptured again for {why}: {n}" for why, n in row.recapture_reasons.items())
            cells = (
                row.path or "(the model)",
                str(row.runners),
                "?" if row.nodes is None else str(row.nodes),
                str(row.forwards),
                str(row.backwards),
                f"{row.eager_calls}" + (f" ({reasons})" if reasons else "") + again,
            )
            table.add_row(*map(Text, cells))
        yield table
        yield Text(f"equal to eager: {self.equality}")

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue().rstrip()


def report_on(shared: ModuleSession) -> ModuleReport:
    """The report of a model's graphed modules at this moment."""
    rows = []
    for manager in shared.managers:
        runners = [runner for site in manager.sites.values() for runner in site.runners]
        counts = [n for runner in runners for n in _nodes(runner)]
        rows.append(
            ModuleRow(
                path=manager.name,
                signatures=sum(bool(site.runners) for site in manager.sites.values()),
                runners=len(runners),
                nodes=None if None in counts else sum(n for n in counts if n is not None),
                forwards=manager.forwards + sum(runner.forwards for runner in runners),
                backwards=manager.backwards + sum(runner.backward_runs for runner in runners),
                eager_calls=manager.eager_reasons.total(),
                eager_reasons=dict(manager.eager_reasons),
                recapture_reasons=dict(manager.recapture_reasons),
                static_bytes=sum(runner.static_bytes for runner in runners),
            )
        )
    backend = shared.session.backend.name if shared.session.has_backend else "not chosen yet"
    order = 0 if shared.order is None else len(shared.order)
    shown = [site.proof.shown for manager in shared.managers for site in manager.sites.values() if site.runners]
    audits = shared.turns.audits
    return ModuleReport(
        *(backend, tuple(rows), shared.capture_seconds, shared.session.pool_bytes(), order),
        *(audits, equality(shown, audits)),
    )


def _nodes(runner: Runner) -> list[int | None]:
    return [runner.forward.recording.graph.nodes, *(backward.graph.nodes for backward in runner.backwards.values())]
