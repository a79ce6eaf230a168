"""Order -> buffers: which samples may share their static memory.

A sample is what one layer is called with for one microbatch. Its static input must stay unchanged from its forward
until its backward or, where the weight gradient is split off, until that: a weight gradient reads the layer's input.

Samples are numbered chunk by chunk, in a chunk microbatch by microbatch, in a microbatch layer by layer: layer l of
microbatch m in a chunk of n layers, with p layers in the chunks before, is sample p*M + m*n + l. A forward takes the
buffer of its signature that has been free for longest, or a new one. So there are as many buffers of a signature as
there are ever live samples of it, and in a 1F1B schedule that is the depth of the pipeline.

An order without backwards (inference) frees nothing: only its caller knows when an output has been used up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import counted, with_article
from stepgraph.engine.order.entries import Entry, Kind, invalid
from stepgraph.engine.order.validate import count_microbatches, read_order


def samples_of(entry: Entry, num_layers_per_chunk: Sequence[int], num_microbatches: int) -> range:
    """The sample numbers of an entry: one a layer of its chunk."""
    layers = num_layers_per_chunk[entry.chunk - 1]
    first = sum(num_layers_per_chunk[: entry.chunk - 1]) * num_microbatches + entry.microbatch * layers
    return range(first, first + layers)


def layers_of_samples(num_layers_per_chunk: Sequence[int], num_microbatches: int) -> list[int]:
    """The layer of each sample, counted over all chunks."""
    starts = [sum(num_layers_per_chunk[:chunk]) for chunk in range(len(num_layers_per_chunk))]
    return [
        start + layer
        for start, layers in zip(starts, num_layers_per_chunk, strict=True)
        for _ in range(num_microbatches)
        for layer in range(layers)
    ]


@entry_point
def plan_buffers(
    order: Sequence[float], num_layers_per_chunk: Sequence[int], signatures: Sequence[Hashable] | None = None
) -> list[int]:
    """The buffer of each sample, in sample order, numbered by first appearance.

    `signatures` says what a sample looks like, one a sample or one a layer; samples that differ never share. Without
    it all are taken to be alike. In an order of layers each layer is a chunk: pass `[1] * num_layers`.

    Example:
        >>> plan_buffers([1, 1, -1, 1, -1, 1, -1, -1], num_layers_per_chunk=[2])
        [0, 1, 2, 3, 0, 1, 2, 3]
    """
    entries = read_order(order, num_layers_per_chunk)
    num_microbatches = count_microbatches(order)
    signature_of = _one_a_sample(signatures, num_layers_per_chunk, num_microbatches)
    free: dict[Hashable, deque[int]] = defaultdict(deque)
    taken = [0] * len(signature_of)
    count = 0
    for entry in entries:
        if entry.kind is Kind.INPUT_GRAD:
            continue  # its weight gradient still reads the input
        for sample in samples_of(entry, num_layers_per_chunk, num_microbatches):
            unused = free[signature_of[sample]]
            if entry.kind is not Kind.FORWARD:
                unused.append(taken[sample])
            elif unused:
                taken[sample] = unused.popleft()
            else:
                taken[sample] = count
                count += 1
    names: dict[int, int] = {}
    return [names.setdefault(buffer, len(names)) for buffer in taken]


def _one_a_sample(
    signatures: Sequence[Hashable] | None, num_layers_per_chunk: Sequence[int], num_microbatches: int
) -> Sequence[Hashable]:
    num_layers = sum(num_layers_per_chunk)
    num_samples = num_layers * num_microbatches
    if signatures is None:
        return (None,) * num_samples
    for index, signature in enumerate(signatures):
        try:
            hash(signature)
        except TypeError:
            raise invalid(
                f"signatures[{index}] is {with_article(type(signature))}, which cannot be looked up",
                why="free buffers are found by signature.",
                fix="pass values with a hash, such as tuples of shape and dtype.",
            ) from None
    if len(signatures) == num_samples:
        return signatures
    if len(signatures) == num_layers:
        return [signatures[layer] for layer in layers_of_samples(num_layers_per_chunk, num_microbatches)]
    raise invalid(
        f"{counted(len(signatures), 'signatures')} for {counted(num_samples, 'samples')}",
        details=(f"samples   {counted(num_layers, 'layers')} x {counted(num_microbatches, 'microbatches')}",),
        why="samples share a buffer only if their signatures are equal, so each needs one.",
        fix=f"pass {counted(num_samples, 'signatures')}, one a sample, or {num_layers}, one a layer.",
    )
