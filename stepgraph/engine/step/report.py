"""A report counts what happens to a captured step, and shows it as a table or as a dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgraph.core.wording import quantities
from stepgraph.engine.backends.native.library import native_row
from stepgraph.engine.call.proof import Shown
from stepgraph.engine.call.report import GraphReport, backend_name, sum_known, with_counts
from stepgraph.engine.call.session import Session
from stepgraph.engine.step.options import StepOptions
from stepgraph.engine.step.site import Site

_NOT_COMPARED = "not known: no graph is left (docs/equality.md shows how to compare your program)"
_SHOWN = {
    Shown.EQUAL: "{} graph{} with the operations of an eager call (kernels past torch's dispatcher are not seen)",
    Shown.OTHER_PATH: "{} graph{} of another path than eager calls take: compare the results (docs/equality.md)",
    Shown.LATER: "{} graph{} to be compared at the first call",
    Shown.NOT: "{} graph{} without an eager call to compare with (docs/equality.md)",
}
_MAX_NAMED = 3
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
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that raised an error of stepgraph, by its rule."""

    @property
    def calls(self) -> int:
        """Calls so far, replayed or eager."""
        return self.replays + self.eager_reasons.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(GraphReport):
    """The state of a captured step. `print(report)` shows a table, `report.to_dict()` is for machines."""

    step: str
    graphs: int
    """Captured signatures, each a chain of segments."""
    segments: int
    """Segments of all chains: graphs, and eager calls between them."""
    nodes: int | None
    """Nodes of all graphs; None if they cannot be counted."""
    captures: int
    recapture_reasons: dict[str, int]
    """Why graphs were dropped and captured again."""
    replays: int
    eager_calls: int
    eager_reasons: dict[str, int]
    signatures: tuple[str, ...]
    """Each signature with all its tensors and values."""
    outlines: tuple[str, ...]
    """Each signature as the table shows it: long lists are counted."""
    chains: tuple[str, ...]
    """Each signature's segments in order."""
    optimizers: dict[str, str]
    """Where each optimizer runs, and why."""
    guards: str
    """The implementation of the check before each replay: "C++" or "Python"."""
    modules: GraphReport | None = None
    """With `on_error="modules"`, after a failed capture: the graphs of modules in eager calls of the step."""

    derived = ("verdict", "recaptures")

    @property
    def recaptures(self) -> int:
        """Number of captures that replaced earlier ones."""
        return sum(self.recapture_reasons.values())

    def tally(self) -> tuple[int, dict[str, int]]:
        return self.replays, self.eager_reasons

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        counts = quantities(graphs=self.graphs, segments=self.segments, nodes=self.nodes, captures=self.captures)
        cheaper = "in Python; `stepgraph native --build` makes them cheaper"
        return self.step, [
            ("graphs", counts + (", nodes not counted" if self.graphs and self.nodes is None else "")),
            ("captured again", with_counts(self.recapture_reasons)),
            *(("signature", f"{s}\n{c}") for s, c in zip(self.outlines, self.chains, strict=True)),
            *self.optimizers.items(),
            ("guards", "" if not self.graphs else "in C++" if self.guards == "C++" else cheaper),
            *(self.modules.facts()[1] if self.modules is not None else ()),
        ]

    @property
    def verdict(self) -> str:
        found = GraphReport.verdict.fget(self)  # type: ignore[attr-defined]
        return found if self.modules is None else f"{found}; in eager calls: {self.modules.verdict}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = GraphReport.to_dict(self)
        return values | {"modules": None if self.modules is None else self.modules.to_dict()}


def report_of(
    step: str,
    session: Session,
    sites: Sequence[Site],
    counts: Counts,
    optimizers: dict[str, str],
    options: StepOptions,
) -> Report:
    """Make the report of a captured step."""
    calls = [call for site in sites for call in site.calls]
    return Report(
        step=step,
        backend=backend_name(session),
        graphs=len(calls),
        segments=sum(len(call.parts.chain.links) for call in calls),
        nodes=sum_known([call.parts.chain.nodes for call in calls]),
        captures=counts.captures,
        audits=counts.audits,
        recapture_reasons=dict(counts.recapture_reasons),
        replays=counts.replays,
        eager_calls=counts.eager_reasons.total(),
        eager_reasons=dict(counts.eager_reasons),
        refused=dict(counts.refused),
        capture_seconds=counts.capture_seconds,
        pool_bytes=session.pool_bytes(),
        static_bytes=sum(call.parts.inputs.num_bytes for call in calls),
        signatures=tuple(call.signature.describe() for call in calls),
        outlines=tuple(call.signature.describe(brief=True) for call in calls),
        chains=tuple(call.parts.chain.describe() for call in calls),
        optimizers=optimizers,
        equality=_equality(sites, options) if calls else _NOT_COMPARED if counts.replays else None,
        guards="Python" if native_row() is None else "C++",
    )


def _equality(sites: Sequence[Site], options: StepOptions) -> str:
    """Describe what is known about equality with eager, and by which check."""
    by_outcome = Counter(call.proof.shown for site in sites for call in site.calls)
    facts = [_SHOWN[shown].format(count, "" if count == 1 else "s") for shown, count in by_outcome.items()]
    facts += sorted({call.unlooked or "" for site in sites for call in site.calls} - {""})
    left = sorted({change.name for site in sites for _, change in site.eager.own_changes})
    if left:
        more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
        facts.append(f"replays leave alone what a library counts: {', '.join(left[:_MAX_NAMED])}{more}")
    return "; ".join(facts) + (_CAPTURABLE if options.optimizer == "capturable" else "")
