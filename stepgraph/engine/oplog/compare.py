"""Names the operations at which two logs of one program differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch

from stepgraph.core.errors import Location
from stepgraph.core.wording import counted
from stepgraph.engine.oplog.log import BY_VALUE, FIELDS, RESULTS, TENSOR, Log, location_of

_NOTHING = ("nothing", "")
_FORM = ("shape", "dtype", "device", "layout")
_BITS = ("storage offset", "strides", "conjugated", "negated")


def _without_seed(note: tuple[Any, ...]) -> tuple[Any, ...]:
    """A note without the random state that attention keeps: a number on the host, or a tensor."""
    seeds = (torch.int64, torch.uint64)
    tensors = tuple((part[0],) if part[0][0] == "made" and part[1][1] in seeds else part for part in note[2])
    return note[0], note[1], tensors


_ATTENTION = (
    *("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward"),
    *("_scaled_dot_product_cudnn_attention_backward", "_flash_attention_backward", "_efficient_attention_backward"),
)
DIFFERS_UNDER_CAPTURE: Mapping[Any, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = MappingProxyType(
    {getattr(torch.ops.aten, name).default: _without_seed for name in _ATTENTION if hasattr(torch.ops.aten, name)}
)
"""Operations that torch runs differently while a graph is recorded, and what to compare of them.

Measured on an H200 with attention of all kinds, dropout, fused AdamW, clipping, autocast, checkpoints: the random state
that memory-efficient attention keeps for its backward is a number on the host in an eager call, and on the device in a
recording. Nothing else differs.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference: its place in the logs, its line, and both sides."""

    index: int
    operation: str
    where: Location | None
    """The user's line, of the later log where it has one."""
    before: str
    now: str
    kind: str = "operation"
    """What differs: the "operation" itself, a plain "value", the "shape" of a tensor that it is given, the "result
    shape" (where the arguments' are the same), or something else about a "tensor"."""

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where is not None else ""
        return f"operation {self.index}, {self.operation}{at}: {self.before} -> {self.now}"


def first_difference(before: Log, now: Log) -> Difference | None:
    """The first difference of two logs that share a vocabulary, or None. Lines do not count: code may move."""
    return next(differences(before, now), None)


def differences(before: Log, now: Log) -> Iterator[Difference]:
    """All differences of two logs that share a vocabulary, up to the first operation that is another one.

    A number shows where it enters an operation, and not in the operations that use the result.
    """
    assert before.vocabulary is now.vocabulary, "logs are compared by the numbers of one vocabulary"
    if before.notes == now.notes:
        return
    for index in range(min(len(before), len(now))):
        start = index * FIELDS
        if before.notes[start : start + FIELDS - 1] != now.notes[start : start + FIELDS - 1]:
            one, two = before[index], now[index]
            if not _is_same(before, now, one, two):
                found = _difference(index, one, two)
                yield found
                if found.kind == "operation":
                    return
    index = min(len(before), len(now))
    if len(before) == len(now):
        return
    extra = (before if len(before) > index else now)[index]
    ends, name = "the call ends", str(extra[0])
    told = (name, ends) if len(before) > index else (ends, name)
    yield Difference(index, name, location_of(extra[3]), *told)


