"""Finds the training steps of a script that knows nothing of stepgraph.

A step reaches from the first forward of an iteration to the iteration's last call of an optimizer, a GradScaler or
`zero_grad`. Nothing marks the iterations of a loop, in a function or at module level, so they are recognized by events
and by where in the user's code they happen. An event's *site* is the stack of its calls, each with the position of its
instruction. Code that comes later in an iteration stands at a later site; a loop goes back to an earlier one, or to the
same. So, once an optimizer has stepped:

| event | site | meaning |
|---|---|---|
| forward | not after the step's first forward, or seen in this step | the next step begins |
| forward | after it | the same step goes on: a GAN's second network |
| zero_grad | not after the step's first forward | it precedes the forward of the next iteration, and is in no step |
| zero_grad | after it | the step reaches to here |

Before an optimizer has stepped, every forward belongs to the same step (gradient accumulation). A step that has done
all that the step before it did is complete: what then happens at a new site is not a part of it (a second training
loop after the first).

Forwards that begin no step: those without gradients, those of modules without parameters (transforms of the data),
forwards inside another module's forward, and, once a step was begun in training mode, those in `eval()` mode. If an
optimizer is given a closure, its call begins the step. Code without modules is cut at the optimizer's steps, or at the
`zero_grad` before them.

The first step may hold more than later ones: a forward before the loop belongs to it. Steps are found in the thread
that runs the script. `StepCalls` is the other definition: each call of a function that the user names is a step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from stepgraph.core.frames import is_engine
from stepgraph.engine.backends.threads import replaced

__all__ = ["StepCalls", "StepEvents", "StepFinder", "StepListener", "named_call", "steps_unwatched"]

Site: TypeAlias = tuple[tuple[types.CodeType, int], ...]
"""The calls on the stack, outermost first, each with the position of its instruction."""
_CALL = nn.Module._call_impl.__code__
"""torch's function that runs a module, with its hooks."""


class StepListener(Protocol):
    """Receives the steps of a script.

    A step that ends without having been reached was none: its number is given to the next one that begins.
    """

    def step_begins(self, index: int) -> None:
        """The step with this number begins: the first forward of an iteration is about to run."""

    def step_reaches(self, index: int) -> None:
        """An optimizer, scaler or zero_grad call has returned: all that ran since `step_begins` is in the step."""

    def step_ends(self, index: int) -> None:
        """The next step begins, or the script ends. What ran since the last `step_reaches` was outside the step."""


def goes_back(site: Site, first: Site) -> bool:
    """Whether code at `site`, if it runs after code at `first`, runs there because a loop came round."""
    for (code, position), (first_code, first_position) in zip(site, first, strict=False):
        if code is not first_code:
            return True  # one instruction that calls different functions in turn
        if position != first_position:
            return position < first_position
    return True


@dataclass(slots=True)
class _Step:
    """The step that is under way."""

    first: Site
    """Where it began."""
    is_training: bool
    """Whether it was begun by a forward in training mode, or by an optimizer with a closure."""
    forwards: set[Site] = field(default_factory=set)
    ends: set[Site] = field(default_factory=set)
    """Where optimizers, scalers and zero_grad were called in it."""
    stepped: set[tuple[Site, int]] = field(default_factory=set)
    """Which optimizers and scalers were called, and where: a loop may call several at one site."""
    reached: bool = False


