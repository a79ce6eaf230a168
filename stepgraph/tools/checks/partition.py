"""Finds the largest set of modules of a model that can be captured, from two eager steps and trials without effect.

The search itself stands in a lower room (`joined.search`), because `stepgraph.capture(..., on_error="modules")` uses it
too, and imports point to earlier rooms only. Here it is applied to a model and its training loop, on the tape or on a
GPU. `Partition.scope()` is what `graph_modules` takes:

    >>> found = partition(model, lambda: train_step(batch))
    >>> stepgraph.graph_modules(model, scope=found.scope())
    >>> found.causes()                  # {"layers.3.experts": "it reads a tensor's value on the host ... [host-read]"}

The two steps train: they are steps of the loop like others. Where the loop cannot be called (a script that runs by
itself), a `ModuleSearch` is told when a step begins and ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from stepgraph.engine.call.options import Hook
from stepgraph.engine.call.session import Session
from stepgraph.engine.parts.modules.options import ModuleOptions
from stepgraph.engine.step.fallback.observed import ObservedStep
from stepgraph.engine.step.fallback.search import Partition, Refusal, search
from stepgraph.engine.step.fallback.trial import Trials

__all__ = ["ModuleSearch", "Partition", "partition"]

BUDGET = 60.0
"""Seconds for all trials, if nothing else is said."""


def partition(model: torch.nn.Module, run_step: Callable[[], Any], *, budget: float = BUDGET) -> Partition:
    """Find the largest set of modules that can be captured.

    `run_step` runs one training step; it is called twice, with batches of one shape. No trial begins after `budget`
    seconds.
    """
    with ModuleSearch(model) as job:
        while not job.is_ready:
            job.begin_step()
            try:
                run_step()
            finally:
                job.end_step()
        return job.finish(budget)


class ModuleSearch:
    """A search that sees two steps of a loop which it does not call itself.

    Example:
        >>> with ModuleSearch(model) as job:
        ...     for batch in loader:
        ...         job.begin_step()
        ...         train_step(batch)
        ...         job.end_step()
        ...         if job.is_ready:
        ...             break
        ...     found = job.finish(budget=60.0)
    """

    def __init__(self, model: torch.nn.Module, *, ignore: Sequence[str] = (), safe_hooks: Sequence[Hook] = ()) -> None:
        self._session = Session()
        self._options = ModuleOptions(ignore=ignore, safe_hooks=safe_hooks)
        self._step = ObservedStep({"": model}, self._session, self._options)
        self._observing = contextlib.ExitStack()
        self._num_steps = 0

    @property
    def is_ready(self) -> bool:
        """True once two steps were observed."""
        return self._num_steps >= 2

    def begin_step(self) -> None:
        """Observe the step that begins now."""
        if not self.is_ready:
            self._observing.enter_context(self._step.observing(second=self._num_steps == 1))

    def end_step(self) -> None:
        """Observe no further: the step has ended."""
        if not self.is_ready:
            self._observing.close()
            self._num_steps += 1

    def finish(self, budget: float = BUDGET, unfit: Mapping[str, str] = MappingProxyType({})) -> Partition:
        """Try the modules, and return the largest set that can be captured.

        Modules in `unfit` are not tried: by path, each with the reason.
        """
        trials = Trials(self._step, self._options.max_runners)

        def can_capture(path: str) -> Refusal | None:
            return Refusal(unfit[path]) if path in unfit else trials.can_capture(path)

        return search(self._step.tree(), can_capture, budget)

    def close(self) -> None:
        """Take the observers out, and free all memory."""
        self._observing.close()
        self._step.close()
        self._session.close()

    def __enter__(self) -> ModuleSearch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
