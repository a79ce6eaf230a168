"""The decisions of a training run as pure functions: when to capture, whether it fits, what to check and to save."""

from __future__ import annotations

from dataclasses import dataclass

CAPTURE_MARGIN = 1.1
"""A pool is larger than the tensors in it: blocks are rounded up and leave gaps."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice, and the reason that messages and reports give."""

    holds: bool
    reason: str

    def __bool__(self) -> bool:
        return self.holds


def capture_is_due(step: int, start: int, warmup_steps: int, *, was_decided: bool) -> bool:
    """True from the iteration on that the warm-up ends with, until the capture was decided on.

    It depends on the count of iterations only, so a skipped iteration does not lose the capture.

    Example:
        >>> [capture_is_due(step, 10, 3, was_decided=False) for step in (12, 13, 14)]
        [False, True, True]
    """
    return not was_decided and step - start >= warmup_steps


def predicted_graph_bytes(
    *, activation_bytes: int, microbatches_in_flight: int = 1, input_bytes: int = 0, is_whole_iteration: bool = False
) -> int:
    """Estimate the memory that graphs add to what eager training holds between its steps.

    A graph keeps the activations of its microbatch for as long as it lives; microbatches in flight at the same time
    have graphs of their own. The graph of a whole iteration runs one microbatch after the other in the same memory, and
    keeps the inputs of all of them.
    """
    in_flight = 1 if is_whole_iteration else microbatches_in_flight
    return int(CAPTURE_MARGIN * (activation_bytes * in_flight + input_bytes))


def activation_estimate(
    *, tokens: int, hidden_size: int, num_layers: int, vocab_size: int, bytes_per_element: int
) -> int:
    """Estimate the activations of one microbatch of a transformer, for a device that does not count its memory.

    About 34 values of hidden size for each token and layer with attention that is not stored, and three logits.
    """
    return bytes_per_element * tokens * (17 * 2 * hidden_size * num_layers + 3 * vocab_size)


def capture_fits(predicted_bytes: int, free_bytes: int | None) -> Decision:
    """Decide for one rank whether its graphs fit into the free memory; True where that is not known."""
    if free_bytes is None or predicted_bytes <= free_bytes:
        return Decision(True, f"{predicted_bytes / 2**20:.0f} MiB predicted")
    wanted, free = (f"{size / 2**20:.0f} MiB" for size in (predicted_bytes, free_bytes))
    return Decision(False, f"graphs need about {wanted}, and {free} are free")


def is_time(step: int, interval: int | None, last: int) -> bool:
    """True after iterations that are a multiple of an interval, and after the last one; never without an interval."""
    return bool(interval) and (step % int(interval or 1) == 0 or step == last)