class StepFinder:
    """Turns the events of a loop into steps. Pure: it asks nothing of torch or of the stack."""

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self.index = 0
        """The number of the step that is under way, or of the next."""
        self._step: _Step | None = None
        self._before: _Step | None = None
        self._has_trained = False
        self._has_leading_zero_grad = False
        self._without_forwards = False

    def forward(self, site: Site, *, is_training: bool) -> None:
        """A module is about to run that is not a part of another."""
        step = self._step
        if self._has_trained and not is_training:
            return
        if step is None or self._is_abandoned(step, site, is_training) or self._is_next(step, site):
            step = self._begin(site, is_training)
        self._without_forwards = False
        self._has_trained = self._has_trained or is_training
        step.forwards.add(site)

    def optimizer_begins(self, site: Site, who: int, *, has_closure: bool) -> None:
        """An optimizer or a scaler is about to step."""
        step = self._step
        if step is None or (step.reached and ((site, who) in step.stepped or self._is_foreign(step, site))):
            self._without_forwards = self._without_forwards or not has_closure
            self._begin(site, is_training=has_closure)

    def optimizer_done(self, site: Site, who: int) -> None:
        """An optimizer or a scaler has stepped, or has skipped its step."""
        if self._step is None:
            return
        self._step.stepped.add((site, who))
        self._reach(self._step, site)
        if self._without_forwards and not self._has_leading_zero_grad:
            self._begin(site, is_training=False)

    def zero_grad_done(self, site: Site) -> None:
        """An optimizer's or a module's gradients were set to zero."""
        step = self._step
        if step is None or (step.reached and (goes_back(site, step.first) or self._is_foreign(step, site))):
            self._has_leading_zero_grad = True
            if self._without_forwards:
                self._begin(site, is_training=False)
        elif step.reached:
            self._reach(step, site)

    def finish(self) -> None:
        """The script has ended."""
        if self._step is not None:
            self._end(self._step)

    def _is_next(self, step: _Step, site: Site) -> bool:
        """Whether a forward at this site is one of the next iteration."""
        if not step.reached:
            return False
        return site in step.forwards or goes_back(site, step.first) or self._is_foreign(step, site)

    def _is_foreign(self, step: _Step, site: Site) -> bool:
        """Whether a step has done all that the one before it did, and this site is in neither."""
        before = self._before
        if before is None or before.first != step.first or site in before.forwards or site in before.ends:
            return False
        return step.ends >= before.ends

    def _is_abandoned(self, step: _Step, site: Site, is_training: bool) -> bool:
        """Whether the forwards since a step began were none of a training step."""
        if step.reached or site in step.forwards:
            return False
        is_known = self._before is not None and self._before.first == site
        return is_known or (is_training and not step.is_training)

    def _begin(self, site: Site, is_training: bool) -> _Step:
        if self._step is not None:
            self._end(self._step)
        self._step = _Step(site, is_training)
        self._listener.step_begins(self.index)
        return self._step

    def _reach(self, step: _Step, site: Site) -> None:
        step.reached = True
        step.ends.add(site)
        self._listener.step_reaches(self.index)

    def _end(self, step: _Step) -> None:
        self._step = None
        index = self.index
        if step.reached:
            self._before = step
            self.index += 1
        self._listener.step_ends(index)


