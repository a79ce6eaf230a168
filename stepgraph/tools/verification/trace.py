"""A `Trace` is what a run of a program left behind after each of its steps: every value, by kind and name.

A run calls one function on a series of batches. Before each step everything that a training changes is changed: the
batch is a copy at new addresses, the learning rates are others, and at every second step all generators get another
seed. After each step all values are kept in host memory: equal ones once, and past a budget of bytes only the digests
of tensors. Two traces are compared step by step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.core.storage import memory_of, numbers_of, shape_of, special_kind
from stepgraph.core.tensor_memory import has_memory
from stepgraph.core.tree import flatten, paths, tree_map
from stepgraph.engine.backends import Backend
from stepgraph.engine.oplog import Vocabulary, noting_unseen
from stepgraph.engine.oplog.writes import WriteLog, Writes
from stepgraph.tools.program import KINDS, Key, Program
from stepgraph.tools.verification.bits import Digest, Gap, digest, measure, same_bits

__all__ = ["Difference", "Keeper", "Moment", "Row", "Trace", "arguments_of", "differences", "run", "table", "vary"]

BUDGET_BYTES = 2 << 30
"""Host memory for the values of one run."""
_SEED = 20_011
_CHANGED_RATES = (1.0, 0.5, 1.25, 0.75, 1.5)
"""Factors of the learning rates, in turn."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The values after one step."""

    values: Mapping[Key, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """The moments of one run."""

    moments: tuple[Moment, ...] = ()
    peak_bytes: int | None = None


class Keeper:
    """Makes copies of values to compare with later ones, and keeps to a budget of bytes."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._left = budget_bytes
        self._last: dict[Key, Any] = {}

    def keep(self, values: Mapping[Key, Any]) -> dict[Key, Any]:
        """Return copies; a value that equals the last one of its name is kept once."""
        kept = {key: self._copy(value, self._last.get(key)) for key, value in values.items()}
        self._last = kept
        return kept

    def _copy(self, value: Any, last: Any) -> Any:
        if not issubclass(type(value), torch.Tensor):
            return value
        if special := special_kind(value):
            return (special, shape_of(value), *(self._copy(part, None) for part in numbers_of(value)))
        if memory_of(value) is not None and not has_memory(value):
            return "a storage that was resized to less"
        if value.is_meta:
            return ("tensor without data", shape_of(value), value.dtype)
        if value.nbytes > self._left and not isinstance(last, torch.Tensor):
            return digest(value)
        made = value.detach().cpu() if value.device.type != "cpu" else value.detach().clone()
        if isinstance(last, torch.Tensor) and same_bits(last, made):
            return last
        if made.nbytes > self._left:
            return digest(made)
        self._left -= made.nbytes
        return made


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """The positional arguments of a call: a tuple holds them all, anything else is the only one."""
    return batch if isinstance(batch, tuple) else (batch,)


def fresh(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy the tensors of a batch, so that every call finds them at other addresses."""

    def copied(leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor:
            return leaf
        made = leaf.detach().clone()
        return made.requires_grad_(leaf.requires_grad)

    copies: tuple[Any, ...] = tree_map(copied, batch)
    return copies


def vary(program: Program, index: int) -> None:
    """Change what a training changes between two steps: learning rates, and at every second step all seeds."""
    before, now = (_CHANGED_RATES[i % len(_CHANGED_RATES)] for i in (index - 1, index))
    for optimizer in program.optimizers.values() if index else ():
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                rate.mul_(now / before)
            elif isinstance(rate, float):
                group["lr"] = rate * (now / before)
    if index % 2:
        program.reseed(_SEED + index)


def run(
    call: Callable[..., Any],
    program: Program,
    batches: Sequence[tuple[Any, ...]],
    backend: Backend,
    *,
    before: Callable[[int], None] = lambda index: None,
    on_step: Callable[[], None] = lambda: None,
    keeper: Keeper | None = None,
    writes: Writes | None = None,
) -> Trace:
    """Call a function on each batch, and keep all values after each call; with `writes`, calls are logged for them."""
    keeper, vocabulary = keeper or Keeper(), Vocabulary()
    moments = []
    backend.reset_peak_memory()
    for index, batch in enumerate(batches):
        before(index)
        given = fresh(batch)
        with noting_writes(writes, given, vocabulary):
            result = call(*given)
        moments.append(Moment(keeper.keep({**call_values(given, result), **program.values()})))
        del result
        on_step()
    return Trace(tuple(moments), backend.peak_memory_bytes())


@contextlib.contextmanager
def noting_writes(writes: Writes | None, given: Any, vocabulary: Vocabulary) -> Iterator[None]:
    """Log a call in this block, made with what is given, for what it writes to."""
    if writes is None:
        yield
        return
    with noting_unseen(), WriteLog(vocabulary, flatten(given)[0], writes):
        yield


def call_values(given: Any, result: Any) -> dict[Key, Any]:
    """The outputs of a call, its arguments as the call left them, and their gradients."""
    leaves, structure = flatten(result)
    found: dict[Key, Any] = {("outputs", name): v for name, v in zip(paths(structure, "result"), leaves, strict=True)}
    leaves, structure = flatten(given)
    for name, value in zip(paths(structure, "argument"), leaves, strict=True):
        if issubclass(type(value), torch.Tensor):
            found[("arguments", name)] = value
            if value.is_leaf and value.requires_grad:
                found[("gradients", name)] = value.grad
    return {key: value for key, value in found.items() if is_compared(value)}


def is_compared(value: Any) -> bool:
    """Check that a value can be compared: a tensor or a plain value."""
    return value is None or issubclass(type(value), (torch.Tensor, int, float, complex, str, bool))


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs between two runs after one step."""

    step: int
    kind: str
    name: str
    gap: Gap

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind}, `{self.name}`: {self.gap}"


_MISSING = "absent"


def differences(one: Trace, two: Trace, rtol: float = 0.0, atol: float = 0.0) -> Iterator[Difference]:
    """The values that differ, and by more than the bounds, in the order of steps and of `KINDS`."""
    order = {kind: place for place, kind in enumerate(KINDS)}
    for step, (before, now) in enumerate(zip(one.moments, two.moments, strict=True)):
        keys = sorted({*before.values, *now.values}, key=lambda key: order.get(key[0], len(order)))
        for key in keys:
            a, b = before.values.get(key, _MISSING), now.values.get(key, _MISSING)
            if a is b or same_bits(*_alike(a, b)):
                continue
            gap = measure(a, b, rtol, atol)
            if not gap.is_within:
                yield Difference(step, *key, gap)


def _alike(one: Any, two: Any) -> tuple[Any, Any]:
    """Two kept values in one form: where only one of them is a digest, the digest of the other."""
    if isinstance(one, Digest) and isinstance(two, torch.Tensor):
        return one, digest(two)
    if isinstance(two, Digest) and isinstance(one, torch.Tensor):
        return digest(one), two
    return one, two


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of values: how many were compared at how many steps, and how they differ."""

    kind: str
    num_values: int
    num_steps: int
    num_differing: int
    largest: Difference | None = None
    """The one with the largest absolute difference, or the first where none is known."""


def table(trace: Trace, found: Sequence[Difference]) -> list[Row]:
    """Count what was compared and what differs, kind by kind."""
    rows = []
    for kind in KINDS:
        names = {key for moment in trace.moments for key in moment.values if key[0] == kind}
        steps = sum(any(key[0] == kind for key in moment.values) for moment in trace.moments)
        of_kind = [difference for difference in found if difference.kind == kind]
        largest = max(of_kind, key=_size, default=None)
        if names or of_kind:
            rows.append(Row(kind, len(names), steps, len({one.name for one in of_kind}), largest))
    return rows


def _size(difference: Difference) -> float:
    return -1.0 if difference.gap.max_abs is None else difference.gap.max_abs


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a comparison, as many as there are steps."""

    calls: tuple[tuple[Any, ...], ...]
    num_given: int
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def read(cls, batches: Any, steps: int) -> Batches:
        """Take as many as are needed from any iterable; fewer are used again, in turn."""
        found: list[tuple[Any, ...]] = []
        for batch in batches:
            found.append(arguments_of(batch))
            if len(found) == steps:
                break
        calls = tuple(found[i % len(found)] for i in range(steps)) if found else ()
        alone = len(found) == 1 and steps > 1 and any(isinstance(leaf, torch.Tensor) for leaf in flatten(found[0])[0])
        notes = ("all steps had the same batch: pass two or more, so that inputs that are never copied in show",)
        return cls(calls, len(found), notes if alone else ())
