"""Draws inside `fork(name)` come from the random state of that name and leave the default one untouched.

Tensor parallelism needs it: dropout that must differ between ranks draws from one state, dropout that must agree from
another. A name is a `torch.Generator`. To fork, its state and that of the device's default generator are swapped, and
swapped back at the end, so that every operator draws from it, also one that knows nothing of generators. A swap under
capture is part of the graph (`Backend.swap_random_state`), and every graph knows all names (`ChainRecorder`), so a
replay draws from the live states and advances them. One name is swapped in at a time: a fork inside a fork first gives
the outer name its state back. So each state has one home, and the same name may be forked within itself.

torch.utils.checkpoint runs a forward again in the backward pass. It restores the default random state and knows nothing
of named ones. Its `context_fn` takes a pair of contexts: the first notes all states where the forward begins, the
second goes back to them, and to the fork that was open, for the recomputation. Under capture both are part of the
graph.

The tracker belongs to the process, because torch has one default generator for each device, and model code asks for the
tracker by a function without arguments. Two trackers that swap one generator's state would not know of each other.
`get_cuda_rng_tracker().reset()` empties it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.errors import CaptureError, InvalidArgument
from stepgraph.core.frames import called_from_torch
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.backends import Backend, backend_for

_TRACKERS: dict[torch.device, CudaRNGStatesTracker] = {}
STEP_FIX = (
    "set states between steps; if the step's forward is recomputed in its backward, let no optimizer or scaler step "
    "that cuts the graph come between the two."
)


@entry_point
def get_cuda_rng_tracker(device: torch.device | str | None = None) -> CudaRNGStatesTracker:
    """The process's tracker of named random states on a device: the current GPU, or the CPU where there is none.

    Example:
        >>> tracker = stepgraph.get_cuda_rng_tracker()
        >>> tracker.add("model-parallel-rng", seed=1234 + rank)
        >>> with tracker.fork():                     # inside a captured step as outside
        ...     hidden = F.dropout(hidden, 0.1)
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return tracker_for(backend_for(device))


def tracker_for(backend: Backend) -> CudaRNGStatesTracker:
    """The process's tracker on a backend's device."""
    tracker = _TRACKERS.get(backend.device)
    if tracker is None:
        tracker = _TRACKERS[backend.device] = CudaRNGStatesTracker(backend)
    return tracker


def state_of_another_graph(what: str, fix: str) -> CaptureError:
    """The error of a graph that goes back to a random state that it cannot know."""
    return CaptureError(
        f"{what} to one that was not read in the same graph",
        rule="rng-segment",
        why="in a graph a state is a distance from where the graph begins; one of another graph, or from before the "
        "capture, means something else at each replay.",
        fix=fix,
    )


class Segment:
    """The states that were read while one graph was recorded, by id."""

    def __init__(self, forward: Segment | None = None) -> None:
        self.states: dict[int, torch.Tensor] = {}
        self._forward = forward
        self.rewinds = False
        """Whether it goes back to a state of its forward graph."""

    def goes_to(self, state: torch.Tensor) -> bool:
        """Whether a state is known here, so that the graph can go back to it."""
        if id(state) in self.states:
            return True
        found = self._forward is not None and id(state) in self._forward.states
        self.rewinds = self.rewinds or found
        return found


