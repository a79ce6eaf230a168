"""A report has the counts of the graphed stages of a rank, one row for each, as text or as a dict."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from stepgraph.core.wording import quantities
from stepgraph.engine.call.report import GraphReport, with_counts


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport(GraphReport):
    """The state of a rank's graphed stages. `print(report)` shows it, `report.to_dict()` is for machines."""

    rows: tuple[StageRow, ...]
    steps: dict[str, int]
    """The number of replayed steps, and of others by reason."""
    recaptures: dict[str, int]
    """The reasons why graphs were captured again."""
    refused: dict[str, int]
    """Steps that raised an error of stepgraph, by rule."""
    order: int
    """The number of entries in the order of a step."""
    num_buffers: int
    """Sets of static arguments, shared by all microbatches."""

    counted = "steps"

    def tally(self) -> tuple[int, dict[str, int]]:
        return self.steps.get("replay", 0), {why: count for why, count in self.steps.items() if why != "replay"}

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        return "graphed stages", [
            *((f"stage {row.stage}", quantities(**asdict(row) | {"stage": 0})) for row in self.rows),
            ("order", quantities(turns=self.order, argument_sets=self.num_buffers)),
            ("captured again", with_counts(self.recaptures)),
            ("refused", with_counts(self.refused)),
        ]
