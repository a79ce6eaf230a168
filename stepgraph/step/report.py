"""A report counts what happens to a captured step, and shows it as a table or as a dict."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from stepgraph.native.library import native_row
from stepgraph.session.proof import Shown
from stepgraph.session.session import Session
from stepgraph.step.options import StepOptions
from stepgraph.step.site import Site

_NOT_COMPARED = "not known: no graph is left (docs/equality.md: how to compare your program)"
_SHOWN = {
    Shown.EQUAL: "{} graph{} with the operations of an eager call (kernels past torch's dispatcher are not seen)",
    Shown.OTHER_PATH: "{} graph{} of another path than eager calls take: compare the results (docs/equality.md)",
    Shown.LATER: "{} graph{} to be compared at the first call",
    Shown.NOT: "{} graph{} without an eager call to compare with (docs/equality.md)",
}
_MAX_TOLD = 3
_CAPTURABLE = "; compare with the step in eager with its optimizers switched to capturable=True and a float32 lr"


@dataclass(slots=True)
class Counts:
    """The running counts of one captured step."""

    captures: int = 0
    replays: int = 0
    audits: int = 0
    recapture_reasons: Counter[str] = field(default_factory=Counter)
    capture_seconds: float = 0.0
    eager_reasons: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        """Calls so far, whichever way each went."""
        return self.replays + self.eager_reasons.total()


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a captured step. `print(report)` shows a table, `report.to_dict()` is for machines."""

    step: str
    backend: str
    graphs: int
    """Signatures that are captured, each as a chain of segments."""
    segments: int
    """Segments of all chains: graphs, and eager calls between them."""
    nodes: int | None
    """Nodes of all graphs; None where they cannot be counted."""
    captures: int
    audits: int
    """How often a call was recorded again and compared with what is replayed."""
    recapture_reasons: dict[str, int]
    """Why graphs were dropped and captured anew."""
    replays: int
    eager_calls: int
    eager_reasons: dict[str, int]
    capture_seconds: float
    pool_bytes: int
    static_bytes: int
    signatures: tuple[str, ...]
    chains: tuple[str, ...]
    """Each signature's segments in order."""
    optimizers: dict[str, str]
    """Where each optimizer runs, and why."""
    equality: str | None
    """What is known about equality with eager, and by which check; None where nothing was replayed."""
    guards: str
    """How it is asked before each replay whether all is as it was: in "C++" or in "Python"."""

    @property
    def recaptures(self) -> int:
        """How many captures took the place of earlier ones."""
        return sum(self.recapture_reasons.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "step": self.step,
            "backend": self.backend,
            "graphs": self.graphs,
            "segments": self.segments,
            "nodes": self.nodes,
            "captures": self.captures,
            "audits": self.audits,
            "recaptures": self.recaptures,
            "recapture_reasons": dict(self.recapture_reasons),
            "replays": self.replays,
            "eager_calls": self.eager_calls,
            "eager_reasons": dict(self.eager_reasons),
            "capture_seconds": self.capture_seconds,
            "pool_bytes": self.pool_bytes,
            "static_bytes": self.static_bytes,
            "signatures": list(self.signatures),
            "chains": list(self.chains),
            "optimizers": dict(self.optimizers),
            "equality": self.equality,
            "guards": self.guards,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"{self.step} on {self.backend}", title_justify="left", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.eager_reasons.items())
        rows = [
            ("graphs", f"{self.graphs} ({self.captures} captures, {self.recaptures} recaptures)"),
            ("audits", str(self.audits)),
            *(("recaptured for", f"{reason}: {count}") for reason, count in self.recapture_reasons.items()),
            ("segments", str(self.segments)),
            ("nodes", "not counted" if self.nodes is None else str(self.nodes)),
            ("replays", str(self.replays)),
            ("eager calls", f"{self.eager_calls}" + (f" ({reasons})" if reasons else "")),
            ("capture time", f"{self.capture_seconds:.3f} s"),
            ("pool", f"{self.pool_bytes / 2**20:.1f} MiB"),
            ("static inputs", f"{self.static_bytes / 2**20:.1f} MiB"),
            *(("signature", f"{s}\n{c}") for s, c in zip(self.signatures, self.chains, strict=True)),
            *self.optimizers.items(),
            *([("equal to eager", self.equality)] if self.equality is not None else []),
            (
                "guards",
                "in C++" if self.guards == "C++" else "in Python; `stepgraph native --build` makes them cheaper",
            ),
        ]
        for name, value in rows:
            table.add_row(Text(name), Text(value))  # as text: brackets are no markup here
        yield table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue().rstrip()


def report_of(
    step: str, session: Session, sites: Sequence[Site], counts: Counts, optimizers: dict[str, str], options: StepOptions
) -> Report:
    """The report of a captured step at this moment."""
    calls = [call for site in sites for call in site.calls]
    nodes = [call.chain.nodes for call in calls]
    known_nodes = [n for n in nodes if n is not None]
    return Report(
        step=step,
        backend=session.backend.name if session.has_backend else "not chosen yet",
        graphs=len(calls),
        segments=sum(len(call.chain.links) for call in calls),
        nodes=sum(known_nodes) if len(known_nodes) == len(nodes) else None,
        captures=counts.captures,
        audits=counts.audits,
        recapture_reasons=dict(counts.recapture_reasons),
        replays=counts.replays,
        eager_calls=counts.eager_reasons.total(),
        eager_reasons=dict(counts.eager_reasons),
        capture_seconds=counts.capture_seconds,
        pool_bytes=session.pool_bytes(),
        static_bytes=sum(call.inputs.num_bytes for call in calls),
        signatures=tuple(call.signature.describe() for call in calls),
        chains=tuple(call.chain.describe() for call in calls),
        optimizers=optimizers,
        equality=_equality(sites, options) if calls else _NOT_COMPARED if counts.replays else None,
        guards="Python" if native_row() is None else "C++",
    )


def _equality(sites: Sequence[Site], options: StepOptions) -> str:
    """What is known about equality with eager, and by which check."""
    by_outcome = Counter(call.proof.shown for site in sites for call in site.calls)
    told = [_SHOWN[shown].format(count, "" if count == 1 else "s") for shown, count in by_outcome.items()]
    told += sorted({call.guards.values.unlooked or "" for site in sites for call in site.calls} - {""})
    left = sorted({name for site in sites for name in site.eager.own_changes})
    if left:
        more = f" and {len(left) - _MAX_TOLD} more" if len(left) > _MAX_TOLD else ""
        told.append(f"replays leave alone what a library counts: {', '.join(left[:_MAX_TOLD])}{more}")
    return "; ".join(told) + (_CAPTURABLE if options.optimizer == "capturable" else "")
