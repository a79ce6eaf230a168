"""The hooks guard finds hooks that were added or removed since capture: on modules, on parameters, on all modules.

A hook is Python code. It runs when a step is recorded, but not at replays. Hooks of modules are refused unless the user
admits them. Hooks of parameters are recorded like the step's own code. The guard notices both kinds when they are added
or removed: torch numbers all hooks, so an unchanged number means that there is no new one, and a smaller count at a
place means that one was removed. Only then are all places compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from stepgraph.core.errors import CaptureError
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.backends.threads import entries, is_own, origin_of
from stepgraph.engine.guards.protocol import Change, Remedy

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_ALL_MODULES = tuple(f"_global{kind}" for kind in _OF_MODULES)

_SAFE = {
    "transformers": ("make_inputs_require_grads",),
    "peft": ("make_inputs_require_grads", "make_inputs_require_grad"),
    "tensordict": ("_OutKeysSelect",),
    "torchrl": (
        *("_forward_hook_safe_action", "QValueHook", "DistributionalQValueHook"),
        "_updater_check_forward_prehook",  # warns, maybe
    ),
}
"""Hooks of libraries, by package and name, that only work on tensors: a replay repeats their work."""

Place = tuple[Any, str]
"""The owner of hooks, and the attribute that holds them."""


def places_of(
    modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor] = (), *, everywhere: bool = False
) -> list[Place]:
    """List the places for hooks of these modules and parameters; with `everywhere`, also for hooks of all modules."""
    found: list[Place] = [(module, kind) for module in modules for kind in _OF_MODULES]
    found += [(parameter, kind) for parameter in parameters for kind in _OF_PARAMETERS]
    return found + [(torch_module, kind) for kind in _OF_ALL_MODULES] if everywhere else found


class HooksGuard:
    """The hooks at some places."""

    def __init__(self, places: Sequence[Place], name: Callable[[Any], str]) -> None:
        self._places, self._name = tuple(places), name
        self._admitted: frozenset[str] = frozenset()
        self._hooks = self._read()
        self._filled = [hooks for place in self._places if (hooks := _at(place))]
        self._counts = list(map(len, self._filled))
        self._handles_seen = RemovableHandle.next_id

    def admit(self, names: Collection[str]) -> None:
        """Ignore hooks of functions with these names: the engine that replays the graph runs them."""
        self._admitted = frozenset(names)

    def is_quiet(self) -> bool:
        """Check in one go that there is no sign of a change since the last comparison."""
        return RemovableHandle.next_id == self._handles_seen and list(map(len, self._filled)) == self._counts

    def expect(self, row: GuardRow) -> None:
        """Add the check of `is_quiet` to a row."""
        row.attribute(RemovableHandle, "next_id", self._handles_seen)
        for hooks, count in zip(self._filled, self._counts, strict=True):
            row.length(hooks, count)

    def difference(self) -> tuple[str, str] | None:
        """Return the first hook that was added or removed, and how, or None."""
        if self.is_quiet():
            return None
        now = self._read()
        for (owner, kind), one, two in zip(self._places, self._hooks, now, strict=True):
            if one != two:
                whose = "all modules" if owner is torch_module else f"`{self._name(owner)}`"
                return f"a hook of {whose}", f"was added or removed ({kind.removeprefix('_global').strip('_')})"
        self._handles_seen, self._counts = RemovableHandle.next_id, list(map(len, self._filled))
        return None

    def _read(self) -> list[tuple[int, ...]]:
        return [tuple(k for k, h in entries(_at(place)) if not self._may_come_and_go(h)) for place in self._places]

    def _may_come_and_go(self, hook: Any) -> bool:
        return is_own(hook) or (bool(self._admitted) and spelled(hook) in self._admitted)


class ParameterHooksGuard:
    """Parameters whose gradients a graph accumulates: a hook added later would never run."""

    def __init__(self, parameters: Iterable[torch.Tensor], name: Callable[[Any], str]) -> None:
        self._parameters, self._name = list(parameters), name
        self._handles_seen = -1  # graphs may be captured long after it was decided what they accumulate

    def changed(self) -> Sequence[Change]:
        """Report the first parameter that has a hook now."""
        if RemovableHandle.next_id == self._handles_seen:
            return ()
        for parameter in self._parameters:
            if is_hooked(parameter):
                return (Change("a hook", "", f"was added to `{self._name(parameter)}`", Remedy.START_OVER),)
        self._handles_seen = RemovableHandle.next_id
        return ()

    def expect(self, row: GuardRow) -> None:
        """Add the expectation that torch has made no hook since."""
        row.attribute(RemovableHandle, "next_id", self._handles_seen)


def is_hooked(parameter: torch.Tensor) -> bool:
    """Check whether Python code runs when a parameter gets its gradient."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(hooks) or hasattr(parameter, "main_grad")