class StepEvents:
    """Listens to torch, and reports to a `StepFinder`."""

    def __init__(self, finder: StepFinder) -> None:
        self._finder = finder
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._call: Site | None = None
        """Where the outermost call of an optimizer or a scaler runs."""
        self._watched: set[type] = set()
        """Classes whose `zero_grad` is reported."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Report what happens in the block, in this thread of this process."""
        with contextlib.ExitStack() as stack:
            stack.callback(torch_module.register_module_forward_pre_hook(self._forward_begins).remove)
            begins = functools.partial(self._optimizer_begins, stack)
            stack.callback(torch_optimizer.register_optimizer_step_pre_hook(begins).remove)
            stack.callback(torch_optimizer.register_optimizer_step_post_hook(self._optimizer_done).remove)
            for kind in (torch.amp.GradScaler, *_subclasses(torch.amp.GradScaler)):
                for name in ("step", "update"):
                    if name in vars(kind):
                        stack.enter_context(replaced(kind, name, self._scaler_call))
            for owner in (Optimizer, *_subclasses(Optimizer), nn.Module):
                self._watch_zero_grad(stack, owner)
            yield

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_ours() or not torch.is_grad_enabled():
            return
        if not _is_inner_call() and next(module.parameters(), None) is not None:
            self._finder.forward(_site(), is_training=module.training)

    def _optimizer_begins(self, stack: contextlib.ExitStack, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._watch_zero_grad(stack, type(optimizer))
        if os.getpid() == self._process:  # autograd's threads step optimizers too, in the hooks of gradients
            given = (*args[1:], *kwargs.values())
            self._call_begins(_site(), optimizer, has_closure=any(callable(value) for value in given))

    def _optimizer_done(self, optimizer: Optimizer, *_: Any) -> None:
        site = _site()
        if os.getpid() == self._process and self._call is not None and self._call[:-1] == site[:-1]:
            self._call_done(optimizer)

    def _scaler_call(self, method: Callable[..., Any], scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
        stepped = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Optimizer)), scaler)
        is_outermost = os.getpid() == self._process and self._call_begins(_site(), stepped, has_closure=False)
        result = method(scaler, *args, **kwargs)
        if is_outermost:
            self._call_done(stepped)
        return result

    def _call_begins(self, site: Site, who: Any, *, has_closure: bool) -> bool:
        """Report a call; return False if it is a part of another."""
        outer = self._call  # left behind by a call that raised, unless this one runs in it
        if outer is not None and len(site) > len(outer) and site[: len(outer) - 1] == outer[:-1]:
            return False
        self._call = site
        self._finder.optimizer_begins(site, id(who), has_closure=has_closure)
        return True

    def _call_done(self, who: Any) -> None:
        site, self._call = self._call, None
        if site is not None:
            self._finder.optimizer_done(site, id(who))

    def _watch_zero_grad(self, stack: contextlib.ExitStack, kind: type) -> None:
        if kind not in self._watched and "zero_grad" in vars(kind):
            self._watched.add(kind)
            stack.enter_context(replaced(kind, "zero_grad", self._zero_grad))

    def _zero_grad(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        site = _site()
        is_inner = self._call is not None and site[: len(self._call) - 1] == self._call[:-1]
        if self._is_ours() and not is_inner:
            self._finder.zero_grad_done(site)
        return result


class StepCalls:
    """Each outermost call of a function is a step. It ends when the next one begins, as other steps do."""

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self.index = 0
        self._is_running = False
        self._returned: int | None = None
        """The step whose call has returned, and which has not ended."""
        self._process = os.getpid()

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that reports its calls."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_running or os.getpid() != self._process:
                return function(*args, **kwargs)
            self._is_running = True
            try:
                self.finish()
                self._listener.step_begins(self.index)
                result = function(*args, **kwargs)
                self._returned = self.index
                self._listener.step_reaches(self.index)
            finally:
                self._is_running = False
                if self._returned is None:  # it raised an error, and was no step
                    self._listener.step_ends(self.index)
                else:
                    self.index = self._returned + 1
            return result

        return called

    def finish(self) -> None:
        """The next step begins, or the script has ended."""
        ended, self._returned = self._returned, None
        if ended is not None:
            self._listener.step_ends(ended)


def _subclasses(kind: type[Any]) -> list[type]:
    found: list[type] = []
    for child in kind.__subclasses__():
        found += [other for other in (child, *_subclasses(child)) if other not in found]
    return found


def _is_inner_call() -> bool:
    """Whether a module that is about to run is called by another one; told without walking the whole stack."""
    calls = 0
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and calls < 2:
        calls += frame.f_code is _CALL
        frame = frame.f_back
    return calls > 1


def _site() -> Site:
    """Where the code runs that called torch."""
    calls = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_engine(frame.f_code.co_filename):
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(calls))


def named_call() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """Return function, args and kwargs of the call that is a step by `StepCalls`, while it runs; else None."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in StepCalls.wrapped.__code__.co_consts:
            found = frame.f_locals
            return found["function"], found["args"], found["kwargs"]
        frame = frame.f_back
    return None


@contextlib.contextmanager
def steps_unwatched() -> Iterator[None]:
    """Take the hooks of `StepEvents` away during the block: a capture would find them on all modules and optimizers."""
    places: tuple[Any, ...] = (
        torch_module._global_forward_pre_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    taken = [(place, dict(place)) for place in places]
    for place in places:
        for key, hook in list(place.items()):
            method = hook.func if isinstance(hook, functools.partial) else hook
            if isinstance(getattr(method, "__self__", None), StepEvents):
                del place[key]
    try:
        yield
    finally:
        for place, before in taken:
            place.clear()
            place.update(before)
