"""Hooks, kept for the whole process (`HookPlace`), report the optimizer steps of one thread's step."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from stepgraph.engine.backends.threads import HookPlace, entries, for_this_thread, is_own

_WALKERS = frozenset(
    code for code in Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, types.CodeType)
)
"""torch's function that iterates over the hooks: it wraps every optimizer's `step`."""
_RESULT = "out"
"""Its name for the result of `step`."""
_BEFORE = HookPlace(torch_optimizer._global_optimizer_pre_hooks, _WALKERS)
_AFTER = HookPlace(torch_optimizer._global_optimizer_post_hooks, _WALKERS)

STEP_HOOKS_OF_ALL: tuple[Mapping[int, Any], ...] = tuple(
    getattr(torch_optimizer, f"_global_optimizer_{kind}_hooks", {}) for kind in ("pre", "post")
)
"""torch's dictionaries of hooks on every optimizer's step."""


@contextlib.contextmanager
def at_optimizer_steps(
    before: Callable[[Optimizer], None] | None = None,
    after: Callable[[Optimizer, Any], None] | None = None,
    *,
    called: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None] | None = None,
) -> Iterator[None]:
    """Report each optimizer that steps in this block for a step that this thread calls.

    `after` is also given the step's result, `called` its arguments. All run around the hooks of the optimizer itself,
    once for each step: that a subclass's step calls its parent's, which torch reports too, does not count.
    """
    is_ours = for_this_thread()
    under_way: Counter[int] = Counter()

    def begun(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_ours():
            under_way[id(optimizer)] += 1
            if under_way[id(optimizer)] > 1:
                return
            if before is not None:
                before(optimizer)
            if called is not None:
                called(optimizer, args[1:], kwargs)

    def ended(optimizer: Optimizer, *_: Any) -> None:
        if is_ours():
            under_way[id(optimizer)] -= 1
            if after is not None and not under_way[id(optimizer)]:
                walker = sys._getframe(2)  # torch does not pass the result to hooks
                after(optimizer, walker.f_locals.get(_RESULT) if walker.f_code in _WALKERS else None)

    with contextlib.ExitStack() as stack:
        for place, listener in ((_BEFORE, begun), (_AFTER, ended)):
            place.listen(listener)
            stack.callback(place.leave, listener)
        yield


def all_have_hooks() -> bool:
    """Whether there is a hook on every optimizer's step that is not ours."""
    return any(STEP_HOOKS_OF_ALL) and not all(is_own(h) for hooks in STEP_HOOKS_OF_ALL for _, h in entries(hooks))


def has_other_step(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step was replaced by other code."""
    return without_schedulers(optimizer.step) is not type(optimizer).step


def step_hooks(optimizer: Optimizer) -> list[Sized]:
    """An optimizer's dictionaries of hooks on its step."""
    return [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]


def without_schedulers(method: Any) -> Any:
    """The function behind a method, without the wrapper that a learning rate scheduler puts around it."""
    while getattr(method, "_wrapped_by_lr_sched", False):
        method = method.__wrapped__
    return getattr(method, "__func__", method)


@contextlib.contextmanager
def shadowed(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute on one instance, and leave the instance as it was."""
    missing = object()
    before = instance.__dict__.get(name, missing)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            del instance.__dict__[name]
        else:
            instance.__dict__[name] = before
