"""Warm-up calls each callable before a capture ahead of training, and restores all state afterwards.

The first calls choose kernels, load libraries and fill caches, and none of that may happen in a recording. So each
callable is called with its sample arguments a few times, forward and backward, on the capture stream. Training has not
begun, so the calls must leave no effect: buffers (BatchNorm's statistics), attributes, random states and gradients are
restored. Proxies replace the parameters meanwhile: no gradient reaches the parameters, and none of their hooks runs.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.ambient import under_autocast, without_saved_tensor_hooks
from stepgraph.core.collector import state_of
from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tensor_memory import SavedContents
from stepgraph.core.tree import flatten, unflatten
from stepgraph.core.wording import counted, with_article
from stepgraph.engine.backends import Backend
from stepgraph.engine.backends.random.tracker import tracker_for
from stepgraph.engine.memory.inputs import tensors_among
from stepgraph.engine.observe.module_attributes import ModuleAttributes
from stepgraph.engine.observe.step_objects import leaves_behind
from stepgraph.engine.parts.callables.call_shape import detached
from stepgraph.engine.parts.callables.target import named
from stepgraph.engine.record.pair.cached_casts import as_computed, keeps_casts
from stepgraph.engine.record.pair.call import EagerCall
from stepgraph.engine.record.pair.eager import run_call
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.parameter_proxies import without_hooks
from stepgraph.engine.record.pair.target import PairTarget
from stepgraph.engine.record.pair.uses import is_reentrant

PHASES = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class CaptureTimeHooks:
    """Functions that run around each forward and backward of warm-up, capture and audits, but never at a replay."""

    def __init__(self, given: Any, callables: Sequence[Callable[..., Any]]) -> None:
        self._callables, num_callables = callables, len(callables)
        entries = [None] * num_callables if given is None else given
        if not isinstance(entries, Sequence) or len(entries) != num_callables:
            raise _wrong_hooks(
                f"{given!r}"[:80], f"pass a list of {counted(num_callables, 'entries')}, one a callable."
            )
        self._hooks: list[dict[str, list[Callable[[Any], Any]]]] = []
        for index, entry in enumerate(entries):
            if entry is not None and not isinstance(entry, Mapping):
                raise _wrong_hooks(f"entry {index} is {with_article(type(entry))}", "pass a dict, or None.")
            unknown = sorted(set(entry or ()) - set(PHASES))
            if unknown:
                raise _wrong_hooks(f"entry {index} has {unknown[0]!r}", f"use any of {', '.join(PHASES)}.")
            self._hooks.append({phase: _functions(index, phase, (entry or {}).get(phase)) for phase in PHASES})

    @contextlib.contextmanager
    def around(self, index: int, *, backward: bool) -> Iterator[None]:
        """Run the hooks of a callable before and after its forward or backward, outside any recording."""
        before, after = PHASES[2:] if backward else PHASES[:2]
        self._run(index, before)
        yield
        self._run(index, after)

    def _run(self, index: int, phase: str) -> None:
        for hook in self._hooks[index][phase]:
            if hook(self._callables[index]) is not None:
                raise _wrong_hooks(
                    f"a hook of callables[{index}] ({phase}) returned a value",
                    "let it return None: it cannot change arguments, results or gradients.",
                )


@dataclass(frozen=True, slots=True)
class WarmUpCall:
    """One kind of call to warm up."""

    target: PairTarget
    kind: CallKind
    call: EagerCall
    index: int
    """Index of the callable."""
    leaves: Sequence[Any]
    """The sample arguments."""


def warm_up(
    calls: Sequence[WarmUpCall], backend: Backend, hooks: CaptureTimeHooks, *, iterations: int, trains: bool
) -> None:
    """Call each callable with its sample arguments, forward and backward, and log the operations of the forwards.

    Raise for effects that no replay can repeat.
    """
    with as_before([call.target.module for call in calls], backend):
        for call in calls:
            for _ in range(iterations):
                _one_call(call, hooks, backend.device, trains=trains)
            if iterations > 1 and call.kind.seen is not None:  # a first call may fill caches
                with named(call.target):
                    raise call.kind.seen
            if iterations > 2:
                call.kind.proof.refuse_varying(call.target.name, "callable")


def _one_call(warm: WarmUpCall, hooks: CaptureTimeHooks, device: torch.device, *, trains: bool) -> None:
    """Run a forward and a backward on copies and proxies."""
    target, pair = warm.target, warm.target.pair()
    leaves = [detached(leaf) for leaf in warm.leaves]
    if keeps_casts(warm.call.ambient):  # samples are leaves, and what calls are given was computed
        leaves = [as_computed(leaf) if getattr(leaf, "requires_grad", False) else leaf for leaf in leaves]
    args, kwargs = unflatten(warm.call.structure, leaves)
    mode = contextlib.nullcontext() if trains else torch.no_grad()
    around = hooks.around(warm.index, backward=False)
    with around, pair.proxies.in_place(), without_saved_tensor_hooks(), mode:
        made = run_call(
            *(target, warm.kind, warm.call, leaves, tensors_among(leaves)),
            lambda: target.original(*args, **kwargs),
        )
    pair.note_returned(made.value, leaves)
    results = [t for t in flatten(made.value)[0] if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    if not results:
        return
    incoming = [torch.zeros_like(result) for result in results]
    behind = list({id(leaf): leaf for leaf in leaves_behind(results)}.values())
    own = {id(leaf) for leaf in (*pair.proxies.leaves, *leaves)}
    foreign = [leaf for leaf in behind if id(leaf) not in own]
    around = hooks.around(warm.index, backward=True)
    plain, noting = under_autocast(False, False), warm.kind.ran.noting(backwards_on=device)
    with around, pair.proxies.in_place(), without_saved_tensor_hooks(), plain, without_hooks(foreign), noting:
        if is_reentrant(results):
            torch.autograd.backward(results, incoming)
        else:
            torch.autograd.grad(results, behind, incoming, allow_unused=True)
    for leaf in pair.proxies.leaves:
        leaf.grad = None


@contextlib.contextmanager
def as_before(owners: Iterable[torch.nn.Module], backend: Backend) -> Iterator[None]:
    """Restore all that calls of these modules change: buffers, attributes, random states."""
    modules = list({id(m): m for owner in owners for m in owner.modules()}.values())
    tensors = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
    for parameter in (p for m in modules for p in m._parameters.values() if p is not None):
        main_grad = getattr(parameter, "main_grad", None)  # code of the backward may add to it directly
        if isinstance(main_grad, torch.Tensor):
            tensors[id(main_grad)] = main_grad
    contents = SavedContents(tensors.values())
    attributes = ModuleAttributes({str(index): module for index, module in enumerate(modules)})
    with _random_as_before(backend):
        try:
            yield
        finally:
            attributes.restore()
            contents.put_back()


@contextlib.contextmanager
def _random_as_before(backend: Backend) -> Iterator[None]:
    """Restore all random states, including the host's."""
    generators = list({id(g): g for g in (backend.default_generator, *tracker_for(backend).generators)}.values())
    states = [state_of(generator) for generator in generators]
    host, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        torch.set_rng_state(host)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _functions(index: int, phase: str, given: Any) -> list[Callable[[Any], Any]]:
    """Return the hooks of a phase, given as a function, several, or a dict of them."""
    if given is None:
        return []
    found = [given] if callable(given) else list(given.values() if isinstance(given, Mapping) else given)
    for hook in found:
        if not callable(hook):
            raise _wrong_hooks(f"{phase} of entry {index} has {with_article(type(hook))}", "pass functions.")
    return found


def _wrong_hooks(what: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        f"capture_time_hooks: {what}",
        rule="capture-time-hooks",
        why="stepgraph calls each hook with the callable, around each forward and backward of warm-up and capture.",
        fix=fix,
    )
