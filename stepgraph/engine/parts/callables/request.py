"""`read_request` brings the arguments of `make_graphed_callables` into one form, or names the wrong one.

There may be one callable or several, and one set of sample arguments for each callable or, with an order, for each
layer and microbatch. They become a list of samples, each a callable and its arguments. With an order, layer l of
microbatch m in a chunk of n layers, with p layers in the chunks before, is sample p*M + m*n + l.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted, with_article
from stepgraph.engine.observe.ddp import unwrapped
from stepgraph.engine.order import Entry, Kind, count_microbatches, read_order
from stepgraph.engine.order.entries import is_count
from stepgraph.engine.order.lifetimes import layers_of_samples


@dataclass(frozen=True, slots=True)
class Sample:
    """A call to capture graphs for."""

    number: int
    callable_index: int
    """Index of the callable."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `make_graphed_callables` in one form."""

    callables: tuple[Callable[..., Any], ...]
    is_single: bool
    samples: tuple[Sample, ...]
    order: Sequence[float] | None = None
    entries: tuple[Entry, ...] = ()
    num_layers_per_chunk: tuple[int, ...] = ()
    num_microbatches: int = 1

    @property
    def trains(self) -> bool:
        """True if backwards are to be captured, as far as the order says."""
        return self.order is None or any(entry.kind is not Kind.FORWARD for entry in self.entries)


def read_request(
    callables: Any, sample_args: Any, sample_kwargs: Any, order: Sequence[float] | None, num_layers_per_chunk: Any
) -> Request:
    """Read the arguments of `make_graphed_callables`."""
    is_single = not isinstance(callables, (tuple, list))
    several = (callables,) if is_single else tuple(callables)
    for index, each in enumerate(several):
        if not callable(each):
            raise _wrong(f"callables[{index}] is {with_article(type(each))}, which cannot be called", "pass functions.")
    if not several:
        raise _wrong("there are no callables", "pass at least one module or function.")
    if order is None:
        _refuse_twice(several)
        args = (sample_args,) if is_single else sample_args
        args = _one_each("sample_args", args, len(several), "callable")
        kwargs = _kwargs_of(sample_kwargs, len(several), "callable", is_single=is_single)
        owners: Sequence[int] = range(len(several))
        return Request(several, is_single, _samples(owners, args, kwargs))
    layers = _layers(num_layers_per_chunk, order, len(several))
    entries = read_order(order, layers)
    num_microbatches = count_microbatches(order)
    if sum(layers) != len(several):
        raise _wrong(
            f"{counted(len(several), 'callables')}, and num_layers_per_chunk={list(layers)} says {sum(layers)}",
            "pass one callable a layer, chunk after chunk.",
        )
    owners = layers_of_samples(layers, num_microbatches)
    where = f"layer and microbatch ({counted(sum(layers), 'layers')} x {counted(num_microbatches, 'microbatches')})"
    args = _one_each("sample_args", _dealt_out(sample_args, owners, len(several)), len(owners), where)
    kwargs = _kwargs_of(_dealt_out(sample_kwargs, owners, len(several)), len(owners), where, is_single=False)
    return Request(several, False, _samples(owners, args, kwargs), order, entries, layers, num_microbatches)


def _layers(given: Any, order: Sequence[float], num_callables: int) -> tuple[int, ...]:
    num_chunks = max(entry.chunk for entry in read_order(order))
    if given is None:
        if num_callables % num_chunks:
            raise _wrong(
                f"{counted(num_callables, 'callables')} for an order of {counted(num_chunks, 'chunks')}",
                "say how many layers each chunk has: num_layers_per_chunk=[...].",
            )
        return (num_callables // num_chunks,) * num_chunks
    if is_count(given):
        return (int(given),) * num_chunks
    if not isinstance(given, Sequence) or not all(map(is_count, given)):
        raise _wrong(f"num_layers_per_chunk={given!r}", "pass a whole number, or a list of them, one a chunk.")
    return tuple(int(count) for count in given)


def _dealt_out(given: Any, owners: Sequence[int], num_callables: int) -> Any:
    """Repeat one set of arguments per callable for all its microbatches."""
    if isinstance(given, (tuple, list)) and len(given) == num_callables < len(owners):
        return [given[owner] for owner in owners]
    return given


def _one_each(name: str, given: Any, expected: int, each: str) -> list[tuple[Any, ...]]:
    if not isinstance(given, (tuple, list)) or len(given) != expected:
        count = len(given) if isinstance(given, (tuple, list)) else with_article(type(given))
        raise _wrong(
            f"{name}: {count} for {expected}, one a {each}",
            f"pass a tuple of {counted(expected, 'tuples', 'tuple')} of arguments.",
        )
    for index, args in enumerate(given):
        if not isinstance(args, (tuple, list)):
            raise _wrong(
                f"{name}[{index}] is {with_article(type(args))}",
                "pass a tuple of arguments for each call: `(x,)`.",
            )
    return [tuple(args) for args in given]


def _kwargs_of(given: Any, expected: int, each: str, *, is_single: bool) -> list[dict[str, Any]]:
    if given is None:
        return [{} for _ in range(expected)]
    if isinstance(given, Mapping):
        return [dict(given) for _ in range(expected)]
    if is_single or not isinstance(given, (tuple, list)) or len(given) != expected:
        count = len(given) if isinstance(given, (tuple, list)) else with_article(type(given))
        raise _wrong(f"sample_kwargs: {count} for {expected}, one a {each}", "pass a dict for all, or one for each.")
    for index, kwargs in enumerate(given):
        if not isinstance(kwargs, Mapping):
            raise _wrong(f"sample_kwargs[{index}] is {with_article(type(kwargs))}", "pass a dict.")
    return [dict(kwargs) for kwargs in given]


def _samples(
    owners: Sequence[int], args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
) -> tuple[Sample, ...]:
    triples = zip(owners, args, kwargs, strict=True)
    return tuple(Sample(number, owner, a, k) for number, (owner, a, k) in enumerate(triples))


def _refuse_twice(callables: Sequence[Any]) -> None:
    seen: dict[int, int] = {}
    for index, each in enumerate(map(unwrapped, callables)):
        if isinstance(each, torch.nn.Module) and seen.setdefault(id(each), index) != index:
            raise _wrong(
                f"callables[{index}] is the same module as callables[{seen[id(each)]}]",
                "pass each module once; for several calls in flight give an order.",
            )


def _wrong(what: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        what,
        rule="sample-arguments",
        fix=fix,
    )
