"""A `CaptureTarget` is one graphed callable: a module, a method of one, or a function with the modules it reaches.

Guards watch all that its graphs bake in: addresses, modules, hooks, values that its code reads. They are checked before
each replay. A change is an error that names it, because graphs that were captured ahead are not captured again without
the caller's knowledge.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.backends import Backend, Graph
from stepgraph.errors import StateChanged
from stepgraph.guards.hooks import is_hooked, refuse_hooks, with_hooks
from stepgraph.guards.model import ModelGuard
from stepgraph.guards.random_names import NamesGuard
from stepgraph.observe.finder import reachable
from stepgraph.oplog import Difference
from stepgraph.pair.guard import SiteGuard
from stepgraph.pair.module_method import ModuleMethod
from stepgraph.pair.proof import PairLogs
from stepgraph.pair.record import PairCapture, with_modes
from stepgraph.pair.shared import PairSession
from stepgraph.ran import ExecutedCode
from stepgraph.signature import argument_names
from stepgraph.values.watch import Watch

SET_OUTSIDE = ("current_microbatch", "is_first_microbatch")
"""Attributes that training loops set on layers before each call; no graph depends on them."""


class _Holder(torch.nn.Module):
    """The modules that a function can reach, as one module."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)


class CaptureTarget:
    """One callable: the code to record, and the guards."""

    def __init__(self, given: Callable[..., Any], index: int, shared: PairSession, *, need_backward: bool) -> None:
        self.given = given
        kind = (
            type(given).__name__ if isinstance(given, torch.nn.Module) else getattr(given, "__qualname__", "function")
        )
        self.name = f"callables[{index}] ({kind})"
        self.is_module = isinstance(given, torch.nn.Module)
        self.method = "forward"
        if isinstance(given, torch.nn.Module):
            self.module: torch.nn.Module = given
            if given._compiled_call_impl is not None:
                self.method = "_compiled_call_impl"  # called instead of forward after module.compile()
            self._original: Callable[[], Callable[..., Any]] = ModuleMethod(given, self.method)
        else:
            self._original = lambda: given
            owner = given.__self__ if isinstance(given, types.MethodType) else None
            self.module = owner if isinstance(owner, torch.nn.Module) else _Holder(_modules_of(given))
        self.arguments = argument_names(self.original)
        self.modes = [vars(module) for module in with_modes(self.module)]
        self._shared, self._need_backward = shared, need_backward
        self._pair: PairCapture | None = None
        self._outside: frozenset[int] = frozenset()
        """Parameters, by id, whose gradients pass through autograd."""
        self._guard: SiteGuard | None = None
        self.ran = ExecutedCode()
        """The code that ran in its warm-up."""
        self._model_guard: ModelGuard | None = None

    @property
    def original(self) -> Callable[..., Any]:
        """The function that the graphs replace."""
        return self._original()

    @property
    def backend(self) -> Backend:
        return self._shared.session.backend

    @property
    def training(self) -> tuple[bool, ...]:
        """The present mode of each module inside."""
        return tuple(mode["training"] for mode in self.modes)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.module.parameters())

    @property
    def named_modules(self) -> dict[str, torch.nn.Module]:
        """The modules inside, by path."""
        return {f"{self.name}.{path}" if path else self.name: m for path, m in self.module.named_modules()}

    @property
    def pair(self) -> PairCapture:
        """The recorder of its graphs."""
        if self._pair is None:
            self._pair = PairCapture(
                self._original, self.module, self._shared, self._outside, need_backward=self._need_backward
            )
        return self._pair

    @property
    def logs(self) -> PairLogs:
        return self._shared.logs

    def release(self, graph: Graph) -> None:
        self._shared.session.release(graph)

    def route(self, others: Sequence[CaptureTarget]) -> None:
        """Choose the parameters whose gradients pass through autograd: hooked ones, and those of several callables."""
        foreign = {id(p) for other in others if other.module is not self.module for p in other.module.parameters()}
        self._outside = frozenset(id(p) for p in self.parameters if is_hooked(p) or id(p) in foreign)

    def refuse_hooks(self, *, own: bool) -> None:
        """Refuse hooks on modules inside, since replays would not run them, and with `own` on the module itself."""
        names = {id(module): name for name, module in self.named_modules.items()}
        modules = list(self.module.modules())
        runs_around = self.is_module and not own
        refuse_hooks(self.name, modules[1:] if runs_around else modules, (), lambda m: names[id(m)])

    # -- guards

    def guard(self, names: Sequence[NamesGuard], *, own_hooks: bool) -> None:
        """Make the guards of what the graphs have baked in."""
        spelled = {id(p): f"{self.name}.{path}" for path, p in self.module.named_parameters()}
        spelled |= {id(module): name for name, module in self.named_modules.items()}
        modules = list(self.module.modules())
        inside = modules[1:] if self.is_module and not own_hooks else modules  # its own hooks run around the graphs
        model = ModelGuard(
            modules,
            self.parameters if self.is_module else self.pair.known_parameters(),
            lambda value: spelled.get(id(value), type(value).__name__),
            self._shared.events,
            hooked=inside,
        )
        self._model_guard = model
        values = Watch(with_hooks(self.original, inside), SET_OUTSIDE, self.named_modules, ran=self.ran)
        self._guard = SiteGuard(model, values, self.pair.inside(), names, lambda p: spelled[id(p)])

    @property
    def unlooked(self) -> str | None:
        """What the watch has not looked at, in a sentence."""
        return self._guard.unlooked if self._guard is not None else None

    def admit_hooks(self, names: Sequence[str]) -> None:
        """Ignore hooks of functions with these names on modules inside: the engine that replays runs them."""
        if self._model_guard is not None:
            self._model_guard.admit_hooks(names)

    def check(self, differs: Callable[[], Difference | None]) -> None:
        """Raise `StateChanged` if something baked into the graphs has changed.

        For values that the code reads, `differs` checks whether the change has an effect on the operations.
        """
        if self._guard is None or self._guard.holds():
            return
        found = self._guard.look(differs, audited=False)
        if found is None:
            return
        raise StateChanged(
            f"{self.name}: {found.why}",
            rule="state-changed",
            details=[f"at {found.difference}"] if found.difference is not None else (),
            why="the graphs keep the state of their capture.",
            fix="undo the change, or call .reset() and capture again after it.",
        )

    def agree(self) -> None:
        """Note that an audit found the same operations."""
        if self._guard is not None:
            self._guard.agree()


def _modules_of(function: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules that a function can reach, without those inside others."""
    found = [value for value in reachable(function) if isinstance(value, torch.nn.Module)]
    inside = {id(inner) for module in found for inner in _children(module)}
    return [module for module in found if id(module) not in inside]


def _children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (inner for inner in module.modules() if inner is not module)
