"""What happened to the graphed stages of a rank: one row for each, as text or as a dict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.callables.stage import GraphedStages
    from stepgraph.capture.module_session import ModuleSession


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage."""

    stage: int
    """Its index in the pipeline."""
    graphs: int
    forwards: int
    """Forwards that were replayed."""
    backwards: int
    """Full backwards, and I parts of split ones."""
    weight_grads: int
    """W parts of split backwards."""
    eager_calls: int


@dataclass(frozen=True, slots=True)
class StageReport:
    """The state of a rank's graphed stages. `print(report)` shows it, `report.to_dict()` is for machines."""

    backend: str
    rows: tuple[StageRow, ...]
    steps: dict[str, int]
    """Steps that were replayed, and those that were not, by reason."""
    recaptures: dict[str, int]
    """Why graphs were captured again."""
    order: int
    """Entries of the order that each replayed step is checked against."""
    num_buffers: int
    """Sets of static arguments, shared by all microbatches."""
    static_bytes: int
    """Memory at the graphs' edges: arguments and incoming gradients."""
    pool_bytes: int
    capture_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"graphed stages on {self.backend}: captured in {self.capture_seconds:.3f} s, "
            f"pool {self.pool_bytes / 2**20:.1f} MiB, {self.num_buffers} sets of static arguments, "
            f"an order of {self.order}"
        ]
        for row in self.rows:
            lines.append(
                f"  stage {row.stage}: {row.graphs} graphs, {row.forwards} forwards, {row.backwards} backwards, "
                f"{row.weight_grads} weight gradients, {row.eager_calls} eager calls"
            )
        lines += [f"  steps: {', '.join(f'{why} {n}' for why, n in self.steps.items()) or 'none yet'}"]
        lines += [f"  captured again for {why}: {n}" for why, n in self.recaptures.items()]
        return "\n".join(lines)


def report_on(stages: GraphedStages, shared: ModuleSession) -> StageReport:
    """The report of a rank's stages at this moment."""
    rows = []
    for manager in stages.managers:
        runners, weights = manager.runners.values(), manager.weights.values()
        rows.append(
            StageRow(
                stage=manager.stage.stage_index,
                graphs=sum(1 + len(runner.backwards) for runner in runners) + len(weights),
                forwards=manager.forwards + sum(runner.forwards for runner in runners),
                backwards=manager.backwards + sum(runner.backward_runs for runner in runners),
                weight_grads=manager.weight_grads,
                eager_calls=manager.eager_reasons.total(),
            )
        )
    captured = stages.captured
    return StageReport(
        backend=shared.session.backend.name if shared.session.has_backend else "not chosen yet",
        rows=tuple(rows),
        steps=dict(stages.steps),
        recaptures=dict(stages.recaptures),
        order=len(stages.turn.entries),
        num_buffers=0 if captured is None else captured.num_buffers,
        static_bytes=0 if captured is None else captured.static_bytes,
        pool_bytes=shared.session.pool_bytes(),
        capture_seconds=shared.capture_seconds,
    )