class CudaRNGStatesTracker:
    """Named random states of one device. `get_cuda_rng_tracker` gives the process's, which every graph knows.

    Pass the generators of another tracker to the step: `capture(step, generators=tracker.generators)`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._named: dict[str, torch.Generator] = {}
        self._seeds: set[int] = set()
        self.generators: tuple[torch.Generator, ...] = ()
        """The generators that hold the states; a new tuple whenever the names change."""
        self.active: str | None = None
        """The name that is forked now."""
        self.asked = 0
        """How often code has forked or looked at the names; new names do not matter to a step that did neither."""
        self._recomputing = 0
        self._segment = Segment()

    # -- names

    @property
    def states(self) -> tuple[str, ...]:
        """The names, in the order they were added."""
        self.asked += 1
        return tuple(self._named)

    def is_initialized(self) -> bool:
        """Whether there is any name."""
        return bool(self.states)

    @entry_point
    def add(self, name: str, seed: int) -> None:
        """Add a state under a new name, seeded with a seed that no other name has."""
        self._refuse_while_in_use(f"`{name}` was about to be added")
        if name in self._named or seed in self._seeds:
            twice = f"a random state `{name}`" if name in self._named else f"a random state with seed {seed}"
            raise InvalidArgument(
                f"tracker.add({name!r}, {seed}): there is {twice} already",
                rule="rng-state",
                why="names find a state, and two states of one seed would draw the same numbers.",
                fix="take another name and another seed, or call tracker.reset() first to start over.",
            )
        self._named[name] = torch.Generator(self._backend.device).manual_seed(seed)
        self._seeds.add(seed)
        self._names_changed()

    @entry_point
    def reset(self) -> None:
        """Forget all names."""
        self._refuse_while_in_use("the tracker was about to be reset")
        self._named.clear()
        self._seeds.clear()
        self._names_changed()

    def _names_changed(self) -> None:
        self.generators = tuple(self._named.values())

    def _refuse_while_in_use(self, what: str) -> None:
        if self.active is not None or self._backend.is_capturing():
            where = "while a step is captured" if self.active is None else f"inside fork({self.active!r})"
            raise InvalidArgument(
                f"{what} {where}",
                rule="rng-state",
                why="a graph knows the states that there were when its capture began, and a fork gives its state back.",
                fix="add names once, before the first step.",
            )

    # -- drawing

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a named state inside the block, and from the earlier state after it, also after an exception."""
        self.asked += 1
        if name not in self._named:
            raise InvalidArgument(
                f"tracker.fork({name!r}): there is no random state of that name on {self._backend.device}",
                rule="rng-state",
                details=[f"names  {', '.join(self._named) or 'none'}"],
                why="a state is made, with its seed, before it is drawn from.",
                fix=f"call get_cuda_rng_tracker().add({name!r}, seed) once, after torch.cuda.set_device.",
            )
        self._refuse_unknown_recomputation(name)
        with self.moved_to(name):
            yield

    def _switch(self, name: str | None) -> None:
        if name == self.active:
            return
        if self.active is not None:
            self._backend.swap_random_state(self._named[self.active])
            self.active = None
        if name is not None:
            self._backend.swap_random_state(self._named[name])
            self.active = name

    # -- states as values

    def get_states(self) -> dict[str, torch.Tensor]:
        """Every name's state as a tensor, to be saved in a checkpoint."""
        self.asked += 1
        return {name: self._get(name) for name in self._named}

    @entry_point
    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Make the names and their states those of `get_states`; graphs go on with the new states."""
        before, renamed = self._named, set(states) != set(self._named)
        if renamed:
            self._refuse_while_in_use("names were about to change")
            self._named = {name: before.get(name) or torch.Generator(self._backend.device) for name in states}
        kept = self.get_states()
        for name, state in states.items():
            try:
                self._set(name, state)
            except (RuntimeError, TypeError, AttributeError) as error:
                for known in kept:
                    self._set(known, kept[known])
                self._named = before
                if self._backend.is_capturing():
                    raise
                raise InvalidArgument(
                    f"tracker.set_states: `{name}` has no random state of {self._backend.device.type}: {error}",
                    rule="rng-state",
                    why="states are the tensors that get_states returned, on the same kind of device.",
                    fix="save tracker.get_states() in the checkpoint, and pass it back as it is.",
                ) from error
        if renamed:
            self._names_changed()

    def _home(self, name: str | None) -> torch.Generator:
        """The generator that holds a state now: a forked one and the default one have changed places."""
        if name == self.active:
            return self._backend.default_generator
        home = self.active if name is None else name
        assert home is not None
        return self._named[home]

    def _get(self, name: str | None) -> torch.Tensor:
        with torch.inference_mode(False):  # the tensor may outlive the mode
            state = self._backend.get_random_state(self._home(name))
        if self._backend.is_capturing():
            self._segment.states[id(state)] = state
        return state

    def _set(self, name: str | None, state: torch.Tensor) -> None:
        if self._backend.is_capturing() and not self._segment.goes_to(state):
            raise state_of_another_graph(f"the step sets the random state `{name or 'default'}`", STEP_FIX)
        self._backend.set_random_state(self._home(name), state if state.device.type == "cpu" else state.cpu())

    # -- recomputation

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What torch.utils.checkpoint takes as `context_fn`, so that the recomputation draws what the forward drew.

        Example:
            >>> checkpoint(layer, x, use_reentrant=False, context_fn=tracker.checkpoint_contexts)
        """
        forward = _Forward(self)
        return forward, _Recomputation(self, forward)

    def _moment(self) -> _Moment:
        return _Moment(self.active, {name: self._get(name) for name in (None, *self._named)})

    def _go_to(self, moment: _Moment) -> None:
        self._switch(moment.active)
        for name, state in moment.states.items():
            self._set(name, state)

    def _refuse_unknown_recomputation(self, name: str) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._recomputing and called_from_torch("utils/checkpoint.py"):
            raise InvalidArgument(
                f"tracker.fork({name!r}) runs again, in the recomputation of torch.utils.checkpoint",
                rule="rng-recompute",
                why="torch restores the default random state for it and knows nothing of named ones: it would draw "
                "other numbers than the forward did, and gradients would be wrong.",
                fix="checkpoint(..., use_reentrant=False, context_fn=get_cuda_rng_tracker().checkpoint_contexts).",
            )

    # -- for the recorder of a step

    def begin_segment(self, forward: Segment | None = None) -> Segment:
        """A graph begins: it cannot use states that were read before, except those of its forward graph."""
        self._segment = Segment(forward)
        return self._segment

    @contextlib.contextmanager
    def left(self) -> Iterator[str | None]:
        """Leave the fork for the length of the block; gives its name."""
        active = self.active
        with self.moved_to(None):
            yield active

    @contextlib.contextmanager
    def moved_to(self, name: str | None) -> Iterator[None]:
        """Be inside the fork of a name, or outside any, for the length of the block."""
        outer = self.active
        try:
            self._switch(name)
            yield
        finally:
            self._switch(outer)

    def under(self, name: str | None, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, made inside a fork."""
        if name is None:
            return call

        def forked() -> Any:
            with self.fork(name):
                return call()

        return forked


@dataclass(frozen=True, slots=True)
class _Moment:
    """The name that was forked, and every state; None is the default one."""

    active: str | None
    states: dict[str | None, torch.Tensor]


class _Forward(AbstractContextManager[None]):
    """Notes the states where a checkpointed forward begins."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        self._tracker = tracker
        self.moment: _Moment | None = None

    def __enter__(self) -> None:
        self.moment = self._tracker._moment()

    def __exit__(self, *error: object) -> None:
        return


class _Recomputation(AbstractContextManager[None]):
    """Goes back to the states of the forward, and returns. It may be entered again, as a second backward does."""

    def __init__(self, tracker: CudaRNGStatesTracker, forward: _Forward) -> None:
        self._tracker, self._forward = tracker, forward
        self._outer: list[_Moment] = []

    def __enter__(self) -> None:
        assert self._forward.moment is not None, "a recomputation without a forward"
        outer = self._tracker._moment()
        self._tracker._recomputing += 1
        try:
            self._tracker._go_to(self._forward.moment)
        except BaseException:
            self._leave(outer)
            raise
        self._outer.append(outer)

    def __exit__(self, *error: object) -> None:
        self._leave(self._outer.pop())

    def _leave(self, outer: _Moment) -> None:
        self._tracker._recomputing -= 1
        self._tracker._go_to(outer)
