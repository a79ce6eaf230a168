"""`read_order` makes an order's numbers into entries, or raises an error that points at the wrong entry.

An order decides what is captured and which memory is shared, so a wrong one would give wrong gradients. Read from left
to right, each forward must be new, each backward must follow its forward, each weight gradient its backward. In the end
every forward has its backward (or none has: inference), and chunks and microbatches are counted without gaps. Where
numbers leave the microbatch open it is counted (see `entries`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import counted
from stepgraph.engine.order.entries import Entry, Kind, Order, invalid, is_count

_SHOWN = 10
"""Entries shown on each side of the one that is pointed at."""
_WHY = "an order says what is captured, what is replayed when, and how long memory is in use."
_FORMS = "c (forward of chunk c), -c (its backward) or -c.5 (its weight gradient), chunks counted from 1"
_BEFORE: Mapping[Kind, Kind] = MappingProxyType({Kind.BACKWARD: Kind.FORWARD, Kind.WEIGHT_GRAD: Kind.BACKWARD})
_AFTER: Mapping[Kind, Kind] = MappingProxyType({before: after for after, before in _BEFORE.items()})


@entry_point
def validate_order(order: Sequence[float], num_layers_per_chunk: Sequence[int] | None = None) -> None:
    """Raise `InvalidArgument` if the order cannot be run, pointing at the entry; check it against the layers if given.

    Example:
        >>> try:
        ...     validate_order([1, -1, -1])
        ... except InvalidArgument as error:
        ...     print(error.what)
        entry 2 of the order is a backward of chunk 1 without a forward
    """
    read_order(order, num_layers_per_chunk)


@entry_point
def read_order(order: Sequence[float], num_layers_per_chunk: Sequence[int] | None = None) -> tuple[Entry, ...]:
    """The entries of an order, each with its microbatch; `InvalidArgument` if it cannot be run.

    Example:
        >>> print(*read_order([1, 1, -1, -1])[1:3], sep="; ")
        forward of chunk 1, microbatch 1; backward of chunk 1, microbatch 0
    """
    listed = isinstance(order, Sequence) and not isinstance(order, (str, bytes))
    if not listed or not order:
        raise invalid(
            "the order is empty" if listed else f"the order is of type {type(order).__name__}",
            details=("expected  a list of at least one number",),
            why=_WHY,
            fix="pass a list such as `[1, -1]`, or what `convert_schedule_table_to_order` returns.",
        )
    kinds = [_kind_and_chunk(order, index) for index in range(len(order))]
    entries = [
        Entry(kind, chunk, microbatch)
        for (kind, chunk), microbatch in zip(kinds, _microbatches(order, kinds), strict=True)
    ]
    _check_sequence(order, entries)
    _check_complete(order, entries)
    _check_gaps(order, entries)
    if num_layers_per_chunk is not None:
        _check_layers(order, entries, num_layers_per_chunk)
    split = {(e.chunk, e.microbatch) for e in entries if e.kind is Kind.WEIGHT_GRAD}
    return tuple(
        Entry(Kind.INPUT_GRAD, e.chunk, e.microbatch)
        if e.kind is Kind.BACKWARD and (e.chunk, e.microbatch) in split
        else e
        for e in entries
    )


@entry_point
def count_microbatches(order: Sequence[float]) -> int:
    """How many microbatches each chunk runs; `InvalidArgument` if one runs fewer than another.

    Samples are numbered with one count for all chunks.

    Example:
        >>> count_microbatches([1, 1, 2, 2, -2, -2, -1, -1])
        2
    """
    entries = read_order(order)
    forwards = Counter(entry.chunk for entry in entries if entry.kind is Kind.FORWARD)
    most, fewest = max(forwards.values()), min(forwards, key=lambda chunk: forwards[chunk])
    if forwards[fewest] < most:
        index = next(i for i, entry in enumerate(entries) if entry.microbatch >= forwards[fewest])
        what = f"the {entries[index]}, and chunk {fewest} has no microbatch {entries[index].microbatch}"
        expected = f"{most} forwards of each chunk; chunk {fewest} has {forwards[fewest]}"
        raise _refuse(order, index, what, expected, "let all chunks run the same microbatches.")
    return most


def point_at(order: Sequence[Any], index: int, expected: str) -> tuple[str, ...]:
    """Lines for an error's details: the order around an entry, a mark under it, what should stand there."""
    start, stop = max(0, index - _SHOWN), min(len(order), index + _SHOWN + 1)
    words = [f"{float(e):g}" if _is_number(e) else repr(e)[:20] for e in order[start:stop]]
    before = " ".join(["..."] * (start > 0) + words[: index - start])
    line = " ".join(["..."] * (start > 0) + words + ["..."] * (stop < len(order)))
    mark = " " * (len(before) + bool(before)) + "^" * len(words[index - start])
    return f"order     {line}", f"          {mark}", f"expected  {expected}"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _refuse(order: Sequence[Any], index: int, what: str, expected: str, fix: str) -> InvalidArgument:
    return invalid(f"entry {index} of the order is {what}", details=point_at(order, index, expected), why=_WHY, fix=fix)


def _kind_and_chunk(order: Sequence[Any], index: int) -> tuple[Kind, int]:
    value = order[index]
    fix = "write the order in whole numbers, and in -1.5, -2.5, ... for weight gradients."
    if not _is_number(value):
        raise _refuse(order, index, f"of type {type(value).__name__}", f"a number: {_FORMS}", fix)
    number = float(value)
    if number != number or abs(number) == float("inf") or (2 * number) % 1 or (number > 0 and number % 1):
        raise _refuse(order, index, f"{number:g}", _FORMS, fix)
    chunk = int(abs(number))
    if chunk == 0:
        raise _refuse(order, index, f"of chunk 0 ({number:g})", _FORMS, "count chunks from 1.")
    if number > 0:
        return Kind.FORWARD, chunk
    return Kind.WEIGHT_GRAD if number % 1 else Kind.BACKWARD, chunk


