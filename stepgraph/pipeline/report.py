"""A report counts what happened to the graphed stages of a rank: one row for each, as text or as a dict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
    audits: int = 0
    """How often the stages were recorded again and compared."""
    equality: str = ""
    """What is known of equality with eager."""

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
        lines += [f"  equal to eager: {self.equality}"]
        return "\n".join(lines)
