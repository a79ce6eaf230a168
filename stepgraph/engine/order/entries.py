"""An order is a sequence of numbers, one for each thing that a rank computes. Chunks are counted from 1:

    2      forward of chunk 2
    -2     backward of chunk 2; where a -2.5 of the same microbatch follows, only the gradient of its input
    -2.5   gradient of chunk 2's weights, split off from its backward

Numbers do not name the microbatch: the k-th forward of a chunk is that of microbatch k, counted from 0, and so are its
k-th backward and its k-th weight gradient. Two kinds of schedule need more. One runs backwards in another order than
forwards (breadth-first). The other splits off the weight gradient of some microbatches only (DualPipeV). Their orders
are an `Order`: the same numbers, and beside each the microbatch. `read_order` makes both into `Entry` records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import overload

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted


def is_count(value: object, least: int = 0) -> bool:
    """Whether a value is a whole number (an int, or numpy's) of at least `least`."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def invalid(what: str, *, why: str, fix: str, details: Iterable[str] = ()) -> InvalidArgument:
    """The error for an order, or numbers of a pipeline, that cannot be run."""
    return InvalidArgument(what, rule="order", details=details, why=why, fix=fix)


class Kind(Enum):
    """The work of an entry."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """All gradients at once."""
    INPUT_GRAD = "input gradient"
    """A backward whose weight gradient comes as an entry of its own."""
    WEIGHT_GRAD = "weight gradient"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an order, with its microbatch."""

    kind: Kind
    chunk: int
    """Counted from 1, as in the order's numbers."""
    microbatch: int
    """Counted from 0."""

    @property
    def number(self) -> float:
        """The entry's number in an order."""
        if self.kind is Kind.FORWARD:
            return self.chunk
        return -self.chunk - 0.5 if self.kind is Kind.WEIGHT_GRAD else -self.chunk

    def __str__(self) -> str:
        return f"{self.kind.value} of chunk {self.chunk}, microbatch {self.microbatch}"


class Order(Sequence[float]):
    """An order that names the microbatch of each entry: a sequence of numbers, with `microbatches` beside it.

    It equals a list or a tuple of the same numbers, and another `Order` if the microbatches are the same too.

    Example:
        >>> order = Order([1, 1, -1, -1], microbatches=[0, 1, 1, 0])
        >>> order == [1, 1, -1, -1], order.microbatches[2]
        (True, 1)
    """

    __slots__ = ("microbatches", "numbers")

    def __init__(self, numbers: Iterable[float], microbatches: Iterable[int]) -> None:
        self.numbers: tuple[float, ...] = tuple(numbers)
        self.microbatches: tuple[int, ...] = tuple(microbatches)
        if len(self.numbers) != len(self.microbatches):
            entries, places = counted(len(self.numbers), "entries"), counted(len(self.microbatches), "microbatches")
            raise invalid(
                f"an order of {entries} and {places}",
                why="an `Order` names the microbatch of each entry.",
                fix="pass as many microbatches as numbers.",
            )

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> Order: ...

    def __getitem__(self, index: int | slice) -> float | Order:
        if isinstance(index, slice):
            return Order(self.numbers[index], self.microbatches[index])
        return self.numbers[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Order):
            return self.numbers == other.numbers and self.microbatches == other.microbatches
        return self.numbers == tuple(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash

    def __repr__(self) -> str:
        return f"Order({list(self.numbers)}, microbatches={list(self.microbatches)})"