has_global_hooks: Callable[[], bool] = torch_module._has_any_global_hook
"""Checks whether there are hooks on all modules of the process."""


_FINDS_STEPS = "stepgraph.tools.script.steps"
"""Our module that finds the steps of a script by a hook on all modules. The hook looks at outermost calls only, so that
a replay need not run it."""


def global_hook(safe: Collection[Any]) -> str | None:
    """Return the name of a hook on all modules of the process that is not listed as safe, or None."""
    for place in places_of((), everywhere=True):
        for _, hook in entries(_at(place)):
            if hook not in safe and spelled(hook) not in safe and origin_of(hook) != _FINDS_STEPS:
                return spelled(hook)
    return None


def _at(place: Place) -> dict[int, Any]:
    return getattr(*place, None) or {}


def with_hooks(
    function: Callable[..., Any],
    modules: Sequence[torch.nn.Module],
    parameters: Sequence[torch.Tensor] = (),
    *,
    everywhere: bool = False,
) -> Callable[..., Any]:
    """Return a function together with the hooks that run in it. Values that hooks read are baked in, too."""
    places = places_of(modules, parameters, everywhere=everywhere)
    hooks = {id(hook): hook for place in places for _, hook in entries(_at(place)) if not is_own(hook)}
    named: dict[str, Any] = {}
    for hook in hooks.values():
        name = f"hook {spelled(hook)}"
        named[f"{name}#{len(named) + 1}" if name in named else name] = hook
    return functools.partial(function, **named) if named else function


def refuse_hooks(
    step: str,
    modules: Sequence[torch.nn.Module],
    safe: Collection[Any],
    name: Callable[[Any], str],
    *,
    everywhere: bool = False,
) -> None:
    """Refuse hooks on captured modules, since replays would not run them, except safe ones."""
    for owner, kind in places_of(modules, everywhere=everywhere):
        for _, hook in entries(_at((owner, kind))):
            if hook in safe or spelled(hook) in safe or _is_known(hook) or is_own(hook):
                continue
            whose = "every module" if owner is torch_module else f"module `{name(owner)}`"
            raise CaptureError(
                f"{step}: {whose} has a hook, `{spelled(hook)}` ({kind.removeprefix('_global').strip('_')})",
                rule="module-hook",
                why="a hook is Python code: it would run when the step is captured, but not at replays.",
                fix="remove it. If it only does tensor work, which can be recorded, admit it: "
                f"stepgraph.capture(step, safe_hooks=[{spelled(hook)!r}]).",
            )


def spelled(hook: Any) -> str:
    """Return the name of a hook's function, or of its class."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _is_known(hook: Any) -> bool:
    """Check for hooks of torch.nn.utils (weight_norm, spectral_norm, prune), and for those in `_SAFE`."""
    package, _, rest = origin_of(hook).partition(".")
    name = spelled(hook).rpartition(".")[2]
    return bool(rest) and (package == "torch" or name in _SAFE.get(package, ()))
