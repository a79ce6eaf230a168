"""The optimizers of a script's step: which of them a captured step leaves between its graphs, and what they cost.

An optimizer between graphs is launched kernel by kernel, as in eager. Where an optimizer runs is the engine's decision
(`optim.optimizer.place`), asked here for the script's own ones. A number that the script changes from step to step,
such as a scheduled learning rate, moves an optimizer out of the graph, so numbers are compared with those of the first
step that was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.autograd.profiler import record_function
from torch.optim.optimizer import Optimizer

from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.engine.optim.optimizer import place
from stepgraph.tools.advice.parts import MARK, StepTrace
from stepgraph.tools.script.steps import steps_unwatched

__all__ = ["SteppedOptimizers"]


class SteppedOptimizers:
    """The optimizers that were seen to step."""

    def __init__(self) -> None:
        self._seen: list[Optimizer] = []
        self._numbers: list[dict[str, Any]] = []
        self._moved: dict[int, str] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the optimizers that step in the block, and which of their numbers change."""

        def begins(optimizer: Optimizer) -> None:
            self._note(optimizer)

        with at_optimizer_steps(begins):
            yield

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Note them, and mark each of their steps for the profiler."""
        open_marks: list[record_function] = []

        def begins(optimizer: Optimizer) -> None:
            open_marks.append(record_function(_mark_of(self._note(optimizer))))
            open_marks[-1].__enter__()

        def ends(optimizer: Optimizer, result: Any) -> None:
            if open_marks:
                open_marks.pop().__exit__(None, None, None)

        with at_optimizer_steps(begins, ends):
            yield

    def _note(self, optimizer: Optimizer) -> int:
        index = next((i for i, one in enumerate(self._seen) if one is optimizer), len(self._seen))
        now = _numbers_of(optimizer)
        if index == len(self._seen):
            self._seen.append(optimizer)
            self._numbers.append(now)
        before = self._numbers[index]
        changed = [name for name, value in now.items() if name in before and before[name] != value]
        if changed:
            self._moved.setdefault(index, changed[0])
        return index

    def result(self, trace: StepTrace) -> list[dict[str, Any]]:
        """Return each optimizer as plain values: where it runs, why, and its share of a profiled step."""
        found = []
        with steps_unwatched():
            for index, optimizer in enumerate(self._seen):
                where = place(optimizer, "auto", self._moved.get(index))
                share = trace.share({_mark_of(index)})
                found.append(
                    {
                        "name": type(optimizer).__name__,
                        "inside": where.inside,
                        "reason": where.reason,
                        "calls": share.calls,
                        "host_fraction": share.host_us / trace.host_us if trace.host_us else 0.0,
                        "kernels": share.kernels,
                    }
                )
        return found


def _mark_of(index: int) -> str:
    return f"{MARK}optimizer:{index}"


def _numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """The plain numbers of an optimizer's groups; a tensor is read at each replay."""
    return {
        f"param_groups[{index}]['{name}']": value
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, tuple))
    }
