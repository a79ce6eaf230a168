"""The base of all reports: it prints a verdict first, and leaves out rows that are zero or empty."""

from __future__ import annotations

import io
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from stepgraph.core.wording import counted
from stepgraph.engine.call.session import Session

_NO_BACKEND = "not chosen yet"
_WIDTH = 100
"""Columns of a printed report, if neither the terminal nor the variable COLUMNS says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport(ABC):
    """The state of something graphed. `print(report)` shows a table, `report.to_dict()` is for machines."""

    backend: str = _NO_BACKEND
    capture_seconds: float = 0.0
    """Time spent capturing."""
    pool_bytes: int = 0
    """Memory of the graphs: activations, results, gradients and tensors inside a graph."""
    static_bytes: int = 0
    """Memory at the graphs' edges: arguments, and gradients of results."""
    audits: int = 0
    """How often a call was recorded again and compared with the graph in use."""
    equality: str | None = None
    """The facts known about equality with eager, and their checks; None if nothing was replayed."""

    refused: dict[str, int] = field(default_factory=dict)
    """Calls that raised an error of stepgraph, by its rule."""

    counted: ClassVar[str] = "calls"
    derived: ClassVar[tuple[str, ...]] = ("verdict",)
    """The noun that the verdict counts, and the properties that `to_dict` adds to the fields."""

    @abstractmethod
    def tally(self) -> tuple[int, Mapping[str, int]]:
        """Return the number of replayed calls, and of others by reason. A reason with 0 applies to all calls."""

    @abstractmethod
    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the subject of the report, and the rows of its table; rows with an empty text are left out."""

    @property
    def verdict(self) -> str:
        """The share of replayed calls, and the main reason for the others."""
        replays, reasons = self.tally()
        rest, refused = sum(reasons.values()), sum(self.refused.values())
        if not replays + rest + refused:
            return next((f"no graphs, all calls run eagerly: {why}" for why in reasons), f"no {self.counted} yet")
        share = f"{replays} of {counted(replays + rest + refused, self.counted)} replayed"
        if refused:
            share += f"; {refused} refused with an error [{max(self.refused, key=lambda rule: self.refused[rule])}]"
        if not rest:
            return share
        why, count = max(reasons.items(), key=lambda item: (item[0] != "warm-up", item[1]))  # warm-up is expected
        return f"{share}; {rest} ran eagerly" + (f": {why}" if count == rest else f", {count} of them: {why}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = asdict(self) | {name: getattr(self, name) for name in self.derived}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        (_, reasons), (subject, facts) = self.tally(), self.facts()
        memory = [f"{name} {size_of(n)}" for name, n in (("pool", self.pool_bytes), ("static", self.static_bytes)) if n]
        rows = [
            ("ran eagerly", with_counts(reasons) if len(reasons) > 1 else ""),
            ("refused", with_counts(self.refused) if len(self.refused) > 1 else ""),
            *facts,
            ("capture time", f"{self.capture_seconds:.3f} s" if self.capture_seconds else ""),
            ("memory", ", ".join(memory)),
            ("audits", str(self.audits or "")),
            ("equal to eager", self.equality or ""),
        ]
        title = subject if self.backend == _NO_BACKEND else f"{subject} on {self.backend}"
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            if text:
                table.add_row(Text(name), Text(text))  # `Text`, so that brackets are not read as markup
        yield Text(self.verdict, style="bold")
        if table.row_count:
            yield table

    def __str__(self) -> str:
        return render(self)


def render(report: RenderableType, width: int | None = None) -> str:
    """Return a report as the text that `print` writes to this terminal, or to one of another width."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # where this will be printed
    text = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace", newline="")
    Console(file=text, width=width or shutil.get_terminal_size((_WIDTH, 24)).columns).print(report)
    text.seek(0)
    return text.read().rstrip()


def backend_name(session: Session) -> str:
    return session.backend.name if session.has_backend else _NO_BACKEND


def with_counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.items())


def outline(what: str, calls: int, replays: int, graphs: int, *, is_closed: bool) -> str:
    """Make the `repr` of something graphed."""
    counts = ", ".join((counted(calls, "calls"), counted(replays, "replays"), counted(graphs, "graphs")))
    return f"<{what}: {counts}{', closed' if is_closed else ''}>"


def sum_known(counts: Sequence[int | None]) -> int | None:
    """Return the sum of counts, or None if one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def size_of(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**17 else f"{count / 2**10:.1f} KiB"
