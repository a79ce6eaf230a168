"""Orders for property tests, and liveness worked out by brute force from the numbers alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from stepgraph.engine.order import Order


@dataclass(frozen=True)
class Drawn:
    """A valid order, as plain numbers or with microbatches, and the layers of its chunks."""

    order: Sequence[float]
    layers: list[int]
    num_microbatches: int


@st.composite
def orders(draw: st.DrawFn, named: bool | None = None, backward: bool = True) -> Drawn:
    """A random walk over what may come next; `named` orders run microbatches as they please."""
    num_chunks, num_microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    layers = draw(st.lists(st.integers(0, 3), min_size=num_chunks, max_size=num_chunks))
    named = draw(st.booleans()) if named is None else named
    pairs = [(chunk, m) for chunk in range(1, num_chunks + 1) for m in range(num_microbatches)]
    split_chunks = draw(st.sets(st.integers(1, num_chunks)))
    split = {p for p in pairs if (draw(st.booleans()) if named else p[0] in split_chunks)}
    todo = {p: [1.0, -1.0, -1.5] if p in split else [1.0, -1.0] for p in pairs}
    if not backward:
        todo = {p: [1.0] for p in pairs}
    numbers: list[float] = []
    microbatches: list[int] = []
    while any(todo.values()):
        ready = [p for p in pairs if todo[p]]
        if not named:  # the first of each kind and chunk
            firsts = {(chunk, len(todo[chunk, m])): m for chunk, m in reversed(ready)}
            ready = sorted((chunk, m) for (chunk, _), m in firsts.items())
        chunk, m = draw(st.sampled_from(ready))
        step = todo[chunk, m].pop(0)
        numbers.append(chunk if step == 1 else -chunk if step == -1 else -chunk - 0.5)
        microbatches.append(m)
    return Drawn(Order(numbers, microbatches) if named else numbers, layers, num_microbatches)


def spans(drawn: Drawn) -> list[tuple[int, int]]:
    """For each sample the positions of the first and the last entry that need it; without a backward, no end."""
    numbers = list(drawn.order)
    found = []
    for chunk, layers in enumerate(drawn.layers, start=1):
        for m in range(drawn.num_microbatches):
            touching = [i for i in range(len(numbers)) if int(abs(numbers[i])) == chunk and _microbatch(drawn, i) == m]
            ended = any(numbers[i] < 0 for i in touching)
            found += [(touching[0], touching[-1] if ended else len(numbers))] * layers
    return found


def _microbatch(drawn: Drawn, position: int) -> int:
    if isinstance(drawn.order, Order):
        return drawn.order.microbatches[position]
    return list(drawn.order[:position]).count(drawn.order[position])


def clashes(plan: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of samples that share a buffer while both are live."""
    return [
        (a, b)
        for b in range(len(plan))
        for a in range(b)
        if plan[a] == plan[b] and spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]
    ]


def most_live(spans: Sequence[tuple[int, int]], signatures: Sequence[Hashable]) -> dict[Hashable, int]:
    """For each signature the largest number of its samples that are live at one time."""
    times = range(1 + max((last for _, last in spans), default=0))
    return {
        signature: max(
            sum(s == signature and a <= t <= b for (a, b), s in zip(spans, signatures, strict=True)) for t in times
        )
        for signature in set(signatures)
    }
