"""Activation checkpointing repeats the forward's draws from named random states.

torch.utils.checkpoint runs a forward again in the backward pass. It restores the default random state for that, and
knows nothing of a tracker's. Its `context_fn` takes a pair of contexts: the first notes all states where the forward
begins, the second goes back to them, and to the fork that was open, for the length of the recomputation. Under capture
both are part of the graph.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from stepgraph.errors import CaptureError

STEP_FIX = (
    "set states between steps; if the step's forward is recomputed in its backward, let no optimizer or scaler step "
    "that cuts the graph come between the two."
)


def state_of_another_graph(what: str, fix: str) -> CaptureError:
    """The error of a graph that goes back to a random state that it cannot know."""
    return CaptureError(
        f"{what} to one that was not read in the same graph",
        rule="rng-segment",
        why="in a graph a state is a distance from where the graph begins; one of another graph, or of before the "
        "capture, means something else at each replay.",
        fix=fix,
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """Which name was forked, and what every state was; None is the default one."""

    active: str | None
    states: dict[str | None, torch.Tensor]


class Rewindable(Protocol):
    """What can go back in its random states: a tracker."""

    def moment(self) -> Moment:
        """All states now."""

    def go_to(self, moment: Moment) -> None:
        """Make all states those of a moment."""

    def recomputing(self) -> AbstractContextManager[None]:
        """The block is a recomputation whose states are right."""


class Forward(AbstractContextManager[None]):
    """Notes the states where a checkpointed forward begins."""

    def __init__(self, tracker: Rewindable) -> None:
        self._tracker = tracker
        self.moment: Moment | None = None

    def __enter__(self) -> None:
        self.moment = self._tracker.moment()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class Recomputation(AbstractContextManager[None]):
    """Goes back to the states of the forward, and returns. It may be entered again, as a second backward does."""

    def __init__(self, tracker: Rewindable, forward: Forward) -> None:
        self._tracker, self._forward = tracker, forward
        self._stacks: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        assert self._forward.moment is not None, "a recomputation without a forward"
        with contextlib.ExitStack() as stack:
            stack.callback(self._tracker.go_to, self._tracker.moment())
            stack.enter_context(self._tracker.recomputing())
            self._tracker.go_to(self._forward.moment)
            self._stacks.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stacks.pop().close()
