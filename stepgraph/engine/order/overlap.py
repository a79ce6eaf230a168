"""An order of chunks made into one of layers, so that the layers of a forward and of a backward take turns.

Expert-parallel communication of one microbatch hides behind the computation of another if a forward and a backward run
side by side. For that, each layer becomes a chunk of its own: layer l of all layers of the rank, counted from 1, is
written l, its backward -l, its weight gradient -l.5 (see `entries`).

- A forward with no backward right before it is written out layer by layer, first to last.
- A backward and the forward right after it are a pair. Their layers take turns, forward first. Each weight gradient
  follows its layer's backward, except that of the pair's last backward layer, which closes the pair: so it does not
  hold up the gradient that the rank before waits for.
- A backward with no forward after it is written out last layer to first, each weight gradient after its layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.order.entries import Entry, Kind, invalid
from stepgraph.engine.order.validate import point_at, read_order


@entry_point
def get_overlap_moe_expert_parallel_comm_order(
    order: Sequence[float], num_layers_per_chunk: Sequence[int], capture_wgrad_graph: bool
) -> tuple[list[float], list[list[int] | None]]:
    """The order of layers, and beside each forward its [chunk, layer in the chunk], both from 0 (else None).

    Example:
        >>> get_overlap_moe_expert_parallel_comm_order([1, 1, -1, 1, -1, -1], [2], capture_wgrad_graph=False)[0]
        [1, 2, 1, 2, 1, -2, 2, -1, -2, -1, -2, -1]
    """
    _refuse_what_numbers_do_not_say(order, read_order(order, num_layers_per_chunk))
    chunks = [int(number) for number in order]
    starts = [sum(num_layers_per_chunk[:chunk]) for chunk in range(len(num_layers_per_chunk))]
    layers: list[float] = []
    ids: list[list[int] | None] = []

    def add_forward(chunk: int, index: int) -> None:
        layers.append(starts[chunk] + index + 1)
        ids.append([chunk, index])

    def add_backward(chunk: int, index: int, wgrad: bool = False) -> None:
        layers.append(-(starts[chunk] + index + 1) - (0.5 if wgrad else 0))
        ids.append(None)

    position = 0
    while position < len(chunks):
        number, following = chunks[position], chunks[position + 1] if position + 1 < len(chunks) else 0
        chunk = abs(number) - 1
        if number > 0:
            for index in range(num_layers_per_chunk[chunk]):
                add_forward(chunk, index)
            position += 1
            continue
        paired = following - 1 if following > 0 else None
        forwards = range(num_layers_per_chunk[paired]) if paired is not None else range(0)
        backwards = range(num_layers_per_chunk[chunk] - 1, -1, -1)
        for forward, backward in zip_longest(forwards, backwards):
            if forward is not None and paired is not None:
                add_forward(paired, forward)
            if backward is not None:
                add_backward(chunk, backward)
                if capture_wgrad_graph and backward > 0:
                    add_backward(chunk, backward, wgrad=True)
        if capture_wgrad_graph and backwards:
            add_backward(chunk, 0, wgrad=True)
        position += 1 if paired is None else 2
    return layers, ids


def _refuse_what_numbers_do_not_say(order: Sequence[float], entries: Sequence[Entry]) -> None:
    """The result has no place for microbatches, and its weight gradients are its own."""
    seen: Counter[float] = Counter()
    for index, entry in enumerate(entries):
        whole = entry.kind is not Kind.WEIGHT_GRAD
        if not whole or entry.microbatch != seen[entry.number]:
            expected = f"microbatch {seen[entry.number]}" if whole else "a forward or a whole backward"
            raise invalid(
                f"entry {index} of the order is the {entry}, which no order of layers can be made from",
                details=point_at(order, index, expected),
                why="chunks are taken apart as whole backwards and in the order of their microbatches; with "
                "`capture_wgrad_graph=True` weight gradients are split off here, for all layers.",
                fix="pass the order of a 1F1B or interleaved schedule, without weight gradients.",
            )
        seen[entry.number] += 1
