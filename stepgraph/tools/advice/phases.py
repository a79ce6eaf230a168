"""What `advise` does in each step of a script: one thing at a time, so that nothing disturbs another.

| steps | what is done |
|---|---|
| warm-up | nothing; in the first two the models and optimizers that run are noted |
| timed | an event is recorded where each step begins; nothing waits |
| host | the queue is drained before and after the step, so that the host's own time is seen, in the step and between |
| waits | torch reports each wait for the device, which is noted with its line |
| profile | torch's profiler runs, and the parts of the model are marked |

Then the script is stopped. Without a GPU only the first kind is run: a CPU's times say nothing about a GPU's. Imports
no torch.
"""

from __future__ import annotations

import enum

WARMUP, HOST_STEPS = 5, 3
MODELS_STEP = 1
"""The last step in which models are noted."""


class Phase(enum.Enum):
    """What is done in a step."""

    WARMUP = enum.auto()
    TIMED = enum.auto()
    HOST = enum.auto()
    WAITS = enum.auto()
    PROFILE = enum.auto()
    OVER = enum.auto()


def phase_of(index: int, steps: int) -> Phase:
    """Return what is done in a step, if so many are timed; 0 means that nothing is measured.

    Example:
        >>> phase_of(5, steps=20)
        <Phase.TIMED: 2>
    """
    if steps == 0:
        return Phase.WARMUP if index <= MODELS_STEP + 1 else Phase.OVER
    ends = ((WARMUP, Phase.WARMUP), (steps, Phase.TIMED), (HOST_STEPS, Phase.HOST), (1, Phase.WAITS))
    for length, phase in (*ends, (1, Phase.PROFILE)):
        if index < length:
            return phase
        index -= length
    return Phase.OVER


def steps_needed(steps: int) -> int:
    """Return how many steps a script must have for so many timed ones."""
    return WARMUP + steps + HOST_STEPS + 2
