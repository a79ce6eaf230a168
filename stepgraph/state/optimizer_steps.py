"""Optimizer steps of one thread's step, told by hooks that torch keeps for the whole process.

torch walks through these hooks whenever any optimizer steps. Taking one out during such a walk in another thread breaks
it ("OrderedDict mutated during iteration"), in a training that has nothing to do with us. So a hook is only taken out
when nobody is on such a walk. One that has to stay does nothing, and is taken out when the next ones come.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from stepgraph.backends.threads import for_this_thread
from stepgraph.frames import is_running

_WALKERS = frozenset(
    code for code in Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, types.CodeType)
)
"""torch's function that walks through the hooks: it is around every optimizer's `step`."""
_RESULT = "out"
"""How it calls what `step` has returned."""


@contextlib.contextmanager
def at_optimizer_steps(
    before: Callable[[Optimizer], None] | None = None, after: Callable[[Optimizer, Any], None] | None = None
) -> Iterator[None]:
    """Be told of each optimizer that steps meanwhile, and does so for a step that this thread calls.

    `after` is told what the step returns, too. Both stand around the hooks of the optimizer itself.
    """
    is_ours = for_this_thread()

    def begun(optimizer: Optimizer, *_: Any) -> None:
        if is_ours() and before is not None:
            before(optimizer)

    def ended(optimizer: Optimizer, *_: Any) -> None:
        if is_ours() and after is not None:
            after(optimizer, _returned(sys._getframe(1)))

    with contextlib.ExitStack() as stack:
        if before is not None:
            stack.callback(_take_out, _swept(register_optimizer_step_pre_hook(begun)))
        if after is not None:
            stack.callback(_take_out, _swept(register_optimizer_step_post_hook(ended)))
        yield


def _returned(walker: types.FrameType) -> Any:
    """What a step returns, from the frame that calls its hooks: torch does not tell them."""
    return walker.f_locals.get(_RESULT) if walker.f_code in _WALKERS else None


def _left_behind(optimizer: Optimizer, *_: Any) -> None:
    """Stands where a hook had to stay."""


def _take_out(handle: RemovableHandle) -> None:
    hooks = handle.hooks_dict_ref()
    if hooks is not None and is_running(_WALKERS):
        hooks[handle.id] = _left_behind  # another value in the same place: no walk minds
    else:
        handle.remove()


def _swept(handle: RemovableHandle) -> RemovableHandle:
    """Take out what had to stay where this handle's hook is."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and not is_running(_WALKERS):
        for key, hook in list(hooks.items()):
            if hook is _left_behind:
                del hooks[key]
    return handle
