"""The parts of a model that each scope would capture, and their share of a profiled step.

Parts are found as `graph_modules` finds them: by the words of the scope registry where the model has layers of known
classes, else as repeated layers (`layers.*`), else as the model's children. In one profiled step each call of a part is
marked. The marks tell the host time and the kernels of its forward. Its backward is told by sequence numbers: autograd
gives each node the number of the operation that made it, so the node belongs to the part in whose mark that operation
ran. Nothing of the step is changed for this.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.parts.modules.scopes import WORDS, Part, ScopeRegistry
from stepgraph.tools.advice.decide import STAGE
from stepgraph.tools.timeline import union_length

MARK = "stepgraph:"
BEGIN, REACH = f"{MARK}begin", f"{MARK}reach"
"""Marks of where a step begins, and of each place that it has reached."""
LAYERS = "layers"
"""The scope of whole layers."""
_EVALUATES = "autograd::engine::evaluate_function: "
_MAX_CHILDREN = 8


@dataclass(frozen=True, slots=True)
class Scope:
    """A scope of a model, and the parts that it means."""

    name: str
    words: tuple[str, ...]
    """What `graph_modules` takes for it; empty for whole layers of a known class."""
    parts: tuple[Part, ...]
    is_child: bool = False
    """Whether it is one child of a model in which nothing repeats."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(part.path for part in self.parts)


@dataclass(frozen=True, slots=True)
class Share:
    """A scope's part of a profiled step, forward and backward."""

    calls: int
    host_us: float
    kernels: int


def find_scopes(model: torch.nn.Module) -> tuple[Scope, ...]:
    """Return the scopes that a model has, the narrowest words first, whole layers last."""
    registry = ScopeRegistry()
    found = [_resolved(registry, model, word, (word,)) for word in WORDS]
    found.append(_resolved(registry, model, LAYERS, ()))
    known = tuple(scope for scope in found if scope is not None)
    return known or _by_structure(model)


def _resolved(registry: ScopeRegistry, model: torch.nn.Module, name: str, words: tuple[str, ...]) -> Scope | None:
    try:
        parts = registry.resolve(model, words)
    except InvalidArgument:
        return None
    return Scope(name, words, tuple(parts)) if parts else None


def stage_scope(model: torch.nn.Module) -> Scope:
    """Return the scope that is all of a model which a pipeline's schedule calls for each microbatch."""
    return Scope(STAGE, (), (Part("", model),))


def _by_structure(model: torch.nn.Module) -> tuple[Scope, ...]:
    """Repeated layers, or else the model's children."""
    patterns: list[str] = []
    parts: list[Part] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if any(prefix.startswith(pattern.removesuffix("*")) for pattern in patterns):
            continue
        if _repeats(module):
            patterns.append(f"{prefix}*")
            parts += [Part(prefix + name, child) for name, child in module.named_children()]
    if patterns:
        return (Scope(LAYERS, tuple(patterns), tuple(parts)),)
    children = [(name, child) for name, child in model.named_children() if next(child.parameters(), None) is not None]
    return tuple(Scope(name, (name,), (Part(name, child),), is_child=True) for name, child in children[:_MAX_CHILDREN])


def _repeats(module: torch.nn.Module) -> bool:
    """Whether a module is a list of layers, most of one class, that have parts of their own."""
    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 2:
        return False
    kinds = [type(child) for child in module]
    return len(set(kinds)) * 2 <= len(kinds) and all(next(child.children(), None) is not None for child in module)


def mark_of(part: Part) -> str:
    """The name of a part's marks."""
    return f"{MARK}{part.method}:{part.path}"


@contextlib.contextmanager
def marked(scopes: Iterable[Scope]) -> Iterator[None]:
    """Mark each call of a part in the block."""
    parts = {mark_of(part): part for scope in scopes for part in scope.parts}
    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(_marked_method(name, part) if part.method != "forward" else _marked_module(name, part))
        yield


