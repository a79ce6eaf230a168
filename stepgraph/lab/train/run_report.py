"""The end of a run in one record: what was trained, what was replayed, and why the rest was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from stepgraph.core.wording import counted
from stepgraph.engine.call.report import GraphReport


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of `pretrain` and `finetune`. `print(report)` is for people, `to_dict()` for machines."""

    implementation: str
    start: int
    """The iteration that the run began with; above 0 if it resumed."""
    step: int
    """Iterations done, those of earlier runs included."""
    losses: dict[int, float]
    """The loss of each iteration that was trained, by its number counted from 1."""
    eval_losses: dict[int, float]
    skipped: tuple[int, ...]
    """Iterations whose data was read and not trained on."""
    replays: int
    """Replays of graphs: of iterations, or of layers."""
    graphed: int
    """Layers, parts or iterations with graphs."""
    capture_seconds: float
    memory_before: int | None
    memory_after: int | None
    """Bytes in use on the device before and after the capture; None where they are not counted."""
    eager_reasons: Mapping[str, int]
    """Iterations, training and evaluation, that ran eagerly, by reason."""
    tokens_per_s: float
    is_done: bool = False
    """Whether the run resumed at, or behind, its last iteration."""
    graphs: GraphReport | None = field(default=None, repr=False)
    """The report of the graphs themselves."""

    @property
    def final_loss(self) -> float | None:
        return self.losses[max(self.losses)] if self.losses else None

    @property
    def verdict(self) -> str:
        """One line on whether graphs were used."""
        if self.start == self.step and self.is_done:
            return f"nothing was left to train after iteration {self.step}; a larger train.train_iters trains on"
        if self.replays:
            replays, parts = counted(self.replays, "replays"), counted(self.graphed, "graphed parts")
            return f"{replays} of {parts} ({self.implementation})"
        why = max(self.eager_reasons.items(), key=lambda item: (item[0] != "warm-up", item[1]), default=("no steps", 0))
        return f"NOTHING WAS REPLAYED: all iterations ran eagerly ({why[0]})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        names = [name for name in self.__slots__ if name != "graphs"]
        values = {name: getattr(self, name) for name in names}
        values |= {"skipped": list(self.skipped), "eager_reasons": dict(self.eager_reasons)}
        values["graphs"] = self.graphs.to_dict() if self.graphs is not None else None
        return values | {"verdict": self.verdict, "final_loss": self.final_loss}

    @property
    def summary(self) -> str:
        """A few lines on the run, without the table of its graphs."""
        lines = [f"{counted(len(self.losses), 'iterations')} trained, {self.start} to {self.step}; {self.verdict}"]
        if self.final_loss is not None:
            lines.append(f"last loss {self.final_loss:.4f}, {self.tokens_per_s:,.0f} tokens/s")
        if self.eager_reasons:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.eager_reasons.items())
            lines.append(f"ran eagerly: {reasons}")
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.summary)
        if self.graphs is not None:
            yield self.graphs

    def __str__(self) -> str:
        return self.summary if self.graphs is None else f"{self.summary}\n{self.graphs}"