def _microbatches(order: Sequence[float], kinds: Sequence[tuple[Kind, int]]) -> list[int]:
    """Those of an `Order`; for plain numbers the k-th entry of a kind and chunk is that of microbatch k."""
    if isinstance(order, Order):
        for index, microbatch in enumerate(order.microbatches):
            if not is_count(microbatch):
                what, expected = f"of microbatch {microbatch!r}", "a whole number, counted from 0"
                raise _refuse(order, index, what, expected, "count microbatches from 0.")
        return [int(microbatch) for microbatch in order.microbatches]
    seen: Counter[tuple[Kind, int]] = Counter()
    found = []
    for kind in kinds:
        found.append(seen[kind])
        seen[kind] += 1
    return found


def _check_sequence(order: Sequence[float], entries: Sequence[Entry]) -> None:
    """Each entry once, and after the one it needs."""
    done: set[Entry] = set()
    for index, entry in enumerate(entries):
        microbatch = f", microbatch {entry.microbatch}," if isinstance(order, Order) else ""
        what = f"{entry.kind.value} of chunk {entry.chunk}{microbatch}"
        if entry in done:
            fix = "name each microbatch once in the forwards of a chunk, and once in its backwards."
            raise _refuse(order, index, f"a second {what.rstrip(',')}", "another microbatch", fix)
        needed = _step(entry, _BEFORE)
        if needed is not None and needed not in done:
            had = Counter(e.kind for e in done if e.chunk == entry.chunk)
            tally = _tally(had, needed, entry)
            expected = f"`{needed.number:g}`{microbatch} before it: chunk {entry.chunk} has had {tally}"
            fix = f"move it behind its {needed.kind.value}, or take it out."
            raise _refuse(order, index, f"a {what} without a {needed.kind.value}", expected, fix)
        done.add(entry)


def _check_complete(order: Sequence[float], entries: Sequence[Entry]) -> None:
    """Forwards have backwards, all or none; a chunk's backwards have weight gradients, all or none, or an `Order`."""
    done = set(entries)
    trains = any(entry.kind is Kind.BACKWARD for entry in entries)
    splits = {entry.chunk for entry in entries if entry.kind is Kind.WEIGHT_GRAD}
    for index, entry in enumerate(entries):
        needed = _step(entry, _AFTER)
        if needed is None or needed in done:
            continue
        if needed.kind is Kind.BACKWARD and trains:
            otherwise = "or leave all backwards out (inference)."
        elif needed.kind is Kind.WEIGHT_GRAD and entry.chunk in splits and not isinstance(order, Order):
            otherwise = "or, if only some are split off, say which: `stepgraph.order.Order(order, microbatches)`."
        else:
            continue
        had = Counter(e.kind for e in entries if e.chunk == entry.chunk)
        expected = f"`{needed.number:g}` after it: chunk {entry.chunk} has {_tally(had, entry, needed)}"
        what = f"the {entry}, without a {needed.kind.value}"
        raise _refuse(order, index, what, expected, f"add `{needed.number:g}` after it, {otherwise}")


def _check_gaps(order: Sequence[float], entries: Sequence[Entry]) -> None:
    forwards = {(e.chunk, e.microbatch) for e in entries}
    for index, entry in enumerate(entries):
        if entry.microbatch and (entry.chunk, entry.microbatch - 1) not in forwards:
            missing = f"microbatch {entry.microbatch - 1} of chunk {entry.chunk}"
        elif entry.chunk > 1 and (entry.chunk - 1, 0) not in forwards:
            missing = f"chunk {entry.chunk - 1}"
        else:
            continue
        fix = "count chunks from 1 and microbatches from 0, without gaps."
        raise _refuse(order, index, f"the {entry}, and there is no {missing}", f"{missing}, too", fix)


def _step(entry: Entry, steps: Mapping[Kind, Kind]) -> Entry | None:
    """The entry of the same chunk and microbatch that comes before or after this one."""
    return Entry(steps[entry.kind], entry.chunk, entry.microbatch) if entry.kind in steps else None


def _tally(counts: Counter[Kind], first: Entry, second: Entry) -> str:
    words = [f"{counts[e.kind]} {e.kind.value}" + "s" * (counts[e.kind] != 1) for e in (first, second)]
    return " and ".join(words)


def _check_layers(order: Sequence[float], entries: Sequence[Entry], num_layers_per_chunk: Sequence[int]) -> None:
    listed = isinstance(num_layers_per_chunk, Sequence)
    if not listed or not all(map(is_count, num_layers_per_chunk)):
        raise invalid(
            f"num_layers_per_chunk is {num_layers_per_chunk!r}",
            why="it says for each chunk how many of its layers are captured.",
            fix="pass a list of whole numbers, one a chunk; 0 for a chunk of which nothing is captured.",
        )
    num_chunks = len(num_layers_per_chunk)
    largest = max(entries, key=lambda e: e.chunk)
    if largest.chunk != num_chunks:
        fix = f"pass {counted(largest.chunk, 'numbers')} in num_layers_per_chunk, one a chunk of the order."
        if largest.chunk == sum(num_layers_per_chunk):
            fix = f"if this is an order of layers, each is a chunk: num_layers_per_chunk=[1] * {largest.chunk}."
        what = f"the {largest}, and num_layers_per_chunk has {counted(num_chunks, 'chunks')}"
        raise _refuse(order, entries.index(largest), what, f"chunks 1 to {num_chunks}, each of them", fix)
