"""What `stepgraph check` reports: findings, each at one line under one rule, and a verdict on which API fits.

All of it is decided here, without torch, from what was seen. A finding belongs to one of the three demands on a step
that is captured: GPU-only (a replay runs no Python: what only Python does vanishes), sync-free (the host never waits
for the device), static (the same operations on the same memory each time). What was seen outside the step is listed
too, and does not count.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import Location
from stepgraph.core.wording import counted

__all__ = ["GROUPS", "Api", "Finding", "Ledger", "Seen", "StepShape", "Verdict", "collect", "judge"]

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "GPU-only": (
            *("host-file", "tokenizer", "host-random", "host-print", "host-logging", "host-value", "own-change"),
            *("iterator", "reseed"),
        ),
        "sync-free": ("host-read", "library-call"),
        "static": (
            *("varying-shape", "varying-number", "varying-operations", "moving-address", "host-data"),
            *("legacy-stream", "other-thread", "optimizer-closure"),
        ),
    }
)
"""The rules that `check` applies, by the demand that they belong to."""
MAX_NAMED = 6
"""Modules that a reason names under one rule."""
MIN_STEPS = 3
"""Steps that must be seen: the first may do what only a first one does, and two are compared."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Something that the script did, once."""

    rule: str
    what: str
    where: Location | None
    inside: str = ""
    """The function of a library that the line called, if that did it."""
    module: str = ""
    """The module in whose forward it happened."""
    step: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that breaks a rule."""

    rule: str
    group: str
    what: str
    where: Location | None
    inside: str
    module: str
    times: int
    steps: int
    """In how many of the watched steps."""
    why: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        place = self.where
        return {
            "rule": self.rule,
            "group": self.group,
            "what": self.what,
            "file": place.file if place is not None else None,
            "line": place.line if place is not None else None,
            "function": place.function if place is not None else None,
            "source": place.source if place is not None else None,
            "inside": self.inside,
            "module": self.module,
            "times": self.times,
            "steps": self.steps,
            "why": self.why,
            "fix": self.fix,
        }


class Ledger:
    """Sorts what is seen into inside and outside of the step, which is known only later.

    What was seen is pending until the step reaches over it. Between a backward and the next forward at a line that has
    run in this step already stands the end of one microbatch and the loading of the next: outside, too. What runs in
    the function of which each call is a step is inside, also before the first forward and after the last optimizer.
    """

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.outside: list[Any] = []
        self._pending: list[tuple[Any, bool]] = []
        self._mark: int | None = None

    def note(self, seen: Any, *, in_function: bool = False) -> None:
        self._pending.append((seen, in_function))

    def backward_done(self) -> None:
        """A backward has returned: the work of a microbatch may be over."""
        self._mark = len(self._pending)

    def microbatch_begins(self) -> None:
        """The loop came round within the step."""
        if self._mark is not None:
            self._sort(self._mark)
        self._mark = None

    def reach(self) -> None:
        """All that is pending is inside the step."""
        self.inside += [seen for seen, _ in self._pending]
        self._pending.clear()
        self._mark = None

    def end(self) -> None:
        """All that is pending is outside the step, or in its function."""
        self._sort(0)
        self._mark = None

    def _sort(self, first: int) -> None:
        for seen, in_function in self._pending[first:]:
            (self.inside if in_function else self.outside).append(seen)
        del self._pending[first:]


def collect(seen: Iterable[Seen]) -> list[Finding]:
    """Make one finding of all that was seen at one line under one rule, in the order of first sight.

    What a library did in the first step alone, such as filling a cache, is no finding. Neither is memory that one step
    made and all later ones read: it moves only if another step has made some in its place.
    """
    found: dict[tuple[Any, ...], list[Seen]] = {}
    for one in seen:
        place = one.where
        apart = one.what if place is None else ""
        key = (one.rule, (place.file, place.line) if place is not None else None, apart)
        found.setdefault(key, []).append(one)
    return [_finding(group) for group in found.values() if not _is_of_one_step(group)]


def _is_of_one_step(seen: Sequence[Seen]) -> bool:
    if seen[0].rule == "moving-address":
        return len({one.step for one in seen}) < 2
    return all(one.inside and one.step == 0 for one in seen)


def _finding(seen: Sequence[Seen]) -> Finding:
    first = seen[0]
    why, fix = entry(first.rule).reason_and_fix()
    group = next((name for name, rules in GROUPS.items() if first.rule in rules), "static")  # a failed capture's
    steps = len({one.step for one in seen})
    return Finding(first.rule, group, first.what, first.where, first.inside, first.module, len(seen), steps, why, fix)


class Api(enum.Enum):
    """What a script can use."""

    CAPTURE = "capture"
    """The whole step."""
    MODULES = "graph_modules"
    """Parts of the model."""
    NOTHING = "nothing"
    UNKNOWN = "cannot judge"


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is known about the step itself."""

    steps: int = 0
    """How many were watched."""
    function: str = ""
    """The function that a call of is a step, such as `train_step` or `Trainer.step`; empty if a loop's body is one."""
    parameters: tuple[str, ...] = ()
    """The function's parameters."""
    loop: Location | None = None
    """The line where the step begins."""
    models: tuple[str, ...] = ()
    """The user's names of the models."""
    clean_modules: tuple[str, ...] = ()
    """Paths of modules that ran in the step without a finding, outermost only."""
    unfit: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Modules that `graph_modules` cannot take, outermost only, by the user's names; each with the rule."""
    library: str = ""
    """The library whose loop runs the step, such as `lightning`."""
    replays: int = 0
    """How often a real capture of the function was replayed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which API fits, why, and what to paste."""

    api: Api
    reason: str
    paste: tuple[str, ...] = field(default=())

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        return {
            Api.CAPTURE: "The whole step can be captured: stepgraph.capture fits.",
            Api.MODULES: "The whole step cannot be captured as it is; modules can: stepgraph.graph_modules fits.",
            Api.NOTHING: "Nothing can be captured as it is.",
            Api.UNKNOWN: "It cannot be judged.",
        }[self.api]


