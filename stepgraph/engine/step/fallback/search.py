"""The search for the largest set of modules that can be captured. It is pure: a function says what can be captured.

Modules form a tree. A graph covers a module with all that it calls, so a larger module is better than its parts: one
launch in place of several, and the work between the parts is in the graph too. The search goes from the leaves to the
root and tries each module once. A module that can be captured replaces those inside it. What remains is the largest
set: the outermost modules that can be captured, none inside another.

Two kinds of obstacles are distinguished. What a module *does* (it reads a value on the host), the module around it does
too: such a refusal spreads, and the modules around are not tried. What stands at a module's *edge* (an argument that no
signature can be made of, a result that changes in kind) need not stand at the edge of the one around it, which is
tried. So there is at most one trial a module. Time is bounded by a budget: modules that the search does not reach in
time stay eager.

Example:
    >>> tree = [Node("", (Node("embed"), Node("experts")))]
    >>> search(tree, {"experts": Refusal("reads a value")}.get, budget=60.0).chosen
    ('embed',)
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

NOT_CALLED = "it is not called in the step"


@dataclass(frozen=True, slots=True)
class Node:
    """A module and the modules inside it."""

    path: str
    parts: tuple[Node, ...] = ()
    is_called: bool = True
    """False for a container (`nn.ModuleList`), and for a module that the step does not call: it is never tried."""

    def paths(self) -> Iterator[str]:
        """The path of this module, and of all inside it."""
        yield self.path
        for part in self.parts:
            yield from part.paths()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a module cannot be captured."""

    reason: str
    spreads: bool = True
    """True if a module around this one has the same obstacle."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The modules to capture, and the others."""

    chosen: tuple[str, ...] = ()
    """The outermost modules that can be captured, in the order of the model."""
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """All modules that stay eager, with the reason."""
    trials: int = 0

    def causes(self) -> dict[str, str]:
        """Modules refused for something they do themselves, without those that only contain one or are never called."""
        return {p: why for p, why in self.refused.items() if why != NOT_CALLED and not why.startswith(_CONTAINS)}

    def scope(self) -> list[str]:
        """The chosen modules as a scope for `graph_modules`, with `*` for numbers where that names the same ones.

        The whole model is named by its method.
        """
        return [path or "forward" for path in patterns(self.chosen, {*self.chosen, *self.refused})]


_CONTAINS = "it contains "


def search(
    tree: Sequence[Node],
    can_capture: Callable[[str], Refusal | None],
    budget: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> Partition:
    """Find the largest set of modules that can be captured.

    `can_capture` tries one module: it returns None if the module can be captured. No trial begins when `budget` seconds
    have passed; None sets no limit.
    """
    job = _Search(can_capture, None if budget is None else clock() + budget, clock, budget)
    for node in tree:
        job.visit(node)
    return Partition(tuple(job.chosen), MappingProxyType(job.refused), job.trials)


class _Search:
    """The state of one search."""

    def __init__(
        self,
        can_capture: Callable[[str], Refusal | None],
        deadline: float | None,
        clock: Callable[[], float],
        budget: float | None,
    ) -> None:
        self._can_capture, self._deadline, self._clock, self._budget = can_capture, deadline, clock, budget
        self.chosen: list[str] = []
        self.refused: dict[str, str] = {}
        self.trials = 0

    def visit(self, node: Node) -> str | None:
        """Judge a module after all inside it. Return the path of a refusal that spreads to the module around it."""
        begin = len(self.chosen)
        blocking = [path for path in map(self.visit, node.parts) if path is not None]
        if not node.is_called:
            self.refused[node.path] = NOT_CALLED
            return blocking[0] if blocking else None
        if blocking:
            self.refused[node.path] = f"{_CONTAINS}`{blocking[0]}`"
            return blocking[0]
        if self._deadline is not None and self._clock() >= self._deadline:
            self.refused[node.path] = f"it was not tried: the search ended after {self._budget:g} s"
            return None
        self.trials += 1
        refusal = self._can_capture(node.path)
        if refusal is not None:
            self.refused[node.path] = refusal.reason
            return node.path if refusal.spreads else None
        del self.chosen[begin:]
        self.chosen.append(node.path)
        for path in node.paths():
            self.refused.pop(path, None)
        return None


def patterns(chosen: Sequence[str], paths: Collection[str]) -> list[str]:
    """Write paths with `*` in place of numbers, where the pattern matches chosen ones only, among all `paths`."""
    found: dict[str, None] = {}
    for path in chosen:
        pattern = ".".join("*" if segment.isdigit() else segment for segment in path.split("."))
        matched = {other for other in paths if matches(other, pattern)}
        found[pattern if matched <= set(chosen) and len(matched) > 1 else path] = None
    return list(found)


def matches(path: str, pattern: str) -> bool:
    """True if a pattern, with `*` for one segment, stands for a path."""
    segments, wanted = path.split("."), pattern.split(".")
    return len(segments) == len(wanted) and all(map(fnmatch.fnmatchcase, segments, wanted))
