"""A trial records the calls that a module got in an observed step, forward and backward, without effect.

The engine of pairs does the refusing, as it does for `graph_modules`: what it can record here, it can record there.
Nothing is replayed and the graphs are freed at once. A recording is a transaction, so that parameters, buffers,
gradients and random states are as they were.

Modules that look alike (`alike`), and were called with the same signatures, are judged by one trial.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

import torch

from stepgraph.core.errors import CaptureError, StepgraphError
from stepgraph.engine.call.failure import capture_error
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.step.fallback.observed import ObservedModule, ObservedStep, SeenCall
from stepgraph.engine.step.fallback.search import Refusal

_SPREADING = frozenset(
    (
        *("host-read", "host-data", "host-random", "host-value", "iterator", "reseed", "module-attribute"),
        *("library-call", "tape-limit", "capture-merge", "unjoined-stream", "legacy-stream"),
    )
)
"""Rules about what a module does, which the module around it does too."""


class Trials:
    """Judges the modules of one observed step."""

    def __init__(self, step: ObservedStep, max_runners: int) -> None:
        self._step, self._max_runners = step, max_runners
        self._judged: dict[Hashable, Refusal | None] = {}
        self.found: dict[str, Refusal | None] = {}
        """The answers so far, by path."""
        self.recordings = 0
        """The trials that were not answered by a module that looks alike."""

    def can_capture(self, path: str) -> Refusal | None:
        """Try one module; None means that it can be captured."""
        self.found[path] = self._try(path)
        return self.found[path]

    def _try(self, path: str) -> Refusal | None:
        module = self._step.modules[path]
        refusal = module.refusal or self._refused_unrecorded(module)
        if refusal is not None:
            return refusal
        look = (module.look, tuple(module.seen))
        if look not in self._judged:
            self.recordings += 1
            self._judged[look] = self._record(module)
        return self._judged[look] or self._refused_by_gradients(module)

    def _refused_unrecorded(self, module: ObservedModule) -> Refusal | None:
        """Refuse by what the observed calls have shown."""
        changed = module.changed_signature()
        if changed is not None:
            what = f"its arguments change from step to step: {changed}"
            return _refusal(module, CaptureError(what, rule="static-shapes"))
        if module.most_under_way > self._max_runners:
            what = f"{module.most_under_way} of its calls wait for their backward at once"
            return _refusal(module, CaptureError(what, rule="max-runners"))
        for seen in module.seen.values():
            if seen.kind.seen is not None:
                return _refusal(module, seen.kind.seen)
        return None

    def _refused_by_gradients(self, module: ObservedModule) -> Refusal | None:
        """Refuse a module that can be recorded, but that a backward for some gradients may reach."""
        partial = self._step.backwards.call
        if partial is not None and any(seen.eager.is_differentiable for seen in module.seen.values()):
            return _refusal(module, CaptureError(f"the step calls {partial}", rule="partial-backward"))
        return None

    def _record(self, module: ObservedModule) -> Refusal | None:
        backend = self._step.session.session.backend
        try:
            for seen in module.seen.values():
                self._record_call(module, seen)
        except Exception as error:  # noqa: BLE001 (whatever broke it, the module cannot be captured)
            return _refusal(module, capture_error(module.target.name, error, backend))
        finally:
            module.target.drop_pair()
        return None

    def _record_call(self, module: ObservedModule, seen: SeenCall) -> None:
        """Record a forward, and its backward if there was one; free both."""
        target, eager, session = module.target, seen.eager, self._step.session
        target.check_capturable(eager.ambient)
        pair = target.pair()
        capturing = session.session.workspace.capturing()
        with interrupts_held(), torch.inference_mode(False), capturing, gradients_aside(self._step.model):
            runner = pair.forward(eager, session.lanes.spare())
            try:
                if any(meta is not None for meta in eager.metas) and eager.backward_ambient is not None:
                    pair.backward(runner, eager.metas, {}, eager.backward_autocast)
            finally:
                runner.free()


@contextlib.contextmanager
def gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """Record without gradients, so that none is moved to the memory of a graph that is freed at once."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def _refusal(module: ObservedModule, error: StepgraphError) -> Refusal:
    what = error.what.removeprefix(f"{module.target.name}: ")
    what = f"it {what.removeprefix('the step ')}" if what.startswith("the step waits") else what
    where = f", at {error.where}" if isinstance(error, CaptureError) and error.where is not None else ""
    return Refusal(f"{what}   [{error.rule}]{where}", spreads=error.rule in _SPREADING)