def judge(findings: Sequence[Finding], shape: StepShape, unknown: Sequence[str] = ()) -> Verdict:
    """Decide which API fits."""
    if unknown:
        return Verdict(Api.UNKNOWN, "; ".join(unknown) + ".")
    if shape.steps == 0:
        return Verdict(Api.UNKNOWN, "no training step was seen: no optimizer stepped after a module's forward.")
    if shape.steps < MIN_STEPS:
        reason = f"{shape.steps} step{'s' * (shape.steps > 1)} ran, and {MIN_STEPS} are needed to compare."
        return Verdict(Api.UNKNOWN, reason)
    if shape.library:
        reason = f"the loop is {shape.library}'s, so no function of yours is the whole step; the model is yours."
        return _modules(findings, shape, reason)
    if not findings:
        reason = f"{counted(shape.steps, 'steps')} ran the same operations. "
        reason += "Nothing waited for the device or was left to Python."
        reason += f" The step was captured, and replayed {counted(shape.replays, 'times')}." if shape.replays else ""
        return Verdict(Api.CAPTURE, reason, _paste_capture(shape))
    lines = len({(f.where.file, f.where.line) if f.where is not None else None for f in findings})
    reason = f"{counted(len(findings), 'findings')} at {counted(lines, 'lines')} of the step"
    return _modules(findings, shape, reason + "; once they are fixed, stepgraph.capture fits.")


def _modules(findings: Sequence[Finding], shape: StepShape, reason: str) -> Verdict:
    if shape.unfit:
        reason += f" graph_modules cannot take {'; '.join(_named(shape.unfit))}."
    if not shape.clean_modules:
        return Verdict(Api.NOTHING, reason if findings else f"{reason} No module ran in the step.")
    return Verdict(Api.MODULES, reason, _paste_modules(shape))


def _named(unfit: Mapping[str, str]) -> Iterator[str]:
    """Modules by the rule that is against them."""
    for rule in dict.fromkeys(unfit.values()):
        names = [name for name, other in unfit.items() if other == rule]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        yield f"{', '.join(names[:MAX_NAMED])}{more} [{rule}]"


def _paste_capture(shape: StepShape) -> tuple[str, ...]:
    if shape.function:
        if "." in shape.function:
            owner, _, name = shape.function.rpartition(".")
            owner = owner[0].lower() + owner[1:]
            return ("import stepgraph", f"{owner}.{name} = stepgraph.capture({owner}.{name})  # before the loop")
        return ("import stepgraph", f"{shape.function} = stepgraph.capture({shape.function})  # before the loop")
    line = f"line {shape.loop.line}" if shape.loop is not None else "the forward"
    return (
        "import stepgraph",
        "@stepgraph.capture",
        "def train_step(batch):  # the body of your loop:",
        f"    ...                 # from {line} to the last call of an optimizer",
        "    return loss",
    )


def _paste_modules(shape: StepShape) -> tuple[str, ...]:
    model = shape.models[0] if shape.models else "model"
    scope = ", ".join(f'"{path or "forward"}"' for path in shape.clean_modules)
    return ("import stepgraph", f"stepgraph.graph_modules({model}, [{scope}])  # before the loop")