def _is_same(before: Log, now: Log, one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    """Whether two notes mean the same although they differ.

    Memory that code past the dispatcher has made has a number of its own in each log. It is the same in both if both
    have met it in the same order, and if it has ended with the call. Of arguments that share memory it is unknown which
    one a view of them is, and where it begins in it.
    """
    if one[0] == two[0] and one[0] in DIFFERS_UNDER_CAPTURE:
        one, two = (DIFFERS_UNDER_CAPTURE[one[0]](note) for note in (one, two))
    if one[:2] != two[:2]:
        return False
    return len(one[2]) == len(two[2]) and all(
        a == b or _are_same_tensors(before, now, a, b) for a, b in zip(one[2], two[2], strict=True)
    )


def _are_same_tensors(before: Log, now: Log, one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    (kind, *which), (other, *as_other) = one[0], two[0]
    if len(one) != 3 or len(two) != 3 or one[1] != two[1]:
        return False
    if kind != other:  # created outside the log in both calls: once in this thread, once in one without a log
        return one[2] == two[2] and _is_unseen(before, one[0]) and _is_unseen(now, two[0])
    if kind == "outside" and one[2] == two[2]:
        number = before.vocabulary.made_in(which[0], before.serial)
        return number is not None and number == now.vocabulary.made_in(as_other[0], now.serial)
    if kind == "argument" and one[2][1:] == two[2][1:]:
        groups = {**before.shared, **now.shared}
        group = groups.get(which[0])
        return group is not None and group == groups.get(as_other[0])
    return False


def _is_unseen(log: Log, which: tuple[Any, ...]) -> bool:
    """Whether operations that are not noted have made this memory in the call."""
    if which[0] == "outside":
        return log.vocabulary.made_in(which[1], log.serial) is not None
    return which[:2] == ("made", "left out")


def _difference(index: int, before: tuple[Any, ...], now: tuple[Any, ...]) -> Difference:
    where = location_of(now[3]) or location_of(before[3])
    one, two, kind = str(before[0]), str(now[0]), "operation"
    if one == two:
        kind = _kind_of_change(before, now)
        told = list(_changes(before, now))
        shapes = [change for change in told if kind == "shape" and " has shape " in change[0]]
        one, two = next(iter((*shapes, *told)), ("other arguments", "other arguments"))
    return Difference(index, str(now[0]), where, one, two, kind)


def _kind_of_change(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    if before[3] != now[3]:
        return "operation"  # of the same name, at another line
    for one, two in zip(before[2], now[2], strict=False):
        if len(one) > 1 and len(two) > 1 and one[1][0] != two[1][0]:
            return "shape"
    if before[1] == now[1]:
        return "tensor"
    return "value" if _result_shapes(before) == _result_shapes(now) else "result shape"


def _result_shapes(note: tuple[Any, ...]) -> Any:
    last = note[1][-1] if note[1] else None
    return last[1] if isinstance(last, tuple) and last[0] == RESULTS else None


def _changes(before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """The differences between two notes of one operation, both sides in words."""
    for one, two in zip_longest(before[1], now[1], fillvalue=_NOTHING):
        if one != two:
            yield _value(one), _value(two)
    for position, (one, two) in enumerate(zip_longest(before[2], now[2])):
        if one != two:
            name = f"tensor {position}"
            if one is None or two is None:
                yield counted(len(before[2]), "tensors"), counted(len(now[2]), "tensors")
            elif one[0] != two[0]:
                yield f"{name} is {_which(one[0])}", f"{name} is {_which(two[0])}"
            else:
                yield from _geometry(name, one, two)


def _geometry(name: str, one: tuple[Any, ...], two: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    for part, names in ((1, _FORM), (2, _BITS)):
        if len(one) > part and len(two) > part:
            for what, a, b in zip(names, one[part], two[part], strict=True):
                if a != b:
                    a, b = (tuple(it) if isinstance(it, torch.Size) else it for it in (a, b))
                    yield f"{name} has {what} {a}", f"{what} {b}"


def _value(plain: Any) -> str:
    if not isinstance(plain, tuple):
        return "a tensor" if plain == TENSOR else f"{plain} of them" if isinstance(plain, int) else str(plain)
    kind, shown = plain
    if kind == RESULTS:
        return "a result of shape " + ", ".join(str(tuple(shape)) for shape in shown)
    if kind in (float, complex):
        return str(shown)
    if kind in BY_VALUE:
        return repr(shown)
    return f"{getattr(kind, '__qualname__', kind)} {shown}".strip()


def _which(which: tuple[Any, ...]) -> str:
    kind, rest = which[0], which[1:]
    if kind == "made":
        scope, ago = rest
        return {"": f"what was made {counted(ago, 'results')} ago", "host": "made on the host"}.get(
            scope, f"made by {scope}"
        )
    if kind == "number":
        return _value(rest[0])
    return {
        "argument": f"argument {rest[0]}",
        "role": str(rest[0]),
        "outside": f"a tensor from outside the call (number {rest[0]})",
    }.get(str(kind), f"{kind} {rest[0]}")