@contextlib.contextmanager
def _marked_module(name: str, part: Part) -> Iterator[None]:
    open_marks: list[record_function] = []

    def begins(module: torch.nn.Module, args: Any) -> None:
        open_marks.append(record_function(name))
        open_marks[-1].__enter__()

    def ends(module: torch.nn.Module, args: Any, result: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    before = part.module.register_forward_pre_hook(begins)
    after = part.module.register_forward_hook(ends, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def _marked_method(name: str, part: Part) -> Iterator[None]:
    method = getattr(part.module, part.method)
    if part.method in vars(part.module):  # already replaced by someone else
        yield
        return

    def called(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return method(*args, **kwargs)

    vars(part.module)[part.method] = called
    try:
        yield
    finally:
        vars(part.module).pop(part.method, None)


# -- reading the profile

Interval = tuple[float, float]


class _Intervals:
    """Disjoint intervals of each thread."""

    def __init__(self, found: Iterable[tuple[Any, float, float]]) -> None:
        self._by_thread: dict[Any, list[Interval]] = {}
        for thread, start, end in sorted(found, key=lambda one: one[1]):
            known = self._by_thread.setdefault(thread, [])
            if known and start <= known[-1][1]:
                known[-1] = (known[-1][0], max(end, known[-1][1]))
            else:
                known.append((start, end))

    def has(self, thread: Any, moment: float) -> bool:
        known = self._by_thread.get(thread, ())
        place = bisect.bisect_right(known, (moment, float("inf"))) - 1
        return place >= 0 and known[place][1] >= moment

    def length(self) -> float:
        return sum(union_length(known) for known in self._by_thread.values())


class StepTrace:
    """A Chrome trace of one step with marks."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        events = [event for event in trace["traceEvents"] if "dur" in event]
        self._marks: dict[str, list[tuple[Any, float, float]]] = {}
        self._made: dict[int, tuple[Any, float]] = {}
        """The last operation of each sequence number: that which made the node."""
        self._backward: list[tuple[int, tuple[Any, float, float]]] = []
        on_gpu = {_correlation(e) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")} - {None}
        self._launches = [
            (e["tid"], e["ts"])
            for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and _correlation(e) in on_gpu
        ]
        for event in events:
            self._read(event)

    def _read(self, event: Mapping[str, Any]) -> None:
        name, place = event["name"], (event["tid"], event["ts"], event["ts"] + event["dur"])
        number = event.get("args", {}).get("Sequence number")
        if name.startswith(MARK) and event.get("cat") == "user_annotation":
            self._marks.setdefault(name, []).append(place)
        elif event.get("cat") != "cpu_op" or number is None:
            return
        elif name.startswith(_EVALUATES):
            self._backward.append((number, place))
        elif not event["args"].get("Fwd thread id") and self._made.get(number, (None, -1.0))[1] <= place[1]:
            self._made[number] = place[:2]

    @property
    def host_us(self) -> float:
        """The time from the step's beginning to the last place that it reached, on the host."""
        begins, reached = self._marks.get(BEGIN, ()), self._marks.get(REACH, ())
        return max(end for _, _, end in reached) - begins[0][1] if begins and reached else 0.0

    def share(self, names: Collection[str]) -> Share:
        """What the marks of these names, and the backward of what ran in them, take."""
        forward = [place for name in names for place in self._marks.get(name, ())]
        within = _Intervals(forward)
        own = [place for number, place in self._backward if number in self._made and within.has(*self._made[number])]
        both = _Intervals([*forward, *own])
        return Share(len(forward), both.length(), sum(both.has(*launch) for launch in self._launches))

    def shares(self, scopes: Sequence[Scope]) -> dict[str, Share]:
        """Return the share of each scope."""
        return {scope.name: self.share({mark_of(part) for part in scope.parts}) for scope in scopes}


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def shares_of(trace: Mapping[str, Any], scopes: Sequence[Scope]) -> tuple[float, dict[str, Share]]:
    """Return the step's host time in microseconds, and the share of each scope."""
    read = StepTrace(trace)
    return read.host_us, read.shares(scopes)
