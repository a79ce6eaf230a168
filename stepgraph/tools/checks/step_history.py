"""Compares the steps of a script with each other: the operations that ran, and the lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stepgraph.core.errors import Location
from stepgraph.core.wording import counted
from stepgraph.engine.oplog import Difference, Log, differences
from stepgraph.tools.checks.findings import Seen
from stepgraph.tools.checks.step_state import Line

__all__ = ["StepHistory", "branch_of", "changes"]


class StepHistory:
    """The logs of all steps, one for each microbatch, and the lines that ran in them, in order."""

    def __init__(self) -> None:
        self._logs: list[Sequence[Log]] = []
        self._paths: list[Sequence[Line]] = []

    def __len__(self) -> int:
        return len(self._logs)

    def add(self, logs: Sequence[Log], lines: Sequence[Line]) -> None:
        """Add a step."""
        self._logs.append(logs)
        self._paths.append(lines)

    def varying(self, first: int, module_at: Callable[[Location | None], str]) -> list[Seen]:
        """What changes from step to step, from the step with the number `first` on."""
        found = []
        for step in range(first + 1, len(self)):
            for rule, difference in changes(self._logs[step - 1], self._logs[step]):
                where = difference.where
                if rule == "varying-operations":
                    where = branch_of(self._paths[step - 1], self._paths[step]) or where
                found.append(Seen(rule, _told(rule, difference), where, "", module_at(where), step))
        return found


def changes(before: Sequence[Log], now: Sequence[Log]) -> Iterator[tuple[str, Difference]]:
    """Compare two steps: yields the rule that each difference breaks.

    What follows from another shape, or from another operation, is not reported. A shape that depends on data, as of
    `x[mask]`, is not reported either: it is a host read, and was refused as that.
    """
    for one, two in zip(before, now, strict=False):
        for found in differences(one, two):
            if found.kind == "value":
                yield "varying-number", found
            elif found.kind != "tensor":
                if found.kind != "result shape" or not found.before.startswith("a result"):
                    yield "varying-operations" if found.kind == "operation" else "varying-shape", found
                return
    if len(before) != len(now):
        told = [counted(len(logs), "microbatches") for logs in (before, now)]
        yield "varying-operations", Difference(0, "the step", None, *told)


def branch_of(before: Sequence[Line], now: Sequence[Line]) -> Location | None:
    """The line after which two steps went different ways, or None if the same lines ran."""
    last = None
    for one, two in zip(before, now, strict=False):
        if one != two:
            return last
        last = Location(one[0].co_filename, one[1], one[0].co_name)
    return last if len(before) != len(now) else None


def _told(rule: str, found: Difference) -> str:
    if rule == "varying-operations":
        return f"one step runs {found.before} where another runs {found.now}"
    return f"{found.operation.removesuffix('.default')}: {found.before}, then {found.now}"
